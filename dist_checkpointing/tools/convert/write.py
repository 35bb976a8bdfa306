"""Writes what was planned, whole or not at all and never over what is there.

Into files with room for it, by a few threads that each hold one batch of boxes at a time; or by an
ordinary save, whose planner reads from the source.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import CheckpointExistsError, CheckpointingException, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.locks import LOCK_NAME, FolderLock
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.object_store_locks import CLAIMS
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.commit import DATA, check_is_distributed_checkpoint
from dist_checkpointing.format.geometry import Box, Ints, ravel_offset
from dist_checkpointing.format.leftovers import attempt_of, leftovers
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, tensor_memory
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, WriteItem
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.base import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.threads import in_threads
from dist_checkpointing.tools.convert.plan import (
    Budget,
    ConversionPlan,
    PlannedTensor,
    is_cut_across,
    runs,
    shards,
)
from dist_checkpointing.tools.convert.source import Source

_MOST_COPIED_TOGETHER = 512
_LARGE_BYTES = 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 1024

ItemId = tuple[str, Ints | None]
"""Key and offset of an item."""


def copy_into_files(
    tensors: Mapping[str, PlannedTensor],
    starts: Mapping[Path, Mapping[str, int]],
    source: Source,
    budget: Budget,
    stop: threading.Event,
    report: Callable[[int], None],
) -> None:
    """Copy tensors, in C order, into files that have room for them.

    Args:
        tensors: What to copy, by new key.
        starts: For each file, at which byte the values of which tensors begin.
        source: Where they come from.
        budget: Threads and memory.
        stop: Event that ends it when set.
        report: Called with the number of bytes written since the last call.

    Raises:
        CheckpointingException: if ``stop`` was set.
        Exception: the first error of any thread, when all have ended.
    """

    def move(batch: Sequence[tuple[PlannedTensor, Box, int, int]]) -> None:
        """Copy what is read at once: one large box, or many small ones."""
        if stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        values = source.read([(tensor.source.key, box) for tensor, box, *_ in batch])
        for number, (tensor, box, descriptor, start) in enumerate(batch):
            data = values[number].to(tensor.dtype.torch)
            values[number] = torch.empty(0)  # freed one after the other
            position = start + ravel_offset(box.offset, tensor.shape) * tensor.dtype.itemsize
            view = bytes_of(np.ascontiguousarray(tensor_memory.as_numpy(data)))
            while view:
                count = os.pwrite(descriptor, view, position)
                view, position = view[count:], position + count
            report(data.nbytes)

    with ExitStack() as stack:
        boxes = (
            ((tensor, box, file.fileno(), start), box.num_elements * tensor.widest_itemsize)
            for path, starts_of in starts.items()
            for file in [stack.enter_context(path.open("r+b"))]
            for tensor, start in ((tensors[key], start) for key, start in starts_of.items())
            for box in runs(tensor, budget.box_bytes)
        )
        batches = list(in_batches(boxes, budget.box_bytes, _MOST_COPIED_TOGETHER))
        in_threads(move, batches, budget.threads)


def lazy_strategy(
    backend: tuple[str, int], budget: Budget, planner: DefaultSavePlanner | None = None
) -> PlannedSaveStrategy:
    """The strategy that saves what the planner reads.

    Raises:
        StrategyNotFoundError: if there is no such backend.
        CheckpointingException: if it accepts no planner.
    """
    found: SaveShardedStrategy = select_strategy(StrategyAction.SAVE_SHARDED, backend)
    if not isinstance(found, PlannedSaveStrategy):
        finding = Finding(
            "it has no planner, so all tensors would have to be in memory", found=type(found)
        )
        raise CheckpointingException(f"cannot convert into {backend[0]} {backend[1]}", [finding])
    # A copy: a strategy that was registered by hand belongs to somebody else.
    strategy = copy.copy(found)
    strategy.planner = planner
    strategy.options = StorageOptions(threads=budget.threads, buffer_bytes=budget.buffer_bytes)
    return strategy


def leaves_of(
    plan: ConversionPlan, source: Source, most_bytes: int
) -> Iterator[ShardedTensor | ShardedObject]:
    """What to save: tensors without memory in boxes of at most ``most_bytes``, and objects."""
    for tensor in plan.tensors:
        dtype = tensor.dtype.torch
        for box in shards(tensor, most_bytes):
            data = torch.empty(box.shape, dtype=dtype, device="meta")
            yield ShardedTensor(tensor.key, data, dtype, box.shape, tensor.shape, box.offset, None)
    for planned in plan.objects:
        handle = source.objects[planned.source_key]
        for cell in handle:
            yield ShardedObject(planned.key, handle[cell], planned.shape, cell)


class _Group:
    """Items that are read together, and those of them that were read and not yet asked for.

    Attributes:
        items: in the order of the plan.
        box: the box that they make up, if it is read as one.
    """

    def __init__(self, items: list[WriteItem], box: Box | None = None) -> None:
        self.items, self.box = items, box
        self.lock = threading.Lock()
        self.waiting: dict[ItemId, torch.Tensor] | None = None


class LazyPlanner(DefaultSavePlanner):
    """Reads from the source when the writer asks for an item; neighbours are read together."""

    def __init__(
        self, source: Source, plan: ConversionPlan, budget: Budget, stop: threading.Event
    ) -> None:
        super().__init__()
        self._source = source
        self._tensors = {tensor.key: tensor for tensor in plan.tensors}
        self._most_together = budget.box_bytes
        self._most_waiting = budget.threads * budget.box_bytes
        self._stop = stop
        self._groups: dict[ItemId, _Group] = {}
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    @property
    def makes_data(self) -> bool:
        return True

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        final = super().finalize_plan(plan)
        for group in self._grouped(final.items):
            for item in group.items:
                self._groups[_item_id(item)] = group
        return final

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        if item.tensor_data is None:
            return super().get_data(item)
        if self._stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        name = _item_id(item)
        group = self._groups.get(name)
        if group is None:
            return self._read([item])[0]
        with group.lock:
            if group.waiting is None and self._waiting_bytes < self._most_waiting:
                values = self._read(group.items, group.box)
                group.waiting = dict(zip(map(_item_id, group.items), values, strict=True))
                self._count(sum(data.nbytes for data in values))
            data = None if group.waiting is None else group.waiting.pop(name, None)
        if data is None:  # there is no room for its group, or it was read before its group
            return self._read([item])[0]
        self._count(-data.nbytes)
        return data

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes += num_bytes

    def _read(self, items: Sequence[WriteItem], whole: Box | None = None) -> list[torch.Tensor]:
        """The data of items; of parts of one box, which is read as one."""
        tensors = [self._tensors[item.index.fqn] for item in items]
        if whole is not None:
            (read,) = self._source.read([(tensors[0].source.key, whole)])
            read = read.to(tensors[0].dtype.torch)
            return [read[_box(item).relative_to(whole.offset).slices()] for item in items]
        boxes = [(t.source.key, _box(item)) for t, item in zip(tensors, items, strict=True)]
        found = self._source.read(boxes)
        return [data.to(t.dtype.torch) for t, data in zip(tensors, found, strict=True)]

    def _grouped(self, items: Sequence[WriteItem]) -> Iterator[_Group]:
        """Items to read together: rows of parts that are cut across, and small neighbours."""
        small: list[tuple[WriteItem, int]] = []
        plain = [item for item in items if item.tensor_data is not None]
        for (key, *_), found in itertools.groupby(plain, _row):
            row, tensor = list(found), self._tensors[key]
            if len(row) > 1 and is_cut_across(tensor):
                first, shape = _box(row[0]), tensor.shape
                box = Box((first.offset[0], *[0] * (len(shape) - 1)), (first.shape[0], *shape[1:]))
                is_whole = sum(_box(item).num_elements for item in row) == box.num_elements
                num_bytes = box.num_elements * tensor.widest_itemsize
                if is_whole and _LARGE_BYTES <= num_bytes <= 2 * self._most_together:
                    yield _Group(row, box)
                    continue
            sized = [(item, item.tensor_storage_size() or 0) for item in row]
            small += [(item, size) for item, size in sized if size < _LARGE_BYTES]
        yield from map(_Group, in_batches(small, _TOGETHER_BYTES, _MOST_TOGETHER))


def _item_id(item: WriteItem) -> ItemId:
    return item.index.fqn, item.index.offset


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _row(item: WriteItem) -> tuple[str, int, int]:
    """Equal for parts of a tensor that hold the same rows."""
    box = _box(item)
    return item.index.fqn, *((box.offset[0], box.shape[0]) if box.shape else (0, 1))


def check_apart(sources: Iterable[Location], destination: Location) -> None:
    """Refuse to write into what is read.

    Raises:
        CheckpointExistsError: if one is, or is inside, the other.
    """
    for source in sources:
        if location.overlap(source, destination):
            finding = Finding(
                "source and destination overlap",
                path=str(destination),
                remedy="Convert into another place.",
            )
            raise CheckpointExistsError("cannot convert a checkpoint into itself", [finding])


def check_checkpoint_place(folder: Location, *, overwrite: bool) -> None:
    """Refuse a place for a checkpoint that is taken; a conversion that did not end may lie there.

    Raises:
        CheckpointExistsError: if something else is there.
    """
    if not location.is_there(folder):
        return
    if not location.is_folder(folder):
        raise _exists(folder, "a file is here", "Name another place.")
    if check_is_distributed_checkpoint(folder):
        if not overwrite:
            raise _exists(folder, "a checkpoint is here", "Name another place, or pass --force.")
        return
    ours = {Path(name).parts[0] for name in leftovers(folder)} | {DCKPT_FOLDER, LOCK_NAME}
    if location.is_there(folder / CLAIMS):
        ours.add(DATA)
    others = sorted({*location.names_in(folder)} - ours)
    if others:
        raise _exists(folder, f"the folder holds {others[0]!r}", "Name an empty or a new folder.")


@contextmanager
def cleared_on_failure(folder: Location) -> Iterator[None]:
    """Leave nothing of a checkpoint that the body began to write and did not commit."""
    before = attempt_of(folder)
    try:
        yield
    except BaseException:
        began = attempt_of(folder) != before
        if began and not check_is_distributed_checkpoint(folder):
            remove_checkpoint(folder)
        raise


@contextmanager
def written_beside(
    destination: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """A path to write a file or folder at, which becomes ``destination`` if the body succeeds.

    It lies in a hidden folder beside it. A conversion that was killed leaves that; the next one
    begins by deleting it.

    Args:
        destination: a file or folder.
        overwrite: replace what is there, if it is ``replaceable``.
        replaceable: whether what is there is of the kind that is written.

    Raises:
        CheckpointExistsError: if the destination is taken, or another conversion writes there.
    """
    _check_free(destination, overwrite=overwrite, replaceable=replaceable)
    destination.parent.mkdir(parents=True, exist_ok=True)
    hidden = destination.with_name(f".{destination.name}.dckpt-partial")
    hidden.mkdir(exist_ok=True)
    try:
        lock = FolderLock.acquire(hidden)
    except CheckpointExistsError as error:
        findings = [replace(f, problem="another conversion writes here") for f in error.findings]
        raise CheckpointExistsError(f"{destination} already exists", findings) from None
    with lock:
        for entry in hidden.iterdir():
            if entry.name != LOCK_NAME:
                local_folder.remove(entry, hidden)
        try:
            yield hidden / "new"
            _check_free(destination, overwrite=overwrite, replaceable=replaceable)
            _put(hidden / "new", destination, hidden / "old")
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _put(new: Path, destination: Path, old: Path) -> None:
    if new.is_dir():
        local_folder.fsync_tree(new)
        if destination.is_dir():
            destination.rename(old)
    else:
        local_folder.fsync_file(new)
    new.replace(destination)
    local_folder.fsync_folder(destination.parent)


def _check_free(destination: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
    is_empty = destination.is_dir() and not any(destination.iterdir())
    if is_empty or not os.path.lexists(destination):
        return
    if not overwrite:
        raise _exists(destination, "something is here", "Name another place, or pass --force.")
    if not replaceable(destination):
        raise _exists(
            destination,
            "holds something else than what would be written",
            "Delete it by hand, or name another place.",
        )


def _exists(path: Location, problem: str, remedy: str) -> CheckpointingException:
    finding = Finding(problem, path=str(path), remedy=remedy)
    return CheckpointExistsError(f"{path} already exists", [finding])
