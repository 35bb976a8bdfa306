"""Converts into a checkpoint of any backend: an ordinary save whose data is lazy."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, WriteItem
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_steps import SaveHooks
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import ProgressOption
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.tools.convert.copying import cast
from dist_checkpointing.tools.convert.destination import cleared_on_failure
from dist_checkpointing.tools.convert.memory import Budget
from dist_checkpointing.tools.convert.plan import (
    ConversionPlan,
    PlannedTensor,
    is_cut_across,
    shards,
)
from dist_checkpointing.tools.convert.proof import prove_checkpoint
from dist_checkpointing.tools.convert.sources import Source

_LARGE_BYTES = 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 1024

ItemId = tuple[str, Ints | None]
"""Key and offset of an item."""


def convert_to_backend(
    source: Source,
    plan: ConversionPlan,
    destination: Location,
    backend: tuple[str, int],
    budget: Budget,
    *,
    overwrite: bool,
    tensors_only: bool,
    trusted: bool,
    progress: ProgressOption | None,
    stop: threading.Event,
) -> int:
    """Save what was planned as a checkpoint.

    Returns:
        Number of tensors whose fingerprints are those of the source.

    Raises:
        CheckpointingException: see ``save``. Nothing is left of the checkpoint then.
    """
    strategy = lazy_strategy(backend, budget, _LazyPlanner(source, plan, budget, stop))
    common = {} if tensors_only else dict(source.common)
    writer = strategy.make_writer(destination)
    layout, proves = writer.layout, bool(source.index.fingerprints)
    # Cut here as the backend would anyway, but along what is stored.
    most_bytes = budget.box_bytes
    if isinstance(layout, RowBlockLayout):
        most_bytes = min(most_bytes, layout.max_chunk_bytes)
    leaves: list[ShardedTensor | ShardedObject] = []
    for tensor in plan.tensors:
        leaves += _leaves(tensor, most_bytes)
    for sharded in plan.objects:
        for cell in itertools.product(*map(range, sharded.shape)):
            value = source.object_cell(sharded.source_key, cell)
            leaves.append(ShardedObject(sharded.key, value, sharded.shape, cell))
    # A dict that holds nothing but sharded leaves leaves no trace in the common state.
    free_key = next(name for name in map(str, itertools.count()) if name not in common)
    state_dict = {**common, free_key: dict(enumerate(leaves))} if leaves else common

    def check_source(_: object) -> None:
        source.check_unchanged()

    with cleared_on_failure(destination):
        save_with_hooks(
            SaveHooks(before_claim=check_source),
            state_dict,
            destination,
            comm=SingleProcess(),
            sharded_strategy=strategy,
            overwrite=overwrite,
            progress=progress,
            trusted=trusted,
            fingerprints=proves and writer.keeps_fingerprints,
        )
    if not proves:
        return 0
    try:
        return prove_checkpoint(plan, source, destination, budget.box_bytes)
    except BaseException:
        remove_checkpoint(destination)
        raise


def lazy_strategy(
    backend: tuple[str, int], budget: Budget, planner: DefaultSavePlanner | None = None
) -> PlannedSaveStrategy:
    """The strategy that saves what the planner reads.

    Raises:
        StrategyNotFoundError: if there is no such backend.
        CheckpointingException: if it takes no planner.
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


def _leaves(tensor: PlannedTensor, most_bytes: int) -> list[ShardedTensor]:
    dtype, shape = tensor.dtype.torch, tensor.shape
    return [
        ShardedTensor(
            tensor.key,
            torch.empty(box.shape, dtype=dtype, device="meta"),
            dtype,
            box.shape,
            shape,
            box.offset,
            None,
        )
        for box in shards(tensor, most_bytes)
    ]


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


class _LazyPlanner(DefaultSavePlanner):
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
        for group in _groups(final.items, self._tensors, self._most_together):
            for item in group.items:
                self._groups[_item_id(item)] = group
        return final

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        if item.tensor_data is None:
            return super().get_data(item)
        if self._stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        group = self._groups.get(_item_id(item))
        if group is None:
            return self._read([item])[0]
        with group.lock:
            if group.waiting is None:
                if self._waiting_bytes >= self._most_waiting:
                    return self._read([item])[0]
                group.waiting = dict(
                    zip(map(_item_id, group.items), self._read_group(group), strict=True)
                )
                self._count(sum(data.nbytes for data in group.waiting.values()))
            data = group.waiting.pop(_item_id(item), None)
        if data is None:  # it was read alone before the others were
            return self._read([item])[0]
        self._count(-data.nbytes)
        return data

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes += num_bytes

    def _read_group(self, group: _Group) -> list[torch.Tensor]:
        if group.box is None:
            return self._read(group.items)
        tensor = self._tensors[group.items[0].index.fqn]
        (read,) = self._source.read([(tensor.source.key, group.box)])
        values = cast(read, tensor.dtype.torch)
        origin = group.box.offset
        return [values[_box(item).relative_to(origin).slices()] for item in group.items]

    def _read(self, items: Sequence[WriteItem]) -> list[torch.Tensor]:
        tensors = [self._tensors[item.index.fqn] for item in items]
        read = self._source.read(
            [(t.source.key, _box(item)) for t, item in zip(tensors, items, strict=True)]
        )
        return [cast(data, t.dtype.torch) for t, data in zip(tensors, read, strict=True)]


def _item_id(item: WriteItem) -> ItemId:
    return item.index.fqn, item.index.offset


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _groups(
    items: Sequence[WriteItem], tensors: Mapping[str, PlannedTensor], most_bytes: int
) -> Iterator[_Group]:
    """Which items are read together: rows of parts that are cut across, and small neighbours."""
    small: list[tuple[WriteItem, int]] = []
    plain = [item for item in items if item.tensor_data is not None]
    for (key, *_), found in itertools.groupby(plain, _row):
        row = list(found)
        shape = tensors[key].shape
        if len(row) > 1 and is_cut_across(tensors[key]):
            first = _box(row[0])
            box = Box((first.offset[0], *[0] * (len(shape) - 1)), (first.shape[0], *shape[1:]))
            is_whole = sum(_box(item).num_elements for item in row) == box.num_elements
            num_bytes_of_box = box.num_elements * tensors[key].widest_itemsize
            if is_whole and _LARGE_BYTES <= num_bytes_of_box <= 2 * most_bytes:
                yield _Group(row, box)
                continue
        sized = [(item, item.tensor_storage_size() or 0) for item in row]
        small += [(item, num_bytes) for item, num_bytes in sized if num_bytes < _LARGE_BYTES]
    yield from map(_Group, in_batches(small, _TOGETHER_BYTES, _MOST_TOGETHER))


def _row(item: WriteItem) -> tuple[str, int, int]:
    """Equal for parts of a tensor that hold the same rows."""
    box = _box(item)
    return item.index.fqn, *((box.offset[0], box.shape[0]) if box.shape else (0, 1))
