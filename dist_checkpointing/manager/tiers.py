"""A run on fast disks and in a store: where to save, read from and keep its steps."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, cast

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_local_folder, as_location
from dist_checkpointing.filesystem.object_store import ObjectInfo, ObjectPath, ObjectStore
from dist_checkpointing.format.commit import (
    CheckpointingConfig,
    begin_attempt,
    data_folder,
    is_committed,
)
from dist_checkpointing.format.leftovers import (
    CONFIG_FNAME,
    attempt_of,
    number_of_attempt,
    number_of_save,
)
from dist_checkpointing.format.seal import SEAL_NAME, Seal, read_seal
from dist_checkpointing.manager.disks import FastDisks, is_part, whole_steps
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import Run, RunFolder
from dist_checkpointing.manager.tier_copies import Orders, PartCopier, after_rank0
from dist_checkpointing.serialization.save_steps import Disks, SaveHooks
from dist_checkpointing.storage.options import Durability

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NearStore(ObjectStore):
    """A bucket whose objects below one prefix are read from a folder, where they are.

    An object that is not in the folder, has another size there, or cannot be read there comes from
    the bucket. All else, and all that is written, is as in the bucket.

    Attributes:
        prefix: How the keys begin of objects that may be in the folder.
        folder: Where they are, by the rest of their keys.
        sizes: Bytes of these objects, by the rest of their keys.
    """

    prefix: str = ""
    folder: Path = Path()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def get(self, key: str, check_size: Callable[[int], None] = lambda _: None) -> bytes:
        size = self._size(key)
        if size is not None:
            check_size(size)
            found = self._read(key, 0, size)
            if found is not None:
                return found
        return ObjectStore.get(self, key, check_size)

    def blocks(self, key: str) -> Iterator[memoryview]:
        size, step = self._size(key), self.options.part_bytes
        for offset in range(0, size or 0, step):
            assert size is not None
            found = self._read(key, offset, min(step, size - offset))
            if found is None:  # it was there: what has been handed out is of the same object
                found = bytes(ObjectStore.get_range(self, key, offset, step)[0])
            yield memoryview(found)
        if size is None:
            yield from ObjectStore.blocks(self, key)

    def get_range(self, key: str, offset: int, num_bytes: int) -> tuple[memoryview, int]:
        size = self._size(key)
        if size is not None and offset < size:
            found = self._read(key, offset, min(num_bytes, size - offset))
            if found is not None:
                return memoryview(found), size
        return ObjectStore.get_range(self, key, offset, num_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        size = self._size(key)
        return ObjectStore.head(self, key) if size is None else ObjectInfo(key, size, None)

    def _path(self, key: str) -> Path:
        return self.folder / key.removeprefix(self.prefix)

    def _size(self, key: str) -> int | None:
        """Bytes of an object that is in the folder too; None if it is not."""
        if not key.startswith(self.prefix):
            return None
        size = self.sizes.get(key.removeprefix(self.prefix))
        try:
            is_same = size is not None and self._path(key).stat().st_size == size
        except OSError:
            return None
        return size if is_same else None

    def _read(self, key: str, offset: int, num_bytes: int) -> bytes | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.pread(descriptor, num_bytes, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("%s is read from the store: %s", self._path(key), error)
            return None
        return found if len(found) == num_bytes else None


Drain = Literal["background", "wait"]
_MOST_FINDINGS: Final = 10


class TieredRun(Run):
    """The checkpoints of one run on a fast disk of all ranks, from which rank 0 copies them.

    It is used like a RunFolder. A copy is made as a save is: it is there as a whole, read back and
    compared, or not at all. Retention holds in both places; the disk also keeps what is not in the
    store yet. What the store would not keep any more is not copied.

    Args:
        fast: folder of the run on the fast disk.
        root: folder of the run in the store.
        retention: which checkpoints are kept.
        on_deleted: called with each step whose last checkpoint was deleted.
        drain: whether a commit waits for the copy.
        comm: the ranks of the run.
        disks: which of them share one.
    """

    def __init__(
        self,
        fast: str | PathLike[str],
        root: ObjectPath,
        retention: Retention,
        on_deleted: Callable[[int], object],
        drain: Drain,
        comm: Comm,
        disks: FastDisks,
    ) -> None:
        disk = as_local_folder(fast).absolute()
        self._comm, self._disks = comm, disks
        self._fast = RunFolder(disk, retention, self._deleted, self._not_copied)
        self._stored = RunFolder(root, retention, self._deleted)
        self.root, self._on_deleted = root, on_deleted
        self._retention, self._drain = retention, drain
        self._saved: set[int] = set()  # by this manager; known on all ranks
        self._unusable: set[int] = set()
        self._pending: set[int] | None = None
        self._failed: dict[int, str] = {}
        self._changed = threading.Condition()
        self._copying = threading.Lock()
        self._worker: threading.Thread | None = None
        self._is_woken = self._is_closing = False
        self._orders = Orders(root, disk, disks)

    def look(self) -> None:
        """Go on with what the last manager of the run has left. Collective."""
        if self._comm.rank == 0:
            self._stored.finish_commits()
            self.start()

    def folder(self, step: int) -> Path:
        """Where a step is saved: on the disk."""
        return self._fast.folder(step)

    def place(self, step: int) -> Path:
        """Where a step can be read: on the disk if it is there and whole, else in the store."""
        own, stored = self._fast.folder(step), self._stored.folder(step)
        if not is_committed(stored):
            return own
        if step in self._unusable or not is_committed(own):
            return stored
        # Another one in the store was saved by another machine while this disk was away.
        return own if step in self._saved or self._is_copied(step) else stored

    def skip(self, step: int) -> None:
        """Take the copy in the store from now on: what is on the disk is damaged."""
        self._unusable.add(step)

    def all_saves(self) -> list[tuple[int, int]]:
        """Every save, newest first. A step that is in both places comes twice, for two tries."""
        both = [*self._fast.all_saves(), *self._stored.all_saves()]
        return sorted(both, key=lambda found: found[0], reverse=True)

    def committed_steps(self) -> list[int]:
        """Every step that is committed in one of the places, oldest first."""
        return sorted({*self._fast.committed_steps(), *self._stored.committed_steps()})

    def latest(self) -> int | None:
        """The newer one of the steps that were committed last in the two places."""
        found = (self._fast.latest(), self._stored.latest())
        return max((step for step in found if step is not None), default=None)

    def base_of(self, step: int, damaged: Mapping[int, int]) -> int | None:
        """See RunFolder: a step on the disk."""
        return self._fast.base_of(step, damaged)

    def best(self) -> int | None:
        """The committed step with the best metric."""
        metrics, steps = self._metrics(), set(self.committed_steps())
        return next((s for s in self._retention.best_steps(metrics) if s in steps), None)

    def _metrics(self) -> dict[int, float]:
        return self._stored.metrics() | self._fast.metrics()

    def hooks(
        self,
        step: int,
        metric: float | None,
        note_bytes: Callable[[int], None],
        *,
        has_base: bool,
    ) -> SaveHooks:
        """See RunFolder; called on all ranks, when they save a step."""
        self._saved.add(step)
        return self._fast.hooks(step, metric, note_bytes, has_base=has_base)

    def begin(self, step: int, damaged: int | None) -> bool:
        """See RunFolder; refuses a step that only the store has, unless it is damaged there."""
        copy = self._stored.folder(step)
        is_only_there = is_committed(copy) and not is_committed(self._fast.folder(step))
        if is_only_there and damaged != number_of_save(data_folder(copy)):
            finding = Finding("a committed checkpoint is here", path=str(copy))
            raise CheckpointExistsError(f"step {step} is in the store already", [finding])
        return self._fast.begin(step, damaged)

    def committed(self, step: int, metric: float | None) -> None:
        """Move the pointer on the disk, and copy the step or let it be copied."""
        with self._changed:
            self._undrained().add(step)
            self._unusable.discard(step)
        self._fast.committed(step, metric)
        self.start()

    def start(self) -> None:
        """Copy, or let be copied, what is not in the store yet. Only on rank 0."""
        if self._drain == "wait":
            self._failed.clear()
            self._copy_all()
            return
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="drain", daemon=True)
                self._worker.start()

    def close(self) -> None:
        """Wait for the copies. Collective.

        Raises:
            CheckpointingException: if the newest checkpoint could not be copied.
        """
        after_rank0(self._comm, "copying checkpoints into the store", self._finish)

    def _finish(self) -> None:
        if self._pending and self._drain == "wait":
            self.start()
        if self._worker is not None:
            with self._changed:
                self._is_woken = self._is_closing = True
                self._changed.notify_all()
            self._worker.join()
            self._worker, self._is_closing = None, False
        newest = max(self._pending or (), default=None)
        if newest is not None:
            finding = Finding(
                self._failed.get(newest, "it was not copied"),
                path=str(self.folder(newest)),
                remedy="It is on the disk; the next manager of this run tries again.",
            )
            raise CheckpointingException(f"step {newest} is not in the store", [finding])

    def verified(self, step: int) -> None:
        """Record that all of a step has been read back and compared, where it was read."""
        is_own = self.place(step) == self._fast.folder(step)
        (self._fast if is_own else self._stored).verified(step)

    def delete(self, step: int) -> None:
        """Delete a step in both places; see RunFolder."""
        with self._copying, self._changed:
            places = [p for p in (self._fast, self._stored) if is_committed(p.folder(step))]
            for place in places or [self._fast]:
                place.delete(step)
            self._undrained().discard(step)

    def _deleted(self, step: int) -> None:
        if not any(is_committed(run.folder(step)) for run in (self._fast, self._stored)):
            self._on_deleted(step)

    def _not_copied(self) -> set[int]:
        with self._changed:
            return set(self._undrained())

    def _undrained(self) -> set[int]:
        if self._pending is None:
            stored = self._stored.committed_steps()
            self._pending = {*self._fast.committed_steps()} - {*stored}
        return self._pending

    def _is_copied(self, step: int) -> bool:
        copy = number_of_save(data_folder(self._stored.folder(step)))
        return copy == number_of_save(self._fast.folder(step))

    def _due(self) -> int | None:
        """The next step to copy; those that the store would not keep are given up."""
        with self._changed:
            pending = set(self._undrained())
        if not pending:
            return None
        known = {*self._stored.committed_steps(), *pending}
        due = self._retention.due(known, [max(pending)], self._metrics())
        given_up = pending.intersection(due.delete)
        if given_up:
            self._settle(given_up)
        return min((s for s in pending - given_up if s not in self._failed), default=None)

    def _settle(self, steps: set[int]) -> None:
        """Note that steps need not be kept for the store any more."""
        with self._changed:
            self._undrained().difference_update(steps)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken)
                is_last, self._is_woken = self._is_closing, False
                self._failed.clear()  # another commit, or the end: try once more
            self._copy_all()

    def _copy_all(self) -> None:
        while (step := self._next_due()) is not None:
            try:
                with self._copying:
                    if step in self._not_copied():
                        self._copy(step)
                        self._settle({step})
            except (OSError, CheckpointingException) as error:
                logger.warning("step %d is not in the store yet: %s", step, error)
                self._failed[step] = str(error)
                continue
            self._fast.thin_out()

    def _next_due(self) -> int | None:
        try:
            return self._due()
        except (OSError, CheckpointingException) as error:
            logger.warning("nothing is copied into the store for now: %s", error)
            return None

    def _sealed(self, step: int) -> Seal | None:
        """What is on the disk of a step; None if it was deleted by hand."""
        source = self._fast.folder(step)
        if not is_committed(source):
            return None
        seal = read_seal(source)
        if seal is None:
            finding = Finding("the checkpoint has no seal", path=str(source))
            raise CorruptCheckpointError(f"step {step} cannot be copied", [finding])
        return seal

    def _copy(self, step: int) -> None:
        """Copy a step as a whole, or not at all."""
        seal, target = self._sealed(step), self._stored.folder(step)
        if seal is None:
            return
        config = CheckpointingConfig(**seal.config)
        self._stored.begin(step, None)
        metric = self._fast.metrics().get(step)
        names = [*seal.files, SEAL_NAME, CONFIG_FNAME]
        # What is there now is the copy of a save that was damaged, and that this one replaces.
        attempt = begin_attempt(target, names, Durability.FSYNC, overwrite=is_committed(target))
        try:
            self._stored.claimed(step, metric, seal.attempt)
            location.write(attempt.folder / SEAL_NAME, seal.to_json())
            location.write(attempt.folder / CONFIG_FNAME, json.dumps(asdict(config)).encode())
            save = (target.name, seal.attempt, attempt.id)
            missing = seal.files.keys() - self._orders.carry_out("upload", *save)
            if missing:
                problem = "the file is on none of the disks as it was saved"
                findings = [Finding(problem, path=f"{target.name}/{n}") for n in sorted(missing)]
                raise CorruptCheckpointError(f"step {step} is not whole", findings[:_MOST_FINDINGS])
            self._orders.carry_out("verify", *save)
            attempt.commit(config)
        except BaseException:
            attempt.abandon()
            raise
        self._stored.committed(step, metric)


class SplitRun(TieredRun):
    """A TieredRun whose disks each hold the part of a step that their ranks wrote.

    The lowest rank of each disk copies its part; rank 0 begins and commits the copy. A step is read
    from the store, and file by file from the disk where the file is there. One that is not in the
    store yet is copied first. The steps that are whole on all disks together are known on rank 0.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_part = self._disks.leads and self._comm.rank > 0
        self._copier = PartCopier(self.root, self._fast.root, self._disks, self._fast.thin_out)
        self._seals: dict[int, Seal] = {}

    def look(self) -> None:
        fast = self._fast
        if self._comm.rank == 0:
            self._stored.finish_commits()
        whole = whole_steps(
            self._comm,
            self._disks,
            lambda: {step: fast.folder(step) for step in fast.all_steps()},
            lambda step: is_committed(self._stored.folder(step)),
        )
        with self._comm.agreed("beginning to copy into the store"):
            if self._comm.rank == 0:
                self._seals, self._pending = whole, set(whole)
                self._orders.settle({})
        if self._is_part:
            self._copier.keep({step: seal.attempt for step, seal in whole.items()})
        if self._comm.rank == 0:
            self.start()

    def place(self, step: int) -> Path:
        """Where a step can be read: in the store, or nearer as far as it is on this disk."""
        own, stored = self._fast.folder(step), self._stored.folder(step)
        if not is_committed(stored):
            return own
        data: Any = data_folder(stored)
        is_here = number_of_save(own) == number_of_save(data) != 0
        seal = read_seal(data) if is_here and step not in self._unusable else None
        if seal is None:
            return stored
        sizes = {file.name: file.num_bytes for file in seal.files.values()}
        near = NearStore(data.store.url, data.store.options, data.prefix, own, sizes)
        place: Any = stored
        return cast("Path", replace(place, store=near))

    def ready(self, step: int, *, near: bool = True) -> Path:
        """Where a step can be read on this rank, once it is in the store. Collective."""
        what = f"bringing step {step} into the store"
        after_rank0(self._comm, what, lambda: self._bring(step))
        with self._comm.agreed(what):
            return self.place(step) if near else self._stored.folder(step)

    def _bring(self, step: int) -> None:
        with self._copying:
            if step in self._not_copied():
                self._copy(step)
                self._settle({step})
        if not is_committed(self._stored.folder(step)):
            finding = Finding(
                "it is neither in the store nor whole on the disks",
                path=str(self._stored.folder(step)),
                remedy="Load an older step, or start again with all disks that it was saved to.",
            )
            raise CheckpointNotFoundError(f"step {step} is not there", [finding])

    def all_saves(self) -> list[tuple[int, int]]:
        """Every save, newest first. A step in the store comes twice: with the disks and without."""
        stored = [
            (step, number_of_save(data_folder(self._stored.folder(step))))
            for step in self._stored.committed_steps()
        ]
        own = [(step, self._number_of(step)) for step in self._not_copied()]
        return sorted([*stored, *stored, *own], key=lambda found: found[0], reverse=True)

    def committed_steps(self) -> list[int]:
        """Every step that is in the store, or on the disks as a whole; oldest first."""
        return sorted({*self._stored.committed_steps(), *self._not_copied()})

    def latest(self) -> int | None:
        """The newest one of the steps that the store and the disks say were committed last."""
        steps = set(self.committed_steps())
        named = {self._fast.latest(), self._stored.latest(), *self._not_copied()}
        return max((step for step in named if step in steps), default=None)

    def hooks(
        self,
        step: int,
        metric: float | None,
        note_bytes: Callable[[int], None],
        *,
        has_base: bool,
        num_disks: int = 1,
    ) -> SaveHooks:
        """See RunFolder; called on all ranks, when they save a step."""
        del num_disks
        count = len(self._disks.leaders)
        hooks = self._fast.hooks(step, metric, note_bytes, has_base=has_base, num_disks=count)
        if count == 1:
            return hooks
        noted = partial(self._part_committed, step, metric)
        place = str(self._stored.folder(step))
        return replace(hooks, disks=Disks(place, leads=self._disks.leads, on_part=noted))

    def begin(self, step: int, damaged: int | None) -> bool:
        """See RunFolder; what is left on the disks of a step that is nowhere whole is replaced."""
        is_pending = step in self._not_copied()
        copy = self._stored.folder(step)
        if (is_pending and step not in self._unusable) or is_committed(copy):
            found = self._number_of(step) if is_pending else number_of_save(data_folder(copy))
            if damaged != found:
                finding = Finding("a committed checkpoint is here", path=str(self.place(step)))
                raise CheckpointExistsError(f"step {step} is there already", [finding])
        self._fast.begin(step, None)
        return self._fast.is_own(step)

    def begin_parts(
        self, step: int, metric: float | None, *, makes_room: bool
    ) -> tuple[float | None, bool]:
        """See RunFolder."""
        known = self._comm.from_rank0("telling the metric", lambda: metric)
        with self._comm.agreed("beginning a save on every disk"):
            if self._is_part:
                self._fast.begin(step, None)
                makes_room = self._fast.is_own(step)
        return known, makes_room

    def _part_committed(self, step: int, metric: float | None) -> None:
        """Learn that rank 0 has committed what this disk holds a part of."""
        try:
            name = attempt_of(self._fast.folder(step))
            self._copier.keep({} if name is None else {step: name})
            self._fast.committed(step, metric)
        except (OSError, CheckpointingException) as error:
            logger.warning("%s: a commit is not recorded: %s", self._fast.folder(step), error)

    def committed(self, step: int, metric: float | None) -> None:
        self._seals.pop(step, None)
        super().committed(step, metric)

    def delete(self, step: int) -> None:
        """Delete a step in the store and on the disk of rank 0; see RunFolder."""
        with self._copying, self._changed:
            places = [p for p in (self._fast, self._stored) if is_committed(p.folder(step))]
            if not places and step not in self._undrained():
                places = [self._fast]  # which says that there is no such step
            for place in places:
                place.delete(step)
            self._undrained().discard(step)
            self._seals.pop(step, None)

    def delete_parts(self, step: int) -> None:
        """Delete the part of each disk."""
        with self._comm.agreed(f"deleting step {step} on every disk"):
            self._copier.forget(step)
            if self._is_part and is_committed(self._fast.folder(step)):
                self._fast.delete(step)

    def stop(self) -> None:
        """End the thread that copies the part of this disk."""
        self._copier.stop()

    def _not_copied(self) -> set[int]:
        return self._copier.pending if self._comm.rank else super()._not_copied()

    def _deleted(self, step: int) -> None:
        if self._comm.rank == 0:
            super()._deleted(step)

    def _settle(self, steps: set[int]) -> None:
        seals = {step: self._seals.pop(step, None) for step in steps}
        names = {
            step: attempt_of(self._fast.folder(step)) if seal is None else seal.attempt
            for step, seal in seals.items()
        }
        super()._settle(steps)
        self._orders.settle({step: name for step, name in names.items() if name is not None})

    def _sealed(self, step: int) -> Seal | None:
        return self._seals.get(step) or super()._sealed(step)

    def _number_of(self, step: int) -> int:
        """The number of the save of a step that is on the disks."""
        seal = self._seals.get(step)
        own = self._fast.folder(step)
        return number_of_save(own) if seal is None else number_of_attempt(seal.attempt)


def run_files(
    root: str | PathLike[str],
    retention: Retention | None,
    on_deleted: Callable[[int], object],
    fast: str | PathLike[str] | None,
    drain: Drain,
    comm: Comm,
    *,
    incremental: bool,
) -> RunFolder | TieredRun:
    """The checkpoints of a run as one rank has them. Collective if there is a fast disk."""
    place, kept = as_location(root), Retention() if retention is None else retention
    if fast is None:
        folder = RunFolder(place, kept, on_deleted)
        if comm.rank == 0:
            folder.finish_commits()
        return folder
    if drain not in ("background", "wait"):
        raise ValueError(f"drain must be 'background' or 'wait', not {drain!r}")
    if not isinstance(place, ObjectPath):
        finding = Finding("fast= needs a root in an object store", found=str(place))
        raise UnsupportedFormatError("a run cannot be kept in two places", [finding])
    disk = as_local_folder(fast).absolute()
    disks, is_split = FastDisks.find(comm, disk), True
    if not disks.are_many:
        run_folder = RunFolder(disk, kept)
        steps = run_folder.all_steps
        what = "looking for parts that other machines have left"
        is_split = comm.from_rank0(
            what, lambda: any(is_part(run_folder.folder(s)) for s in steps())
        )
    if is_split and incremental:
        finding = Finding(
            "incremental=True shares files of a checkpoint that is whole on one disk",
            found=", ".join(disks.places),
            remedy="Leave incremental=True out, or pass a folder that all ranks share and that "
            "holds no parts of what more machines have saved.",
        )
        raise UnsupportedFormatError("not all ranks share a disk", [finding])
    kind = SplitRun if is_split else TieredRun
    run = kind(fast, place, kept, on_deleted, drain, comm, disks)
    run.look()
    return run
