"""Two places for the checkpoints of a run: a fast disk that is saved to, and an object store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

from dist_checkpointing.checkpoint.verify import verify_checkpoint
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import new_files, store
from dist_checkpointing.filesystem.object_path import Location
from dist_checkpointing.filesystem.paths import is_url, local_folder, location
from dist_checkpointing.filesystem.threads import in_threads
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.format.data_folder import data_folder
from dist_checkpointing.format.leftovers import CONFIG_FNAME, number_of_save
from dist_checkpointing.format.seal import SEAL_NAME, read_seal
from dist_checkpointing.format.store_commit import begin_attempt
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.storage.options import Durability

logger = logging.getLogger(__name__)

Drain = Literal["background", "wait"]
_THREADS: Final = 4


class TieredRun:
    """The checkpoints of one run on a fast disk, from which rank 0 copies them into a store.

    It is used like a RunFolder. A copy is made as a save is: it is there as a whole, read back and
    compared, or not at all. Retention holds in both places; the disk also keeps what is not in the
    store yet. What the store would not keep any more is not copied.

    Args:
        fast: folder of the run on the fast disk.
        root: folder of the run in the store.
        retention: which checkpoints are kept.
        on_deleted: called with each step whose last checkpoint was deleted.
        drain: whether a commit waits for the copy.
    """

    def __init__(
        self,
        fast: str | PathLike[str],
        root: Location,
        retention: Retention,
        on_deleted: Callable[[int], object],
        drain: Drain,
    ) -> None:
        if drain not in ("background", "wait"):
            raise ValueError(f"drain must be 'background' or 'wait', not {drain!r}")
        if not is_url(root):
            finding = Finding("fast= needs a root in an object store", found=str(root))
            raise UnsupportedFormatError("a run cannot be kept in two places", [finding])
        disk = local_folder(fast).absolute()
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
    ) -> dict[str, Any]:
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

    def finish_commits(self) -> None:
        """See RunFolder."""
        self._stored.finish_commits()

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
        """Wait for the copies.

        Raises:
            CheckpointingException: if the newest checkpoint could not be copied.
        """
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
            pending = self._undrained()
            if not pending:
                return None
            known = {*self._stored.committed_steps(), *pending}
            due = self._retention.due(known, [max(pending)], self._metrics())
            pending.difference_update(due.delete)
            return min((step for step in pending if step not in self._failed), default=None)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken)
                is_last, self._is_woken = self._is_closing, False
                self._failed.clear()  # another commit, or the end: try once more
            self._copy_all()

    def _copy_all(self) -> None:
        while (step := self._due()) is not None:
            try:
                with self._copying:
                    self._copy(step)
            except (OSError, CheckpointingException) as error:
                logger.warning("step %d is not in the store yet: %s", step, error)
                self._failed[step] = str(error)
                continue
            with self._changed:
                self._undrained().discard(step)
            self._fast.thin_out()

    def _copy(self, step: int) -> None:
        source, target = self._fast.folder(step), self._stored.folder(step)
        if not is_committed(source):
            return  # deleted by hand
        seal, config = read_seal(source), read_config(source)
        if seal is None:
            finding = Finding("the checkpoint has no seal", path=str(source))
            raise CorruptCheckpointError(f"step {step} cannot be copied", [finding])
        names = [*seal.files, SEAL_NAME, CONFIG_FNAME]
        self._stored.begin(step, None)
        metric = self._fast.metrics().get(step)
        # What is there now is the copy of a save that was damaged, and that this one replaces.
        attempt = begin_attempt(target, names, Durability.FSYNC, overwrite=is_committed(target))
        try:
            self._stored.claimed(step, metric, seal.attempt)
            in_threads(lambda name: _put(source / name, attempt.folder / name), names, _THREADS)
            verify_checkpoint(attempt.folder)
            attempt.commit(config)
        except BaseException:
            attempt.abandon()
            raise
        self._stored.committed(step, metric)


def _put(source: Path, target: Location) -> None:
    """Copy a file."""
    file = new_files.create(target)
    try:
        for block in store.blocks(source, file.block_bytes(is_hashed=False)):
            file.write([block], len(block), stays=True)
    except BaseException:
        file.give_up()
        raise
    file.close(is_durable=True)


def run_files(
    root: str | PathLike[str],
    retention: Retention | None,
    on_deleted: Callable[[int], object],
    fast: str | PathLike[str] | None,
    drain: Drain,
    rank: int,
) -> RunFolder | TieredRun:
    """The checkpoints of a run, in one place or in two, as one rank has them."""
    place, kept = location(root), Retention() if retention is None else retention
    if fast is None:
        folder = RunFolder(place, kept, on_deleted)
        if rank == 0:
            folder.finish_commits()
        return folder
    run = TieredRun(fast, place, kept, on_deleted, drain)
    if rank == 0:
        run.finish_commits()
        run.start()
    return run
