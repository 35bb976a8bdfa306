"""The checkpoints of a run: in its root alone, or on fast disks that are copied into the root."""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, SupportsFloat, cast

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import as_local_folder, check_room
from dist_checkpointing.filesystem.object_store import KnownStore, ObjectInfo, ObjectPath
from dist_checkpointing.format.commit import data_folder, is_committed, tolerant
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PARTS_NAME, attempt_of, leftovers, number_of_save
from dist_checkpointing.format.run_steps import NO_STEP
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.manager.disks import FastDisks, whole_steps
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.manager.save_log import Stopwatch
from dist_checkpointing.manager.tier_copies import Drain, PartCopier, StoreCopier, after_rank0
from dist_checkpointing.serialization.save_folder import Disks, SaveHooks

logger: logging.Logger = logging.getLogger(__name__)


class Run:
    """The checkpoints of one run, as one rank has them.

    Without disks, each step is saved into the root. With disks, it is saved there, and copied into
    the root as a save is: it is there as a whole, read back and compared, or not at all. Retention
    holds in both; a disk also keeps what is not in the store yet. What the store would not keep any
    more is not copied.

    If not all ranks share a disk, each has the part of a step that its ranks wrote, and the lowest
    rank of each copies that part. A step is loaded from the store, and file by file from the disk
    where the file is there; one that is not in the store yet is copied first. The steps that are
    whole on all disks together are known on rank 0.

    Only rank 0 may call methods that are not collective and change files.

    Making one is collective if there are disks. It goes on with what the last manager left.
    ``on_deleted`` is called with each step whose last checkpoint was deleted. A save goes
    on from ``position``, the step that was loaded or saved last; NO_STEP if a history begins, None
    for the latest. It is known on rank 0.
    """

    def __init__(
        self,
        root: Any,
        retention: Retention,
        on_deleted: Callable[[int], object],
        comm: Comm,
        fast: str | PathLike[str] | None = None,
        drain: Drain = "background",
        *,
        incremental: bool = False,
    ) -> None:
        self.root, self._retention, self._on_deleted = root, retention, on_deleted
        self._comm = comm
        self.position: int | None = None
        # Of the save that was begun last: what it grows from, and whether it replaces another.
        self._parent = NO_STEP
        self._sets_aside = False
        self.near = self._home = RunFolder(root, retention, self._deleted)
        self._disks: FastDisks | None = None
        self._has_parts = False  # the steps on a disk may be parts of checkpoints
        self._copier: StoreCopier | None = None
        self._parts: PartCopier | None = None
        self.damaged: set[int] = set()  # a disk is not read for them; a save does not go on there
        if fast is not None:
            self._use_disks(as_local_folder(fast).absolute(), drain, incremental=incremental)
        self._resume()

    def _use_disks(self, fast: Path, drain: Drain, *, incremental: bool) -> None:
        if not isinstance(self.root, ObjectPath):
            finding = Finding("fast= needs a root in an object store", found=str(self.root))
            raise UnsupportedFormatError("a run cannot be kept in two places", [finding])
        self.near = near = RunFolder(fast, self._retention, self._deleted, lambda: self._pending)
        self._disks = disks = FastDisks(self._comm, fast)
        self._has_parts = disks.are_many or self._comm.from_rank0(
            "looking for parts that other machines have left",
            lambda: any(PARTS_NAME in leftovers(near.folder(step)) for step in near.all_steps()),
        )
        if self._has_parts and incremental:
            finding = Finding(
                "incremental=True shares files of a checkpoint that is whole on one disk",
                found=", ".join(disks.names),
                remedy="Leave incremental=True out, or pass a folder that all ranks share and "
                "that holds no parts of what more machines have saved.",
            )
            raise UnsupportedFormatError("not all ranks share a disk", [finding])
        if self._comm.rank == 0:
            self._copier = StoreCopier(near, self._home, self._retention, disks, drain)
        elif disks.leads:
            self._parts = PartCopier(self.root, disks, near.apply_retention)

    def _resume(self) -> None:
        if self._comm.rank == 0:
            for folder in self._folders:
                folder.finish_commits()
            if self._disks is not None:
                self._agree_on_history()
        if self._disks is not None and self._has_parts:
            whole = whole_steps(self._comm, self._disks, self.near, self._home)
            with self._comm.agreed("beginning to copy into the store"):
                if self._copier is not None:
                    self._copier.resume(whole)
            if self._parts is not None:
                self._parts.keep({step: seal.attempt for step, seal in whole.items()})
        if self._copier is not None:
            self._copier.start()

    def _agree_on_history(self) -> None:
        """Let disk and store go back where the run has, and only the other one was told."""
        near, home = self.near.record(), self._home.record()
        if near.has_abandoned([s for s in home.steps if s == home.latest], home):
            self._home.go_back_with(near)
        elif home.has_abandoned(near.history(near.steps), near):
            # Another machine has gone back while this disk was away, or had not been copied.
            self.near.go_back_with(home)

    @property
    def _pending(self) -> Collection[int]:
        """The steps that this disk keeps because they are not in the store yet."""
        copier = self._copier or self._parts
        return () if copier is None else copier.pending

    @property
    def _folders(self) -> list[RunFolder]:
        return [self._home] if self.near is self._home else [self.near, self._home]

    def best_place(self, step: int) -> Path:
        """Where a step can be read: on the disk as far as it is there and whole."""
        local, stored = self.near.folder(step), self._home.folder(step)
        if self.near is self._home or not is_committed(stored):
            return local
        if step in self.damaged:
            return stored
        data: Any = data_folder(stored)
        is_same = number_of_save(local) == number_of_save(data) != 0
        if not self._has_parts:
            # Another one in the store was saved by another machine while this disk was away.
            return local if (is_same or step in self._pending) and is_committed(local) else stored
        seal = read_seal(data) if is_same else None
        if seal is None:
            return stored
        keys = ((f"{data.prefix}{file.name}", file.num_bytes) for file in seal.files.values())
        infos = {key: ObjectInfo(key, num_bytes, None) for key, num_bytes in keys}
        near = KnownStore(data.store.url, data.store.options, data.prefix, infos, local)
        home: Any = stored
        return cast("Path", replace(home, store=near))

    def prepare_read(self, step: int, *, near: bool = True) -> Path:
        """Where a step can be read by all ranks; copies it into the store if it must. Collective.

        Where only the store has all of it, ``near`` reads on this rank's disk what is there.
        """
        if not self._has_parts:
            # Only rank 0 knows what is to be copied.
            is_near = self._disks is None or self._comm.from_rank0(
                f"finding step {step}", lambda: self.best_place(step) == self.near.folder(step)
            )
            return (self.near if is_near else self._home).folder(step)
        what = f"bringing step {step} into the store"
        after_rank0(self._comm, what, partial(self._require_stored, step))
        with self._comm.agreed(what):
            return self.best_place(step) if near else self._home.folder(step)

    def _require_stored(self, step: int) -> None:
        if self._copier is not None:
            self._copier.copy_if_pending(step)
        if not is_committed(self._home.folder(step)):
            finding = Finding(
                "it is neither in the store nor whole on the disks",
                path=str(self._home.folder(step)),
                remedy="Load an older step, or start again with all disks that it was saved to.",
            )
            raise CheckpointNotFoundError(f"step {step} is not there", [finding])

    def tries(self) -> list[int]:
        """The steps of the history, newest first, as they may be loaded.

        One that is on the disks and in the store comes twice, for two tries.
        """
        if not self._has_parts:
            return sorted((s for f in self._folders for s in f.history()), reverse=True)
        pending = {*self._pending} - self.near.record().abandoned
        return sorted([*2 * self._home.history(), *pending], reverse=True)

    def committed_steps(self) -> list[int]:
        """Every step that is in the root, or whole on the disks; oldest first."""
        if self._has_parts:
            return sorted({*self._pending, *self._home.committed_steps()})
        return sorted({step for folder in self._folders for step in folder.committed_steps()})

    def latest(self) -> int | None:
        """The newest one of the steps that the root and the disks say were committed last."""
        steps = {folder.latest() for folder in self._folders}
        if self._has_parts and self._copier is not None:
            resumed = {step for step, seal in self._copier.pending.items() if seal is not None}
            resumed -= self.near.record().abandoned
            steps = (steps | resumed) & {*self.committed_steps()}
        return max((step for step in steps if step is not None), default=None)

    def best(self) -> int | None:
        """The committed step of the history with the best metric."""
        metrics = ChainMap(*(folder.record().metrics for folder in self._folders))
        steps = set(self.committed_steps()) - self.near.record().abandoned
        return next((s for s in self._retention.best_steps(metrics) if s in steps), None)

    def hooks(
        self, step: int, metric: float | None, watch: Stopwatch, *, has_base: bool
    ) -> SaveHooks:
        """What a save of a step calls, on all ranks."""
        disks, folder = self._disks, self.near.folder(step)
        num_disks = 1 if disks is None else len(disks.leaders)

        def check(index: Index) -> None:
            watch.num_bytes = index.num_bytes
            # How much a base leaves to write is known when its parts have been compared.
            check_room(folder, 0 if has_base else watch.num_bytes // num_disks)
            if self._sets_aside:
                self.near.set_aside(step)

        parts = None
        if disks is not None and disks.are_many:
            on_part = partial(self._part_committed, step)
            parts = Disks(str(self._home.folder(step)), disks.leads, on_part)
        return SaveHooks(check, partial(self.near.claimed, step, metric, self._parent), parts)

    def base(self) -> int | None:
        """The step that the save that was begun last grows from, if it can share files with it."""
        is_there = self._parent != NO_STEP and is_committed(self.near.folder(self._parent))
        return self._parent if is_there else None

    def begin(
        self, step: int, metric: SupportsFloat | None, *, overwrite: bool
    ) -> tuple[float | None, bool]:
        """Record that this manager will write the folder of a step, before it exists. Collective.

        Without ``overwrite`` the step must be above the one that the run has come to.

        Returns:
            The metric of rank 0, and whether the new save overwrites what is there: a checkpoint
            that a manager of this run wrote and that is not in the history, or parts of a step that
            is nowhere whole. On a disk such a checkpoint is set aside instead.
        """
        makes_room, number = False, math.nan
        with self._comm.agreed("beginning a save"):
            if type(step) is not int or step < 0:
                finding = Finding("a step must be an int of at least 0", found=repr(step))
                raise CheckpointingException("cannot save this step", [finding])
            if self._comm.rank == 0:
                number = math.nan if metric is None else float(metric)
                makes_room = self._begin(step, overwrite=overwrite)
        if self._disks is not None and self._disks.are_many:
            number, self._parent = self._comm.from_rank0(
                "sending metric and parent", lambda: (number, self._parent)
            )
            with self._comm.agreed("beginning a save on every disk"):
                if self._parts is not None:
                    _, makes_room = self.near.begin(step, self._parent)
        return None if math.isnan(number) else number, makes_room

    def _begin(self, step: int, *, overwrite: bool) -> bool:
        newest, home = self.position, self._home
        if newest is None:
            sound = (step for step in self.tries() if step not in self.damaged)
            newest = next(sound, None) if self.damaged else self.latest()
        if newest is not None and step <= newest and not overwrite:
            raise self._not_above(step, newest)
        is_stored = home is not self.near and is_committed(home.folder(step))
        if is_stored and not home.wrote(step):
            finding = Finding("no manager of this root wrote it", path=str(home.folder(step)))
            raise CheckpointExistsError(f"step {step} is in the store already", [finding])
        self._parent, is_ours = self.near.begin(step, newest)
        is_whole_on_disk = self.near.is_on_disk and not self._has_parts
        self._sets_aside = is_ours and is_whole_on_disk and not overwrite
        return is_ours and not is_whole_on_disk

    def _not_above(self, step: int, newest: int) -> CheckpointingException:
        """The error of a save that would go back in the history, or into that of another run."""
        known = "loaded or saved that step" if self.position is not None else "loaded nothing"
        finding = Finding(
            f"this manager has {known}",
            found=self.near.record().writer or None,
            path=str(self.best_place(newest)),
            remedy="To go on from an earlier step, load it first: manager.load(template, step). "
            "Save another run into another folder, or begin a new history in this one with "
            "CheckpointManager(root, fresh=True).",
        )
        is_there = is_committed(self.best_place(step))
        kind = CheckpointExistsError if is_there else CheckpointingException
        return kind(f"step {step} is not saved: the run is at step {newest} already", [finding])

    def _part_committed(self, step: int) -> None:
        """Note that rank 0 has committed what this disk holds a part of."""
        folder = self.near.folder(step)
        with tolerant(f"{folder}: a commit is not recorded"):
            name = attempt_of(folder)
            if self._parts is not None:
                self._parts.keep({} if name is None else {step: name})
            self.near.committed(step)

    def committed(self, step: int) -> None:
        """Move the pointer, and copy the step or let it be copied."""
        self.position = step
        if self._copier is not None:
            with tolerant(f"the store has steps that step {step} has not grown from"):
                self._home.go_back_with(self.near.record())
            self._copier.keep(step)
        self.damaged.discard(step)
        self.near.committed(step)
        if self._copier is not None:
            self._copier.start()

    def verified(self, step: int) -> None:
        """Record that all of a step has been read back and compared, where it was read."""
        is_near = self.best_place(step) == self.near.folder(step)
        (self.near if is_near else self._home).note(step, verified=True)

    def delete(self, step: int) -> None:
        """Delete a step everywhere; see RunFolder. Collective."""
        if self.position == step:
            self.position = None
        with self._comm.agreed(f"deleting step {step}"):
            if self._comm.rank == 0:
                (self._copier or self._home).delete(step)
        if self._disks is not None and self._disks.are_many:
            with self._comm.agreed(f"deleting step {step} on every disk"):
                if self._parts is not None:
                    self._parts.forget({step})
                    if is_committed(self.near.folder(step)):
                        self.near.delete(step)

    def _deleted(self, step: int) -> None:
        others = [f for f in self._folders if self.near is not self._home]
        if self._comm.rank == 0 and not any(is_committed(f.folder(step)) for f in others):
            self._on_deleted(step)

    def close(self) -> None:
        """Wait for the copies. Collective.

        Raises:
            CheckpointingException: if the newest checkpoint could not be copied.
        """
        if self._disks is not None:
            work = None if self._copier is None else self._copier.finish
            after_rank0(self._comm, "copying checkpoints into the store", work)

    def stop(self) -> None:
        """End the thread that copies the part of this disk, once all ranks have closed the run."""
        if self._parts is not None:
            self._parts.stop()
        if self._copier is not None:
            self._copier.end_orders()
