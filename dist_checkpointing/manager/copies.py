"""Copies of steps behind the training: to other machines, and to the last place.

A thread of each rank makes them, over a comm of its own. See docs/design/012-fast-disks.md for each
point where they may be cut off.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
)
from dist_checkpointing.filesystem.location import (
    check_room,
    fsync_folders,
    read_bytes,
    relative,
    write,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import (
    Attempt,
    CheckpointingConfig,
    StoreAttempt,
    begin_attempt,
    is_committed,
    tolerant,
)
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME, attempt_of
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.format.run_steps import latest_step
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME, Seal, read_seal
from dist_checkpointing.manager.disks import FastDisks, MachineFolders, rows_held
from dist_checkpointing.manager.peer_files import copies_to_peers, copy_file, send_files
from dist_checkpointing.manager.places import Place
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.threads import in_threads, run_in_background

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
_THREADS: Final = 4
_MOST_FINDINGS: Final = 10
_MEETING_SECONDS: Final = 10.0


class _Task(NamedTuple):
    """What the threads of all ranks do next.

    They send ``saved`` to peers, and copy it to further places of its machine. Then they copy
    ``required``, or else all that is due in the last place, and the newest step too if this is the
    last task.
    """

    saved: int | None = None
    required: int | None = None
    is_last: bool = False


class Copier:
    """Makes the copies of one run, on one rank; making one is collective.

    ``copy``, ``require`` and ``finish`` are called on all ranks, in the same order. ``pending`` has
    the steps that a disk keeps until they are in the last place, with the names of their saves, and
    ``unsent`` those that are not at peers or in further places yet. Both are replaced, never
    changed.
    """

    def __init__(
        self,
        comm: Comm,
        machine: MachineFolders,
        home: RunFolder,
        disks: FastDisks,
        places: Sequence[Place],
        whole: Mapping[int, Seal],
    ) -> None:
        self._machine, self._home, self._disks = machine, home, disks
        self._near, *further = machine.folders
        nearest, *between, self._place = places
        self._num_copies = nearest.copies if disks.are_many else 0
        self._whole = whole
        self._spreads: list[Callable[[int], None]] = [
            *([self._send_to_peers] if self._num_copies else []),
            *(partial(self._copy_on_machine, *pair) for pair in zip(between, further, strict=True)),
        ]
        self._left = [*whole] if self._spreads else []
        self.pending: Mapping[int, str] = {step: seal.attempt for step, seal in whole.items()}
        self.unsent: tuple[int, ...] = ()
        self._failed: dict[int, str] = {}
        self._changed = threading.Lock()
        self._tasks: queue.Queue[tuple[_Task, Future[None]]] = queue.Queue()
        self._comm = comm.duplicate()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def keep(self, step: int) -> None:
        """Keep what a disk has of a step, on its lowest rank, until that is in the last place."""
        name = attempt_of(self._machine.folder(step))
        if name is not None:
            with self._changed:
                self.pending = {**self.pending, step: name}

    def copy(self, step: int | None = None) -> None:
        """Copy a step that is committed, and others that are left, behind the training."""
        if step is not None and self._spreads:
            with self._changed:
                self.unsent = (*self.unsent, step)
        self._tasks.put((_Task(saved=step), Future()))

    def require(self, step: int | None) -> None:
        """Wait for what is under way, and until a step is there, if it must come there.

        Raises:
            CheckpointingException: if it could not be copied; the same one on all ranks.
        """
        done: Future[None] = Future()
        self._tasks.put((_Task(required=step), done))
        done.result()

    def finish(self) -> None:
        """Wait for all copies, and end the thread.

        Raises:
            CheckpointingException: on rank 0, if the newest checkpoint could not be copied.
        """
        self.stop()
        self._thread.join()
        newest = max(self.pending, default=None)
        if newest is not None and self._comm.rank == 0:
            finding = Finding(
                self._failed.get(newest, "it was not copied"),
                path=str(self._machine.folder(newest)),
                remedy="It is on the disk; the next manager of this run tries again.",
            )
            raise CheckpointingException(f"step {newest} is not in the last place", [finding])

    def stop(self) -> None:
        """End the thread when it has done what it was asked to."""
        self._tasks.put((_Task(is_last=True), Future()))

    def forget(self, steps: Collection[int]) -> None:
        """Do not keep these steps any more."""
        with self._changed:
            self.pending = {s: name for s, name in self.pending.items() if s not in steps}

    def _work(self) -> None:
        broken: Exception | None = None
        is_last = False
        while not is_last:
            task, done = self._tasks.get()
            is_last = task.is_last
            try:
                if broken is not None:
                    raise broken
                self._do(task)
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
                done.set_exception(error)
                if task.required is None and broken is None:
                    logger.warning("copies were not made: %s", error)
                if isinstance(error, RankFailedError) and error.silent_ranks and broken is None:
                    broken = error
                    self._failed = dict.fromkeys(self.pending, str(error))
        self._comm.close()

    def _do(self, task: _Task) -> None:
        """Do a task together with the other ranks. Collective."""
        while self._left:  # by an earlier manager, perhaps before a machine was lost
            self._spread(self._left.pop())
        if task.saved is not None and self._spreads:
            self._spread(task.saved)
            with self._changed:
                self.unsent = self.unsent[1:]
        if task.required is not None:
            self._copy(task.required)
            return
        self._failed.clear()  # another commit, or the end: try once more
        choose = partial(self._next_step, is_last=task.is_last)
        while True:
            given_up, step = self._on_rank0("choosing what is copied next", choose)
            if given_up:
                self._release(given_up)
            if step is None:
                return
            try:
                self._copy(step)
            except CheckpointingException as error:
                if isinstance(error, RankFailedError) and error.silent_ranks:
                    raise
                self._failed[step] = str(error)
                if self._comm.rank == 0:
                    logger.warning("step %d is not in the last place yet: %s", step, error)

    def _next_step(self, *, is_last: bool) -> tuple[Mapping[int, str], int | None]:
        """What need not be copied any more, and the next step to copy, as rank 0 knows.

        Not copied are abandoned steps and what the last place would not keep. Of those that are not
        due there, the newest is copied at the end.
        """
        pending = self.pending
        with tolerant("nothing is copied to the last place for now"):
            if pending:
                abandoned = pending.keys() & self._near.record().abandoned
                wanted = pending.keys() - abandoned
                stored = {*self._home.committed_steps()}
                metrics = self._home.record().metrics | self._near.record().metrics
                history = stored.intersection(self._home.history()) | wanted
                newest, retention = {*sorted(history)[-1:]}, self._place.retention or Retention()
                dropped = {*retention.due(stored | wanted, newest, metrics, history).delete}
                early = self._not_due(wanted, history - wanted)
                given_up = abandoned | (wanted & dropped) | (early - newest)
                later = set() if is_last else early
                left = pending.keys() - given_up - later - self._failed.keys()
                return {step: pending[step] for step in given_up}, min(left, default=None)
        return {}, None

    def _not_due(self, steps: Collection[int], stored: Collection[int]) -> set[int]:
        """Those of the steps that the last place does not ask for, which has ``stored`` ones."""
        last, early = None, set()
        for step in sorted({*steps, *stored}):
            if step in stored or self._place.is_due(step, last):
                last = step
            else:
                early.add(step)
        return early

    def _release(self, steps: Mapping[int, str]) -> None:
        """Let the disk of this rank delete steps as retention says: they need no more copying."""
        kept = self.pending
        self.forget([step for step, name in steps.items() if kept.get(step) == name])
        for folder in self._machine.folders if self._disks.leads else ():
            folder.apply_retention()

    def _copy(self, step: int) -> None:
        """Copy a step as a whole, or not at all, if it is not there. Collective."""
        comm, what = self._comm, f"copying step {step} to the last place"
        content = self._on_rank0(what, partial(self.seal_of, step))
        if content is None:
            self.forget({step})
            return
        seal, source = Seal.from_json(content), self._machine.folder(step)

        def held() -> tuple[set[int], bytes]:
            rows = rows_held(source, seal)
            is_noted = rows and self._disks.leads
            return rows, read_bytes(source / ATTEMPT_NAME, MAX_SEAL_BYTES) if is_noted else b""

        held_by_ranks = comm.exchange(what, held)
        noted = next(filter(None, (content for _, content in held_by_ranks)), b"")
        files, mine = [*seal.files.values()], []
        missing = []
        for row, file in enumerate(files):
            ranks = [rank for rank, (rows, _) in enumerate(held_by_ranks) if row in rows]
            if not ranks:
                missing.append(f"{source.name}/{file.name}")
            elif ranks[row % len(ranks)] == comm.rank and file.name != ATTEMPT_NAME:
                mine.append(file.name)
        if missing:
            problem = "the file is on none of the disks as it was saved"
            findings = [Finding(problem, path=name) for name in sorted(missing)[:_MOST_FINDINGS]]
            raise CorruptCheckpointError(f"step {step} is not whole", findings)
        home = self._home
        copy = _Copy(home.staged(step) if home.is_on_disk else home.folder(step), seal, noted)
        target = copy.folder / self._on_rank0(what, lambda: self._begin(step, copy))
        try:
            put = partial(in_threads, lambda n: copy_file(source / n, target / n), mine, _THREADS)
            self._together(what, put)
            self._on_rank0(what, copy.make_whole)
            # Damage on a disk is found here, and goes no further.
            rank, size = comm.rank, comm.world_size
            self._together(what, lambda: verify_checkpoint(target, rank=rank, world_size=size))
            self._on_rank0(what, partial(self._commit, step, copy))
        except BaseException:
            copy.abandon()
            raise
        self._release({step: seal.attempt})

    def seal_of(self, step: int) -> bytes | None:
        """The seal of a step on rank 0, if it waits for its copy and was not deleted by hand."""
        if step not in self.pending:
            return None
        seal = self._whole.get(step)
        if seal is None or seal.attempt != self.pending[step]:
            folder = self._machine.folder(step)
            if not is_committed(folder):
                return None
            seal = read_seal(folder)
            if seal is None:
                finding = Finding("the checkpoint has no seal", path=str(folder))
                raise CorruptCheckpointError(f"step {step} cannot be copied", [finding])
        return seal.to_json()

    def _begin(self, step: int, copy: _Copy) -> str:
        """Begin the copy of a step, on rank 0; the name of the folder below it of the files."""
        newest, record = latest_step(self._home.root), self._near.record()
        parent, _ = self._home.begin(step, newest)
        # What could not be copied at first comes after newer steps.
        self._is_latest = newest is None or newest < step or newest in record.abandoned
        data = copy.begin()
        try:
            self._home.claimed(step, record.metrics.get(step), parent, copy.seal.attempt)
        except BaseException:
            copy.abandon()
            raise
        return data

    def _commit(self, step: int, copy: _Copy) -> None:
        """Put a whole copy in its place, on rank 0."""
        if self._home.is_on_disk:
            self._home.put_in_place(step)
        else:
            copy.commit()
        self._home.committed(step, is_latest=self._is_latest)

    def _together(self, what: str, work: Callable[[], T]) -> list[T]:
        """What ``work()`` returns on each rank; if it fails on one, all raise. Collective.

        It may take any time: the ranks meet every few seconds, so that none takes another for dead.
        """
        done = run_in_background(work, "copy")

        def is_done() -> bool:
            return bool(wait([done], _MEETING_SECONDS).done)

        while not all(self._comm.exchange(what, is_done)):
            pass
        return self._comm.exchange(what, done.result)

    def _on_rank0(self, what: str, work: Callable[[], T]) -> T:
        """What ``work()`` returns on rank 0; if it fails, all raise. Collective."""
        result: Any = self._together(what, lambda: work() if self._comm.rank == 0 else None)[0]
        return cast("T", result)

    def _spread(self, step: int) -> None:
        """Copy what each machine has saved of a step to where it is due. Collective."""
        for copy in self._spreads:
            try:
                copy(step)
            except CheckpointingException as error:
                if self._comm.rank == 0:
                    logger.warning("step %d does not have all copies: %s", step, error)
                if isinstance(error, RankFailedError) and error.silent_ranks:
                    raise

    def _copy_on_machine(self, place: Place, target: RunFolder, step: int) -> None:
        """Copy what each machine has of a step to a further place, if it is due. Collective."""
        what, source = f"copying step {step} to {target.root}", self._machine.folder(step)

        def is_due() -> bool:
            # Another save of this step is replaced, or some machine may not have this one yet.
            is_there = is_committed(target.folder(step))
            return is_there or place.is_due(step, target.newest())

        def copy() -> None:
            attempt, there = attempt_of(source), target.folder(step)
            if attempt is None or not (self._disks.leads and is_committed(source)):
                return
            if is_committed(there) and attempt_of(there) == attempt:
                return
            if (seal := read_seal(source)) is None:
                return
            files, rows = [*seal.files.values()], rows_held(source, seal)
            check_room(target.root, sum(files[row].num_bytes for row in rows))
            newest, record = latest_step(target.root), self._near.record()
            parent, _ = target.begin(step, newest)
            target.claimed(step, record.metrics.get(step), parent, attempt)
            staged = target.staged(step)
            others = [files[row].name for row in rows] + [SEAL_NAME, CONFIG_FNAME]
            for names in [ATTEMPT_NAME], [name for name in others if name != ATTEMPT_NAME]:
                in_threads(lambda name: copy_file(source / name, staged / name), names, _THREADS)
                fsync_folders(names, staged, to_root=True)
            target.put_in_place(step)
            is_latest = newest is None or newest < step or newest in record.abandoned
            target.committed(step, is_latest=is_latest)

        if self._on_rank0(what, is_due):
            self._together(what, copy)

    def _send_to_peers(self, step: int) -> None:
        """Send what each machine has saved of a step to others. Collective."""
        folder, what = self._machine.folder(step), f"copying step {step} to peers"

        def look() -> tuple[str | None, set[int], bytes]:
            name, seal = attempt_of(folder), None
            with suppress(CorruptCheckpointError):
                seal = read_seal(folder) if self._disks.leads and is_committed(folder) else None
            return (
                (name, set(), b"")
                if seal is None
                else (name, rows_held(folder, seal), seal.to_json())
            )

        parts = self._comm.exchange(what, look)
        known = next((part for part in parts if part[2]), None)
        if known is None or any(part[0] not in (None, known[0]) for part in parts):
            raise CheckpointingException("the disks hold other saves of it")
        files, rows = [*Seal.from_json(known[2]).files.values()], [part[1] for part in parts]
        transfers = copies_to_peers(files, self._disks, rows, self._num_copies)
        send_files(self._comm, folder, transfers)


class _Copy:
    """A copy of a checkpoint, which only rank 0 begins: what it copies is in ``seal``.

    In a store it is a checkpoint when it has been compared. On a disk it is one before that, in a
    folder of another name.
    """

    def __init__(self, folder: Location, seal: Seal, noted: bytes) -> None:
        self.folder, self.seal, self._noted = folder, seal, noted
        self._config = CheckpointingConfig(**seal.config)
        self._attempt: Attempt | StoreAttempt | None = None

    def begin(self) -> str:
        """Claim the folder, and write the seal; the name of the folder below it of the files."""
        names, name = [*self.seal.files.keys() - {ATTEMPT_NAME}, SEAL_NAME], self.seal.attempt
        # What is there now is the copy of a save that was damaged, and that this one replaces.
        overwrite, noted = is_committed(self.folder), self._noted
        attempt = begin_attempt(
            self.folder, names, Durability.FSYNC, overwrite=overwrite, name=name, noted=noted
        )
        self._attempt = attempt
        try:
            if isinstance(attempt, Attempt):
                write(attempt.folder / ATTEMPT_NAME, noted)
                attempt.make_durable()
            write(attempt.folder / SEAL_NAME, self.seal.to_json())
            if isinstance(attempt, StoreAttempt):  # where that is not the commit
                write(attempt.folder / CONFIG_FNAME, json.dumps(dict(self.seal.config)).encode())
        except BaseException:
            self.abandon()
            raise
        return relative(attempt.folder, self.folder)

    def make_whole(self) -> None:
        """Make a copy on a disk a checkpoint, durably, now that all its files are."""
        if isinstance(self._attempt, Attempt):
            fsync_folders(self.seal.files, self._attempt.folder, to_root=True)
            self._attempt.commit(self._config)

    def commit(self) -> None:
        """Make a copy in a store a checkpoint."""
        assert self._attempt is not None
        self._attempt.commit(self._config)

    def abandon(self) -> None:
        """Delete what there is of a copy that failed."""
        if self._attempt is not None:
            self._attempt.abandon()
            if isinstance(self._attempt, Attempt):
                with tolerant(f"{self.folder} stays until the next copy"):
                    remove_checkpoint(self._attempt.folder)
