"""Converts into a backend of ours (or a third party's): an ordinary save whose data is lazy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.conversion.destination import cleared_on_failure
from dist_checkpointing.conversion.memory import Spending
from dist_checkpointing.conversion.plan import ConversionPlan, PlannedTensor, shards
from dist_checkpointing.conversion.pump import Stopped, cast
from dist_checkpointing.conversion.sources import Source
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.geometry import Box
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.options import StorageOptions
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, WriteItem
from dist_checkpointing.progress import ProgressCallback
from dist_checkpointing.saving import save
from dist_checkpointing.strategies.base import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select

_LARGE_BYTES = 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 1024
_MOST_WAITING_BYTES = 32 * 2**20


def convert_to_backend(
    source: Source,
    plan: ConversionPlan,
    destination: Path,
    backend: tuple[str, int],
    spending: Spending,
    *,
    overwrite: bool,
    tensors_only: bool,
    progress: ProgressCallback | None,
    stop: threading.Event,
) -> None:
    """Save what was planned as a checkpoint.

    Raises:
        CheckpointingException: see ``save``. Nothing is left of the checkpoint then.
    """
    strategy = lazy_strategy(backend, spending, _LazyPlanner(source, plan, stop))
    common = {} if tensors_only else dict(source.common)
    leaves: list[ShardedTensor | ShardedObject] = []
    for tensor in plan.tensors:
        leaves += _leaves(tensor, spending.box_bytes)
    for sharded in plan.objects:
        for cell in itertools.product(*map(range, sharded.shape)):
            value = source.object_cell(sharded.source_key, cell)
            leaves.append(ShardedObject(sharded.key, value, sharded.shape, cell))
    # A dict that holds nothing but sharded leaves leaves no trace in the common state.
    place = next(name for name in map(str, itertools.count()) if name not in common)
    state_dict = {**common, place: dict(enumerate(leaves))} if leaves else common

    def check_source(_: object) -> None:
        source.check_unchanged()

    with cleared_on_failure(destination):
        save(
            state_dict,
            destination,
            strategy,
            comm=SingleProcess(),
            overwrite=overwrite,
            progress=progress,
            before_claim=check_source,
        )


def lazy_strategy(
    backend: tuple[str, int], spending: Spending, planner: DefaultSavePlanner | None = None
) -> SaveShardedStrategy:
    """The strategy that saves what the planner reads.

    Raises:
        StrategyNotFoundError: if there is no such backend.
        CheckpointingException: if it takes no planner.
    """
    found: SaveShardedStrategy = select(StrategyAction.SAVE_SHARDED, backend)
    if not isinstance(found, PlannedSaveStrategy):
        finding = Finding(
            "it has no planner, so all tensors would have to be in memory", found=type(found)
        )
        raise CheckpointingException(f"cannot convert into {backend[0]} {backend[1]}", [finding])
    options = StorageOptions(threads=spending.threads, buffer_bytes=spending.buffer_bytes)
    return type(found)(planner=planner, options=options)


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


class _LazyPlanner(DefaultSavePlanner):
    """Reads from the source when the writer asks for an item; small neighbours are read at once."""

    def __init__(self, source: Source, plan: ConversionPlan, stop: threading.Event) -> None:
        super().__init__()
        self._source = source
        self._tensors = {tensor.key: tensor for tensor in plan.tensors}
        self._stop = stop
        self._groups: dict[tuple[str, Any], list[WriteItem]] = {}
        self._waiting: dict[tuple[str, Any], torch.Tensor] = {}
        self._waiting_bytes = 0
        self._lock = threading.Lock()

    @property
    def makes_data(self) -> bool:
        return True

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        final = super().finalize_plan(plan)
        for group in _groups(final.items):
            for item in group:
                self._groups[_place(item)] = group
        return final

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        if item.tensor_data is None:
            return super().get_data(item)
        if self._stop.is_set():
            raise Stopped("the conversion was interrupted")
        place = _place(item)
        with self._lock:
            data = self._take(place)
        if data is not None:
            return data
        group = self._groups.get(place, [item])
        if len(group) == 1 or self._waiting_bytes >= _MOST_WAITING_BYTES:
            return self._read([item])[0]
        with self._lock:
            # Another thread may have read the group meanwhile.
            data = self._take(place)
            if data is not None:
                return data
            group = [other for other in group if _place(other) in self._groups]
            for other, tensor in zip(group, self._read(group), strict=True):
                del self._groups[_place(other)]
                self._waiting[_place(other)] = tensor
                self._waiting_bytes += tensor.nbytes
            return self._take(place)

    def _take(self, place: tuple[str, Any]) -> torch.Tensor | None:
        data = self._waiting.pop(place, None)
        if data is not None:
            self._waiting_bytes -= data.nbytes
        return data

    def _read(self, items: Sequence[WriteItem]) -> list[torch.Tensor]:
        wanted: list[tuple[str, Box]] = []
        for item in items:
            assert item.tensor_data is not None
            wanted.append((self._tensors[item.index.fqn].source.key, item.tensor_data.chunk))
        read = self._source.read(wanted)
        return [
            cast(data, self._tensors[item.index.fqn].dtype.torch)
            for item, data in zip(items, read, strict=True)
        ]


def _place(item: WriteItem) -> tuple[str, Any]:
    return item.index.fqn, item.index.offset


def _groups(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Small items that follow each other, together; large ones alone."""
    groups: list[list[WriteItem]] = []
    group: list[WriteItem] = []
    size = 0
    for item in items:
        num_bytes = item.tensor_storage_size()
        if num_bytes is None or num_bytes >= _LARGE_BYTES:
            continue
        if group and (size + num_bytes > _TOGETHER_BYTES or len(group) >= _MOST_TOGETHER):
            groups.append(group)
            group, size = [], 0
        group.append(item)
        size += num_bytes
    return [*groups, group] if group else groups
