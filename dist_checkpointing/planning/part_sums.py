"""The sums, see ``format.fingerprints``, of tensors of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dist_checkpointing.format.geometry import Box, Ints, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.storage.fingerprints import (
    NOTHING,
    Sums,
    added,
    fingerprint_of,
    sums_of_part,
)
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES, batches, stream

_MOST_BYTES = 1 << 24
"""Of a tensor on another device are in memory at a time."""


def sums_of_tensor(
    values: torch.Tensor, box: Box, flat_range: tuple[int, int] | None, global_shape: Ints
) -> Sums:
    """The sums of a part of a tensor, which may be on any device; see ``sums_of_part``."""
    values = values.detach()
    if values.is_cpu:
        return sums_of_part(tensor_memory.as_numpy(values), box, flat_range, global_shape)
    return _sums_of_blocks(values, box, flat_range, global_shape, _MOST_BYTES)


def _sums_of_blocks(
    values: torch.Tensor,
    box: Box,
    flat_range: tuple[int, int] | None,
    global_shape: Ints,
    most_bytes: int,
) -> Sums:
    """The same of a tensor on another device, of which so many bytes are here at a time."""
    start = 0 if flat_range is None else flat_range[0]
    parts = []
    for block in split_rows(Box.whole(tuple(values.shape)), most_bytes // values.itemsize):
        own = tensor_memory.as_numpy(values[block.slices()].cpu())
        if flat_range is None:
            parts.append(sums_of_part(own, block.moved(box.offset), None, global_shape))
        else:
            begin = start + block.offset[0]
            parts.append(sums_of_part(own, box, (begin, begin + own.size), global_shape))
    return added(parts)


def sums_of_shard(shard: ShardedTensor) -> Sums:
    """The sums of what a shard holds, as a part of its global tensor."""
    assert shard.data is not None
    values = shard.data[(None,) * shard.prepend_axis_num] if shard.prepend_axis_num else shard.data
    return sums_of_tensor(values, shard.box, shard.flat_range, tuple(shard.global_shape))


def fingerprints_by_reading(
    index: Index,
    keys: Iterable[str],
    read: Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]],
    report: Callable[[int], None] = lambda _: None,
    most_bytes: int = DEFAULT_MEMORY_BYTES // 2,
) -> dict[str, str]:
    """The fingerprints of stored tensors, computed from their values."""
    total = dict.fromkeys(keys, NOTHING)

    def add(key: str, box: Box, values: torch.Tensor) -> None:
        own = sums_of_tensor(values, box, None, index[key].global_shape)
        total[key] = added((total[key], own))
        report(values.nbytes)

    regions = [(key, Box.whole(index[key].global_shape)) for key in total]
    stream(batches(index, regions, most_bytes), read, add)
    return {
        key: fingerprint_of(sums, index[key].dtype.name, index[key].global_shape)
        for key, sums in total.items()
    }
