"""Copies of a step from one place to the next, in the background, by one rank or by one of each
machine.

Rank 0 puts an order below the root of the run. The lowest rank of every other disk looks for it
while its disk has something that is not in the store, does its part, and puts a report. No
collective is used: all of this is behind the training, and a machine may be gone at any time. See
docs/design/012-fast-disks.md for each point where it may be cut off.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Final, Literal

from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import file_writer, location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath, read_object
from dist_checkpointing.filesystem.object_store_locks import delete_below, parsed_object
from dist_checkpointing.format.commit import DATA
from dist_checkpointing.format.leftovers import is_in_attempt
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.manager.disks import FastDisks
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
ORDER_NAME: Final = ".dckpt/drain.json"
REPORTS: Final = ".dckpt/drain"
_MAX_BYTES: Final = 1 << 28
_THREADS: Final = 4
_MOST_SETTLED: Final = 1000
_FIRST_PAUSE: Final = 0.02
_LAST_PAUSE: Final = 2.0
_BEAT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 90.0
Phase = Literal["upload", "verify"]


@dataclass(frozen=True, slots=True)
class Order:
    """What every disk does next.

    Attributes:
        number: Number of the order; later ones have higher numbers.
        phase: Whether the files on the disk are copied, or a part of the copy is read back.
        folder: Name of the folder of the step.
        attempt: Name of the save on the disks.
        copy: Name of the attempt in the store, which is the copy.
    """

    number: int
    phase: Phase
    folder: str
    attempt: str
    copy: str

    def carried_out(self, root: ObjectPath, disk: Path, disks: FastDisks) -> list[str]:
        """Do the part of one disk; the names of the files that were copied.

        Raises:
            CorruptCheckpointError: if a part of the copy is not what was saved.
            CheckpointingException: if it cannot be read.
            OSError: if the disk or the store fails.
        """
        source, target = disk / self.folder, root / self.folder / DATA / self.copy
        if self.phase == "verify":
            verify_checkpoint(target, rank=disks.own, world_size=len(disks.leaders))
            return []
        seal = read_seal(target)
        if seal is None or not is_in_attempt(source, self.attempt):
            return []
        files = seal.files.values()
        own = [
            file.name for file in files if location.size_of(source / file.name) == file.num_bytes
        ]
        in_threads(lambda name: put_file(source / name, target / name), own, _THREADS)
        return own


def put_file(source: Path, target: Location) -> None:
    """Copy a file."""
    file = file_writer.create(target)
    try:
        for block in location.blocks(source, file.block_bytes(is_hashed=False)):
            file.write([block], len(block), stays=True)
    except BaseException:
        file.give_up()
        raise
    file.close(is_durable=True)


class Orders:
    """Rank 0's side: gives orders, and waits for the reports.

    Args:
        root: folder of the run in the store.
        disk: folder of the run on the disk of this rank.
        disks: which ranks share a disk.
    """

    def __init__(self, root: ObjectPath, disk: Path, disks: FastDisks) -> None:
        self._root, self._disk, self._disks = root, disk, disks
        self._number = 0
        self._never = Event()
        self._settled: dict[int, str] = {}

    def settle(self, saves: Mapping[int, str]) -> None:
        """Tell the other disks of saves that they need not keep for the store any more."""
        self._settled |= saves
        for step in [*self._settled][:-_MOST_SETTLED]:
            del self._settled[step]
        try:
            self._tell(None)
        except OSError as error:  # the next order says it again
            logger.warning("the other disks keep their parts a little longer: %s", error)

    def _tell(self, order: Order | None) -> None:
        if not self._disks.are_many:
            return
        path = self._root / ORDER_NAME
        content = {
            "run": self._disks.run,
            "order": None if order is None else asdict(order),
            "settled": self._settled,
        }
        path.store.put(path.key, json.dumps(content).encode())

    def carry_out(self, phase: Phase, folder: str, attempt: str, copy: str) -> set[str]:
        """Let every disk do its part; the names of all files that were copied.

        Raises:
            CorruptCheckpointError: if a part of the copy is not what was saved.
            CheckpointingException: if a disk fails or does not answer; names it.
            OSError: if the disk of this rank or the store fails.
        """
        self._number += 1
        order = Order(self._number, phase, folder, attempt, copy)
        self._tell(order)
        try:
            own = order.carried_out(self._root, self._disk, self._disks)
            return {*own, *self._reported(order)}
        finally:
            if self._disks.are_many:
                self._end(order)

    def _end(self, order: Order) -> None:
        try:
            self._tell(None)
            delete_below(self._root / REPORTS / order.copy)
        except OSError as error:
            logger.warning("reports of copying %s stay in the store: %s", order.folder, error)

    def _reported(self, order: Order) -> set[str]:
        folder = self._root / REPORTS / order.copy
        waiting = {_report_name(order, n): n for n in range(1, len(self._disks.leaders))}
        found: set[str] = set()
        last: object = None
        silent, pause = 0.0, _FIRST_PAUSE
        while waiting:
            seen = {
                i.key.removeprefix(folder.prefix): i for i in folder.store.list_below(folder.prefix)
            }
            for name in sorted(waiting.keys() & seen.keys()):
                found |= self._result(folder / name, order, waiting.pop(name))
            # What this process slept is counted: it may have been stopped itself.
            silent, last = (0.0 if seen != last else silent + pause), seen
            if silent > _SILENT_SECONDS:
                raise self._silent(order, waiting.values())
            if waiting:
                self._never.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        return found

    def _result(self, path: ObjectPath, order: Order, number: int) -> set[str]:
        report = parsed_object(path.store.get(path.key), path)
        if "error" not in report:
            return {str(name) for name in report["files"]}
        kind = CorruptCheckpointError if report["is_damage"] else CheckpointingException
        finding = Finding(
            str(report["error"]),
            path=f"{self._disks.places[number]}/{order.folder}",
            ranks=(self._disks.leaders[number],),
        )
        raise kind(f"a disk could not {order.phase} its part of {order.folder}", [finding])

    def _silent(self, order: Order, numbers: Iterable[int]) -> CheckpointingException:
        findings = [
            Finding(
                f"this disk did nothing for {_SILENT_SECONDS:.0f} s",
                expected=f"a report that it did {order.phase} its part",
                path=f"{self._disks.places[number]}/{order.folder}",
                ranks=(self._disks.leaders[number],),
                remedy="Is its machine gone? The next manager of this run tries again if all "
                "disks are there, and goes on from the store if one is not.",
            )
            for number in sorted(numbers)
        ]
        return CheckpointingException(f"{order.folder} was not copied into the store", findings)


class PartCopier:
    """The side of every other disk: a thread that looks for orders, and reports.

    Args:
        root: folder of the run in the store.
        disk: folder of the run on the disk of this rank.
        disks: which ranks share a disk.
        on_settled: called when a save need not be kept for the store any more.
    """

    def __init__(
        self, root: ObjectPath, disk: Path, disks: FastDisks, on_settled: Callable[[], None]
    ) -> None:
        self._root, self._disk, self._disks = root, disk, disks
        self._on_settled = on_settled
        self._pending: dict[int, str] = {}
        self._changed = Condition()
        self._pause = _FIRST_PAUSE
        self._is_stopping = False
        self._thread: Thread | None = None

    @property
    def pending(self) -> set[int]:
        """The steps that the disk keeps for the store."""
        with self._changed:
            return set(self._pending)

    def keep(self, saves: Mapping[int, str]) -> None:
        """Keep saves, by their names, until they are in the store or given up."""
        with self._changed:
            self._pending |= saves
            self._pause = _FIRST_PAUSE
            self._changed.notify_all()
            if self._thread is None and self._pending:
                self._thread = Thread(target=self._work, name="drain", daemon=True)
                self._thread.start()

    def forget(self, step: int) -> None:
        """Do not keep a step, which is deleted."""
        with self._changed:
            self._pending.pop(step, None)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        done = 0
        while self._waited():
            try:
                said = read_object(self._root / ORDER_NAME, _MAX_BYTES)
                content = parsed_object(said or b"{}", self._root / ORDER_NAME)
                if content.get("run", self._disks.run) != self._disks.run:
                    return  # another manager has taken over
                self._settle({int(step): n for step, n in content.get("settled", {}).items()})
                order = Order(**content["order"]) if content.get("order") else None
                if order is not None and order.number > done:
                    self._report(order)
                    done, self._pause = order.number, _FIRST_PAUSE
            except (OSError, CheckpointingException, TypeError, ValueError) as error:
                logger.warning("the store did not take the part of %s: %s", self._disk, error)

    def _waited(self) -> bool:
        """Wait for something to keep, and then for a while; False if it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._pending)
            self._changed.wait_for(lambda: self._is_stopping, self._pause)
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return not self._is_stopping

    def _settle(self, settled: Mapping[int, str]) -> None:
        with self._changed:
            gone = [step for step, name in self._pending.items() if settled.get(step) == name]
            for step in gone:
                del self._pending[step]
        if gone:
            self._on_settled()

    def _report(self, order: Order) -> None:
        reports = self._root / REPORTS / order.copy
        with _beating(reports / f"beat-{self._disks.own}"):
            report: dict[str, object]
            try:
                report = {"files": order.carried_out(self._root, self._disk, self._disks)}
            except Exception as error:  # noqa: BLE001 - rank 0 tells it
                is_damage = isinstance(error, CorruptCheckpointError)
                report = {"error": f"{type(error).__name__}: {error}", "is_damage": is_damage}
        path = reports / _report_name(order, self._disks.own)
        path.store.put(path.key, json.dumps(report).encode())


def _report_name(order: Order, number: int) -> str:
    return f"{order.phase}-{number}.json"


@contextmanager
def _beating(path: ObjectPath) -> Iterator[None]:
    """Put an object again and again while the body runs, so that others see that it goes on."""
    done = Event()

    def beat() -> None:
        for count in itertools.count():
            try:
                path.store.put(path.key, b"%d" % count)
            except OSError as error:
                logger.warning("%s: no sign of life (%s)", path, error.strerror)
            if done.wait(_BEAT_SECONDS):
                return

    thread = Thread(target=beat, name="drain-beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_LOOK_SECONDS: Final = 10.0


def after_rank0(comm: Comm, step: str, work: Callable[[], object]) -> None:
    """Let rank 0 do something that takes any time; if it fails, all ranks raise alike. Collective.

    The ranks meet every few seconds, so that none takes another for dead.

    Args:
        comm: the ranks.
        step: name of the step, for errors.
        work: called in a thread of rank 0.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    def look() -> bool:
        wait([done], _LOOK_SECONDS)
        if done.done():
            done.result()
        return done.done()

    if comm.rank == 0:
        Thread(target=run, name="long-work", daemon=True).start()
    while not comm.from_rank0(step, look):
        pass
