"""A run on fast disks and in a store: where to save, read from and keep its steps."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.filesystem.object_store import ObjectInfo, ObjectPath, ObjectStore
from dist_checkpointing.format.commit import CheckpointingConfig, data_folder, is_committed
from dist_checkpointing.format.leftovers import CONFIG_FNAME, number_of_save
from dist_checkpointing.format.object_store_commit import begin_attempt
from dist_checkpointing.format.seal import SEAL_NAME, Seal, read_seal
from dist_checkpointing.manager.disks import FastDisks
from dist_checkpointing.manager.drain import Orders
from dist_checkpointing.manager.long_work import after_rank0
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.serialization.save_options import SaveHooks
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

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[Any, ...]]:
        return ObjectStore, ObjectStore.__getstate__(self)  # another process reads the bucket

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


class TieredRun:
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

    def ready(self, step: int, *, near: bool = True) -> Path:
        """See RunFolder."""
        del near
        return self.place(step)

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

    def begin_parts(
        self, step: int, metric: float | None, *, makes_room: bool
    ) -> tuple[float | None, bool]:
        """See RunFolder."""
        del step
        return metric, makes_room

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

    def delete_parts(self, step: int) -> None:
        """See RunFolder."""

    def stop(self) -> None:
        """See RunFolder."""

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
