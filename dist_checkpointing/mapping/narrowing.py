"""Rows of a shard, as a shard of the tensor that every rank narrows in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dist_checkpointing.mapping.base import invalid_sharding as _invalid

if TYPE_CHECKING:
    from dist_checkpointing.mapping.tensor import ShardedTensor


def narrowed(leaf: ShardedTensor, dim: int, start: int, length: int) -> list[ShardedTensor]:
    """See ``ShardedTensor.narrow``."""
    if not -len(leaf.local_shape) <= dim < len(leaf.local_shape):
        raise _invalid(leaf.key, "no such local axis", found=dim)
    dim = dim % len(leaf.local_shape)
    extent = leaf.local_shape[dim]
    axis = dim + leaf.prepend_axis_num
    if extent == 0 or leaf.global_shape[axis] % extent or leaf.global_offset[axis] % extent:
        raise _invalid(leaf.key, f"axis {dim} is not cut evenly and cannot be narrowed")
    if not 0 <= start <= start + length <= extent:
        raise _invalid(
            leaf.key,
            f"rows outside local axis {dim}",
            expected=f"0 .. {extent}",
            found=f"{start} .. {start + length}",
        )

    def scaled(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:axis], values[axis] * length // extent, *values[axis + 1 :])

    local_shape = (*leaf.local_shape[:dim], length, *leaf.local_shape[dim + 1 :])
    shape, offset = scaled(leaf.global_shape), scaled(leaf.global_offset)
    if leaf.flattened_range is None:
        data = None if leaf.data is None else leaf.data.narrow(dim, start, length)
        flat = None
    else:
        if dim != 0:
            raise _invalid(
                leaf.key,
                "a flattened shard can only be narrowed along axis 0, because what is left of "
                "it along another axis is not one range of the narrowed shard's elements",
                expected="axis 0",
                found=f"axis {dim}",
                remedy="Narrow the tensor before it is flattened.",
            )
        row = math.prod(leaf.local_shape[1:])
        own = leaf.flattened_range
        first = max(own.start, start * row)
        last = min(own.stop, (start + length) * row)
        if first >= last:
            return []
        data = None if leaf.data is None else leaf.data[first - own.start : last - own.start]
        flat = slice(first - start * row, last - start * row)
    cut = replace(
        leaf,
        data=data,
        local_shape=local_shape,
        global_shape=shape,
        global_offset=offset,
        flattened_range=flat,
    )
    return [cut]
