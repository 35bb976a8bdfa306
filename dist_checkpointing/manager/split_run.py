"""The checkpoints of a run on disks that not all ranks share: each holds a part of every step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import as_local_folder, as_location
from dist_checkpointing.filesystem.object_store import ObjectPath
from dist_checkpointing.format.commit import data_folder, is_committed
from dist_checkpointing.format.leftovers import attempt_of, number_of_attempt, number_of_save
from dist_checkpointing.format.seal import Seal, read_seal
from dist_checkpointing.manager.disks import FastDisks, is_part, whole_steps
from dist_checkpointing.manager.drain import PartCopier
from dist_checkpointing.manager.long_work import after_rank0
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.manager.tiers import Drain, NearStore, TieredRun
from dist_checkpointing.serialization.disk_parts import Disks
from dist_checkpointing.serialization.save_options import SaveHooks

logger: logging.Logger = logging.getLogger(__name__)


class SplitRun(TieredRun):
    """A TieredRun whose disks each hold the part of a step that their ranks wrote.

    The lowest rank of each disk copies its part; rank 0 begins and commits the copy. A step is read
    from the store, and file by file from the disk where the file is there. One that is not in the
    store yet is copied first. The steps that are whole on all disks together are known on rank 0.
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
        super().__init__(fast, root, retention, on_deleted, drain, comm, disks)
        self._is_part = disks.leads and comm.rank > 0
        self._copier = PartCopier(root, self._fast.root, disks, self._fast.thin_out)
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
