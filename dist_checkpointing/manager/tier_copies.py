"""Copies of a step from the disks into the store, in the background, by one rank or by one of each
machine.

Rank 0 puts an order below the root of the run. The lowest rank of every other disk looks for it
while its disk has something that is not in the store, does its part, and puts a report. No
collective is used: all of this is behind the training, and a machine may be gone at any time. See
docs/design/012-fast-disks.md for each point where it may be cut off.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal

from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import file_writer, location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import (
    Heartbeats,
    delete_below,
    parsed_object,
)
from dist_checkpointing.format.commit import (
    DATA,
    CheckpointingConfig,
    begin_attempt,
    is_committed,
    tolerant,
)
from dist_checkpointing.format.leftovers import CONFIG_FNAME, attempt_of
from dist_checkpointing.format.run_steps import latest_step
from dist_checkpointing.format.seal import SEAL_NAME, Seal, read_seal
from dist_checkpointing.manager.disks import FastDisks, rows_held
from dist_checkpointing.manager.places import Place
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.threads import fill, in_threads

logger: logging.Logger = logging.getLogger(__name__)
ORDER_NAME: Final = ".dckpt/drain.json"
REPORTS: Final = ".dckpt/drain"
_MAX_BYTES: Final = 1 << 28
_THREADS: Final = 4
_MOST_RELEASED: Final = 1000
_MOST_FINDINGS: Final = 10
_FIRST_PAUSE: Final = 0.02
_LAST_PAUSE: Final = 2.0
_BEAT_SECONDS: Final = 10.0
SILENT_SECONDS: Final = 90.0
MEETING_SECONDS: Final = 10.0
Phase = Literal["upload", "verify"]


@dataclass(frozen=True, slots=True)
class Order:
    """What every disk does next: copy its files into the store, or read back a part of the copy.

    Later orders have higher numbers. ``attempt`` is the name of the save on the disks, ``copy``
    that of the attempt in the store, which is the copy.
    """

    number: int
    phase: Phase
    folder: str
    attempt: str
    copy: str

    def carried_out(
        self, root: ObjectPath, disks: FastDisks, parts: Mapping[str, Collection[int]]
    ) -> list[str]:
        """Do the part of one disk; the names of the files that were copied.

        ``parts`` are the rows of the seal that this disk copies of each save, if not all it has.

        Raises:
            CorruptCheckpointError: if a part of the copy is not what was saved.
            CheckpointingException: if it cannot be read.
            OSError: if the disk or the store fails.
        """
        source, target = disks.folder / self.folder, root / self.folder / DATA / self.copy
        if self.phase == "verify":
            verify_checkpoint(target, rank=disks.number, world_size=len(disks.leaders))
            return []
        seal, attempt = read_seal(target), self.attempt
        if seal is None or seal.attempt != attempt:
            return []
        files = [*seal.files.values()]
        rows = rows_held(source, seal)
        names = [files[row].name for row in sorted(rows.intersection(parts.get(attempt, rows)))]
        in_threads(lambda name: put_file(source / name, target / name), names, _THREADS)
        return names

    def report_of(self, root: ObjectPath, disk: int) -> ObjectPath:
        """Where the report of a disk is put."""
        return root / REPORTS / self.copy / f"{self.phase}-{disk}.json"


def put_file(source: Path, target: Location) -> None:
    """Copy a file."""
    file = file_writer.create(target.parent, target.name)
    try:
        for block in location.blocks(source, file.block_bytes):
            file.write([block], len(block), stays=True)
    except BaseException:
        file.give_up()
        raise
    file.close(is_durable=True)


class Copier:
    """What the disk of this rank keeps until it is in the store; this one keeps and copies nothing.

    ``near`` is the run on the disk, ``home`` the run in the store, or the same one. ``pending`` has
    the steps with the names of their saves; it is replaced, never changed. ``parts`` says what this
    disk copies of a save, where others hold some of it too.
    """

    def __init__(self, near: RunFolder, home: RunFolder) -> None:
        self._near, self._home = near, home
        self.pending: Mapping[int, str] = {}
        self.parts: dict[str, Collection[int]] = {}
        self._changed = threading.Condition()
        self._is_woken = self._is_ending = False
        self._pause = _FIRST_PAUSE  # between two looks for orders: often after each save
        self._thread: Thread | None = None

    def resume(self, whole: Mapping[int, Seal], parts: Mapping[str, Collection[int]]) -> None:
        """Keep the steps that the disks hold together, whatever is on this disk."""
        with self._changed:
            self.pending, self.parts = {s: seal.attempt for s, seal in whole.items()}, {**parts}

    def keep(self, step: int) -> None:
        """Keep what this run has saved of a step."""
        folder = self._near.folder(step)
        name = attempt_of(folder)
        if name is not None:
            with tolerant(f"what {folder} holds is copied with what others have sent"):
                seal = read_seal(folder)  # before others send copies of what they have
                if seal is not None:
                    self.parts = {**self.parts, name: rows_held(folder, seal)}
            with self._changed:
                self.pending = {**self.pending, step: name}

    def forget(self, steps: Collection[int]) -> None:
        """Do not keep these steps any more."""
        with self._changed:
            self.pending = {s: name for s, name in self.pending.items() if s not in steps}
            names = {*self.pending.values()}
            self.parts = {name: rows for name, rows in self.parts.items() if name in names}

    def start(self) -> None:
        """Let the thread copy what is not in the store yet."""
        with self._changed:
            self._is_woken, self._pause = True, _FIRST_PAUSE
            self._changed.notify_all()
            if self._thread is None and self.pending:
                self._thread = Thread(target=self._work, name="drain", daemon=True)
                self._thread.start()

    def delete(self, step: int) -> None:
        """Delete a step; see RunFolder."""
        self._near.delete(step)

    def copy_if_pending(self, step: int) -> None:
        """Copy a step, unless that is done, or needs not be done."""

    def finish(self) -> None:
        """Wait for the copies."""

    def _work(self) -> None:
        """What the thread does."""

    def end(self) -> None:
        """End the thread, once it has done what it is at."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._is_ending = None, False


class StoreCopier(Copier):
    """Rank 0's side: copies into the store what the disks hold together, by orders to each disk."""

    def __init__(
        self,
        near: RunFolder,
        home: RunFolder,
        place: Place,
        disks: FastDisks,
    ) -> None:
        super().__init__(near, home)
        self._place, self._disks = place, disks
        self._root: Any = home.root
        self._orders_given = 0
        self._whole: Mapping[int, Seal] = {}
        self._failed: dict[int, str] = {}
        self._released: dict[int, str] = {}
        self._copying = threading.Lock()

    def resume(self, whole: Mapping[int, Seal], parts: Mapping[str, Collection[int]]) -> None:
        """Keep the steps that the disks hold together, whatever is on this disk."""
        super().resume(whole, parts)
        self._whole = whole
        self._release(())

    def finish(self) -> None:
        """Wait for the copies.

        Raises:
            CheckpointingException: if the newest checkpoint could not be copied.
        """
        super().end()
        newest = max(self.pending, default=None)
        if newest is not None:
            finding = Finding(
                self._failed.get(newest, "it was not copied"),
                path=str(self._near.folder(newest)),
                remedy="It is on the disk; the next manager of this run tries again.",
            )
            raise CheckpointingException(f"step {newest} is not in the store", [finding])

    def end(self) -> None:
        """Leave no orders in the store, unless a step is not there yet."""
        if not self.pending:
            with tolerant("the last order stays in the store"):
                self._root.store.delete([(self._root / ORDER_NAME).key])

    def delete(self, step: int) -> None:
        """Delete a step on the disk of this rank and in the store; see RunFolder."""
        with self._copying:
            folders = [f for f in (self._near, self._home) if is_committed(f.folder(step))]
            if not folders and step not in self.pending:
                folders = [self._near]  # which says that there is no such step
            for folder in folders:
                folder.delete(step)
            self.forget({step})

    def copy_if_pending(self, step: int) -> None:
        """Copy a step, unless that is done, or needs not be done."""
        with self._copying:
            if step in self.pending:
                self._copy(step)
                self._release({step})

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken or self._is_ending)
                self._is_woken, is_last = False, self._is_ending
            self._failed.clear()  # another commit, or the end: try once more
            while (step := self._next_step()) is not None:
                try:
                    self.copy_if_pending(step)
                except (OSError, CheckpointingException) as error:
                    logger.warning("step %d is not in the store yet: %s", step, error)
                    self._failed[step] = str(error)
                else:
                    self._near.apply_retention()

    def _next_step(self) -> int | None:
        """The next step to copy; given up are abandoned ones and what the store would not keep.

        Of those that are not due there, the newest is copied at the end.
        """
        with tolerant("nothing is copied into the store for now"):
            if pending := self.pending:
                abandoned = pending.keys() & self._near.record().abandoned
                wanted = pending.keys() - abandoned
                stored = {*self._home.committed_steps()}
                metrics = self._home.record().metrics | self._near.record().metrics
                history = stored.intersection(self._home.history()) | wanted
                newest, retention = {*sorted(wanted)[-1:]}, self._place.retention or Retention()
                dropped = {*retention.due(stored | wanted, newest, metrics, history).delete}
                early = self._not_due(wanted, history - wanted)
                given_up = abandoned | (wanted & dropped) | (early - newest)
                if given_up:
                    self._release(given_up)
                later = set() if self._is_ending else early
                return min(pending.keys() - given_up - later - self._failed.keys(), default=None)
        return None

    def _not_due(self, steps: Collection[int], stored: Collection[int]) -> set[int]:
        """Those of the steps that the store does not ask for, which has ``stored`` ones."""
        last, early = None, set()
        for step in sorted({*steps, *stored}):
            if step in stored or self._place.is_due(step, last):
                last = step
            else:
                early.add(step)
        return early

    def _release(self, steps: Collection[int]) -> None:
        """Let all disks forget steps that need not be kept for the store any more."""
        self._released |= {step: name for step, name in self.pending.items() if step in steps}
        for step in [*self._released][:-_MOST_RELEASED]:
            del self._released[step]
        self.forget(steps)
        # The next order says it again.
        with tolerant("the other disks keep their parts a little longer"):
            self._put(None)

    def _copy(self, step: int) -> None:
        """Copy a step as a whole, or not at all."""
        source, target = self._near.folder(step), self._home.folder(step)
        seal = self._whole.get(step)
        if seal is None or seal.attempt != self.pending[step]:
            if not is_committed(source):
                return  # deleted by hand
            seal = read_seal(source)
        if seal is None:
            finding = Finding("the checkpoint has no seal", path=str(source))
            raise CorruptCheckpointError(f"step {step} cannot be copied", [finding])
        config = CheckpointingConfig(**seal.config)
        newest, record = latest_step(self._home.root), self._near.record()
        parent, _ = self._home.begin(step, newest)
        metric = record.metrics.get(step)
        # What could not be copied at first comes after newer steps.
        is_latest = newest is None or newest < step or newest in record.abandoned
        names = [*seal.files, SEAL_NAME, CONFIG_FNAME]
        # What is there now is the copy of a save that was damaged, and that this one replaces.
        attempt = begin_attempt(target, names, Durability.FSYNC, overwrite=is_committed(target))
        try:
            self._home.claimed(step, metric, parent, seal.attempt)
            location.write(attempt.folder / SEAL_NAME, seal.to_json())
            location.write(attempt.folder / CONFIG_FNAME, json.dumps(asdict(config)).encode())
            save = (target.name, seal.attempt, attempt.id)
            missing = seal.files.keys() - self._carry_out("upload", *save)
            if missing:
                problem = "the file is on none of the disks as it was saved"
                findings = [Finding(problem, path=f"{target.name}/{n}") for n in sorted(missing)]
                raise CorruptCheckpointError(f"step {step} is not whole", findings[:_MOST_FINDINGS])
            self._carry_out("verify", *save)
            attempt.commit(config)
        except BaseException:
            attempt.abandon()
            raise
        self._home.committed(step, is_latest=is_latest)

    def _put(self, order: Order | None) -> None:
        if self._disks.are_many:
            content = {
                "run": self._disks.run,
                "order": None if order is None else asdict(order),
                "settled": self._released,
            }
            location.write(self._root / ORDER_NAME, json.dumps(content).encode())

    def _carry_out(self, phase: Phase, folder: str, attempt: str, copy: str) -> set[str]:
        """Let every disk do its part; the names of all files that were copied.

        Raises:
            CorruptCheckpointError: if a part of the copy is not what was saved.
            CheckpointingException: if a disk fails or does not answer; names it.
            OSError: if the disk of this rank or the store fails.
        """
        self._orders_given += 1
        order = Order(self._orders_given, phase, folder, attempt, copy)
        self._put(order)
        try:
            return {*order.carried_out(self._root, self._disks, self.parts), *self._reported(order)}
        finally:
            if self._disks.are_many:
                with tolerant(f"reports of copying {folder} stay in the store"):
                    self._put(None)
                    delete_below(self._root / REPORTS / copy)

    def _reported(self, order: Order) -> set[str]:
        """What the other disks report, when all have."""
        disks = range(1, len(self._disks.leaders))
        waiting = {order.report_of(self._root, disk).key: disk for disk in disks}
        names: set[str] = set()
        last: object = None
        silent, pause = 0.0, _FIRST_PAUSE
        while waiting:
            reports = self._root / REPORTS / order.copy
            seen = {info.key: info for info in self._root.store.list_below(reports.prefix)}
            for key in sorted(waiting.keys() & seen.keys()):
                report = parsed_object(self._root.store.get(key), reports)
                disk = waiting.pop(key)
                if "error" in report:
                    kind = CorruptCheckpointError if report["is_damage"] else CheckpointingException
                    message = f"a disk could not {order.phase} its part of {order.folder}"
                    raise kind(message, [self._finding(str(report["error"]), order, disk)])
                names.update(map(str, report["files"]))
            # What this process slept is counted: it may have been stopped itself.
            silent, last = (0.0 if seen != last else silent + pause), seen
            if silent > SILENT_SECONDS:
                findings = [
                    self._finding(
                        f"this disk did nothing for {SILENT_SECONDS:.0f} s",
                        order,
                        disk,
                        expected=f"a report that it did {order.phase} its part",
                        remedy="Is its machine gone? The next manager of this run tries again if "
                        "all disks are there, and goes on from the store if one is not.",
                    )
                    for disk in sorted(waiting.values())
                ]
                message = f"{order.folder} was not copied into the store"
                raise CheckpointingException(message, findings)
            if waiting:
                threading.Event().wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        return names

    def _finding(self, problem: str, order: Order, disk: int, **more: str) -> Finding:
        path = f"{self._disks.names[disk]}/{order.folder}"
        return Finding(problem, path=path, ranks=(self._disks.leaders[disk],), **more)


class PartCopier(Copier):
    """The side of every other disk: a thread that looks for orders, and reports."""

    def __init__(self, near: RunFolder, home: RunFolder, disks: FastDisks) -> None:
        super().__init__(near, home)
        self._root: Any = home.root
        self._disks = disks

    def delete(self, step: int) -> None:
        """Delete the part of a step, if there is one; see RunFolder."""
        self.forget({step})
        if is_committed(self._near.folder(step)):
            self._near.delete(step)

    def _work(self) -> None:
        done, path = 0, self._root / ORDER_NAME
        while self._waited():
            try:
                content = parsed_object(location.read_regular(path, _MAX_BYTES) or b"{}", path)
                if content.get("run", self._disks.run) != self._disks.run:
                    return  # another manager has taken over
                released = {(int(step), name) for step, name in content.get("settled", {}).items()}
                with self._changed:
                    gone = dict(released & self.pending.items())
                    self.forget(gone)
                if gone:
                    self._near.apply_retention()
                order = Order(**content["order"]) if content.get("order") else None
                if order is not None and order.number > done:
                    self._report(order)
                    done, self._pause = order.number, _FIRST_PAUSE
            except (OSError, CheckpointingException, TypeError, ValueError) as error:
                folder = self._disks.folder
                logger.warning("the store did not take the part of %s: %s", folder, error)

    def _waited(self) -> bool:
        """Wait for something to keep, and then for a while; False if it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending or self.pending)
            self._changed.wait_for(lambda: self._is_ending, self._pause)
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return not self._is_ending

    def _report(self, order: Order) -> None:
        beats = self._root / REPORTS / order.copy / f"beat-{self._disks.number}"
        heartbeats = Heartbeats(beats, _BEAT_SECONDS, "drain-beats")
        report: dict[str, object]
        try:
            report = {"files": order.carried_out(self._root, self._disks, self.parts)}
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            is_damage = isinstance(error, CorruptCheckpointError)
            report = {"error": f"{type(error).__name__}: {error}", "is_damage": is_damage}
        finally:
            heartbeats.stop()
            heartbeats.join()
        path = order.report_of(self._root, self._disks.number)
        location.write(path, json.dumps(report).encode())


def after_rank0(comm: Comm, step: str, work: Callable[[], object]) -> None:
    """Let a thread of rank 0 do what takes any time; if it fails, all ranks raise. Collective.

    The ranks meet every few seconds, so that none takes another for dead. ``work`` of other ranks
    than 0 is not called.
    """
    done: Future[object] = Future()

    def is_done() -> bool:
        if not wait([done], MEETING_SECONDS).done:
            return False
        done.result()
        return True

    if comm.rank == 0:
        Thread(target=fill, args=(done, work), name="long-work", daemon=True).start()
    while not comm.from_rank0(step, is_done):
        pass
