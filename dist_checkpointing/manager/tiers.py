"""The checkpoints of a run: in its root alone, or on fast disks that are copied into the root."""

from __future__ import annotations

import logging
import math
import os
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_local_folder, check_room
from dist_checkpointing.filesystem.object_store import ObjectInfo, ObjectPath, ObjectStore
from dist_checkpointing.format.commit import data_folder, is_committed, tolerant
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PARTS_NAME, attempt_of, leftovers, number_of_save
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.manager.disks import FastDisks, whole_steps
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.manager.save_log import Stopwatch
from dist_checkpointing.manager.tier_copies import Drain, PartCopier, StoreCopier, after_rank0
from dist_checkpointing.serialization.save_folder import Disks, SaveHooks

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NearStore(ObjectStore):
    """A bucket whose objects below one prefix are read from a folder, where they are.

    An object that is not in the folder, has another size there, or cannot be read there comes from
    the bucket. All else, and all that is written, is as in the bucket. ``sizes`` has the bytes of
    the objects by their names, which are relative to both prefix and folder.
    """

    prefix: str = ""
    folder: Path = Path()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        size = self._size(key)
        if size is not None and (max_bytes is None or size <= max_bytes):
            return self._read(key, 0, size) or ObjectStore.get(self, key)
        return ObjectStore.get(self, key, max_bytes)

    def blocks(self, key: str) -> Iterator[memoryview]:
        size, step = self._size(key), self.options.part_bytes
        if size is None:
            yield from ObjectStore.blocks(self, key)
        for offset in range(0, size or 0, step):
            yield self.get_range(key, offset, step)[0]

    def get_range(self, key: str, offset: int, num_bytes: int) -> tuple[memoryview, int]:
        size = self._size(key)
        if size is not None and (data := self._read(key, offset, min(num_bytes, size - offset))):
            return memoryview(data), size
        return ObjectStore.get_range(self, key, offset, num_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        size = self._size(key)
        return ObjectStore.head(self, key) if size is None else ObjectInfo(key, size, None)

    def _path(self, key: str) -> Path:
        return self.folder / key.removeprefix(self.prefix)

    def _size(self, key: str) -> int | None:
        """Bytes of an object that is in the folder too; None if it is not."""
        if key.startswith(self.prefix):
            with suppress(OSError):
                size = self.sizes.get(key.removeprefix(self.prefix))
                return size if location.size_of(self._path(key)) == size else None
        return None

    def _read(self, key: str, offset: int, num_bytes: int) -> bytes:
        """Bytes of the file; none if they cannot be read there."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), max(num_bytes, 0), offset)
        except OSError as error:
            logger.warning("%s is read from the store: %s", self._path(key), error)
            return b""
        return data if len(data) == num_bytes else b""


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
    ``on_deleted`` is called with each step whose last checkpoint was deleted.
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
        self.near = self._home = RunFolder(root, retention, self._deleted)
        self._disks: FastDisks | None = None
        self._has_parts = False  # the steps on a disk may be parts of checkpoints
        self._copier: StoreCopier | None = None
        self._parts: PartCopier | None = None
        self._saved: set[int] = set()  # by this manager; known on all ranks
        self.damaged: set[int] = set()  # on the disks: read from the store alone
        if fast is not None:
            self._use_disks(as_local_folder(fast).absolute(), drain, incremental=incremental)
        self._resume()

    def _use_disks(self, fast: Path, drain: Drain, *, incremental: bool) -> None:
        if drain not in ("background", "wait"):
            raise ValueError(f"drain must be 'background' or 'wait', not {drain!r}")
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
            self._home.finish_commits()
        if self._disks is not None and self._has_parts:
            whole = whole_steps(self._comm, self._disks, self.near, self._home)
            with self._comm.agreed("beginning to copy into the store"):
                if self._copier is not None:
                    self._copier.resume(whole)
            if self._parts is not None:
                self._parts.keep({step: seal.attempt for step, seal in whole.items()})
        if self._copier is not None:
            self._copier.start()

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
            return local if (is_same or step in self._saved) and is_committed(local) else stored
        seal = read_seal(data) if is_same else None
        if seal is None:
            return stored
        sizes = {file.name: file.num_bytes for file in seal.files.values()}
        near = NearStore(data.store.url, data.store.options, data.prefix, local, sizes)
        home: Any = stored
        return cast("Path", replace(home, store=near))

    def prepare_read(self, step: int, *, near: bool = True) -> Path:
        """Where a step can be read by all ranks; copies it into the store if it must. Collective.

        Where only the store has all of it, ``near`` reads on this rank's disk what is there.
        """
        if not self._has_parts:
            return self.best_place(step)
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

    def all_saves(self) -> list[tuple[int, int]]:
        """Every save, newest first: step, and number of the save.

        A step that is on the disks and in the store comes twice, for two tries.
        """
        saves = [(s, f.number_of(s)) for f in self._folders for s in f.all_steps()]
        if self._has_parts and self._copier is not None:
            stored = [(s, self._home.number_of(s)) for s in self._home.committed_steps()]
            saves = [*stored, *stored, *((s, self._copier.number_of(s)) for s in self._pending)]
        return sorted(saves, key=lambda save: save[0], reverse=True)

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
            steps = (steps | resumed) & {*self.committed_steps()}
        return max((step for step in steps if step is not None), default=None)

    def best(self) -> int | None:
        """The committed step with the best metric."""
        metrics = ChainMap(*(folder.metrics() for folder in self._folders))
        steps = set(self.committed_steps())
        return next((s for s in self._retention.best_steps(metrics) if s in steps), None)

    def hooks(
        self, step: int, metric: float | None, watch: Stopwatch, *, has_base: bool
    ) -> SaveHooks:
        """What a save of a step calls, on all ranks."""
        self._saved.add(step)
        disks, folder = self._disks, self.near.folder(step)
        num_disks = 1 if disks is None else len(disks.leaders)

        def check(index: Index) -> None:
            watch.num_bytes = sum(index[key].num_bytes for key in index)
            # How much a base leaves to write is known when its parts have been compared.
            check_room(folder, 0 if has_base else watch.num_bytes // num_disks)

        parts = None
        if disks is not None and disks.are_many:
            on_part = partial(self._part_committed, step, metric)
            parts = Disks(str(self._home.folder(step)), disks.leads, on_part)
        return SaveHooks(check, partial(self.near.claimed, step, metric), parts)

    def begin(
        self, step: int, metric: SupportsFloat | None, damaged: int | None
    ) -> tuple[float | None, bool]:
        """Record that this manager will write the folder of a step, before it exists. Collective.

        Returns:
            The metric of rank 0, and whether the new save may replace what is there: the save that
            was found damaged, whose number is ``damaged``, or parts of a step that is nowhere
            whole, if a manager of this run wrote it.
        """
        makes_room, number = False, math.nan
        with self._comm.agreed("beginning a save"):
            if type(step) is not int or step < 0:
                finding = Finding("a step must be an int of at least 0", found=repr(step))
                raise CheckpointingException("cannot save this step", [finding])
            if self._comm.rank == 0:
                number = math.nan if metric is None else float(metric)
                makes_room = self._begin(step, damaged)
        if self._disks is not None and self._disks.are_many:
            number = self._comm.from_rank0("telling the metric", lambda: number)
            with self._comm.agreed("beginning a save on every disk"):
                if self._parts is not None:
                    self.near.begin(step, None)
                    makes_room = self.near.wrote(step)
        return None if math.isnan(number) else number, makes_room

    def _begin(self, step: int, damaged: int | None) -> bool:
        if not self._has_parts and (
            self.near is self._home or is_committed(self.near.folder(step))
        ):
            return self.near.begin(step, damaged)
        is_pending, there = self._has_parts and step in self._pending, None
        is_stored = is_committed(self._home.folder(step))
        if self._copier is not None and is_pending and (is_stored or step not in self.damaged):
            there = self._copier.number_of(step)
        elif is_stored:
            there = self._home.number_of(step)
        if there not in (None, damaged):
            finding = Finding("a committed checkpoint is here", path=str(self.best_place(step)))
            where = "there" if is_pending else "in the store"
            raise CheckpointExistsError(f"step {step} is {where} already", [finding])
        self.near.begin(step, None)
        return self._has_parts and self.near.wrote(step)

    def _part_committed(self, step: int, metric: float | None) -> None:
        """Note that rank 0 has committed what this disk holds a part of."""
        folder = self.near.folder(step)
        with tolerant(f"{folder}: a commit is not recorded"):
            name = attempt_of(folder)
            if self._parts is not None:
                self._parts.keep({} if name is None else {step: name})
            self.near.committed(step, metric)

    def committed(self, step: int, metric: float | None) -> None:
        """Move the pointer, and copy the step or let it be copied."""
        if self._copier is not None:
            self._copier.keep(step)
        self.damaged.discard(step)
        self.near.committed(step, metric)
        if self._copier is not None:
            self._copier.start()

    def verified(self, step: int) -> None:
        """Record that all of a step has been read back and compared, where it was read."""
        is_near = self.best_place(step) == self.near.folder(step)
        (self.near if is_near else self._home).note(step, verified=True)

    def delete(self, step: int) -> None:
        """Delete a step everywhere; see RunFolder. Collective."""
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
        if self._comm.rank == 0 and not any(is_committed(f.folder(step)) for f in self._folders):
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
