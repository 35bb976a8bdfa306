"""The checks of the fields of a ShardedTensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.mapping.base import invalid_sharding as _invalid
from dist_checkpointing.mapping.base import plain_ints, plain_replica_id

if TYPE_CHECKING:
    from dist_checkpointing.mapping.tensor import ShardedTensor


fields_of: Callable[[Any], tuple[Any, ...]] = attrgetter(
    "key",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
    "flattened_range",
)
"""All fields of a ShardedTensor but ``data``, in the order of the class."""


def check_fields(leaf: ShardedTensor) -> None:
    """Raise InvalidShardingError if the fields contradict each other."""
    for name in ("local_shape", "global_shape", "global_offset"):
        values = getattr(leaf, name)
        if min(plain_ints(values, name, leaf.key), default=0) < 0:
            raise _invalid(leaf.key, f"{name} must hold ints >= 0", found=values)
    plain_replica_id(leaf.replica_id, leaf.key)
    local, offset = tuple(leaf.local_shape), tuple(leaf.global_offset)
    if leaf.prepend_axis_num < 0:
        raise _invalid(
            leaf.key, "prepend_axis_num must not be negative", found=leaf.prepend_axis_num
        )
    if len(leaf.global_shape) != len(offset):
        raise _invalid(
            leaf.key,
            "global_offset and global_shape must have one entry for each axis",
            expected=f"{len(leaf.global_shape)} axes",
            found=f"global_offset {offset}",
        )
    if len(local) + leaf.prepend_axis_num != len(leaf.global_shape):
        raise _invalid(
            leaf.key,
            "local axes and prepended axes must add up to the global ones",
            expected=f"{len(leaf.global_shape)} axes",
            found=f"local_shape {local} with {leaf.prepend_axis_num} prepended",
        )
    _check_data(leaf, local)
    _check_grid(leaf, local, offset)
    _check_bounds(leaf)


def _check_data(leaf: ShardedTensor, local: Ints) -> None:
    flat = leaf.flattened_range
    if flat is not None:
        if flat.step is not None:
            raise _invalid(leaf.key, "flattened_range must not have a step", found=flat)
        size = math.prod(local)
        if flat.start is None or flat.stop is None or not 0 <= flat.start <= flat.stop <= size:
            raise _invalid(
                leaf.key,
                "flattened_range must lie inside the local tensor",
                expected=f"0 <= start <= stop <= {size}",
                found=flat,
            )
    if leaf.data is None:
        return
    require_tensor(leaf.data, leaf.key)
    if leaf.data.dtype != leaf.dtype:
        raise _invalid(
            leaf.key, "data has another dtype", expected=leaf.dtype, found=leaf.data.dtype
        )
    expected = local if flat is None else (flat.stop - flat.start,)
    if tuple(leaf.data.shape) != expected:
        what = "data" if flat is None else f"flattened data for {flat}"
        raise _invalid(
            leaf.key,
            f"{what} has another shape",
            expected=expected,
            found=tuple(leaf.data.shape),
        )


def _check_grid(leaf: ShardedTensor, local: Ints, offset: Ints) -> None:
    if leaf.axis_fragmentations is None:
        return
    if len(leaf.axis_fragmentations) != len(leaf.global_shape):
        raise _invalid(
            leaf.key,
            "axis_fragmentations must have one entry for each global axis",
            expected=f"{len(leaf.global_shape)} axes",
            found=leaf.axis_fragmentations,
        )
    if any(count < 1 for count in leaf.axis_fragmentations):
        raise _invalid(
            leaf.key,
            "axis_fragmentations must be at least 1",
            found=leaf.axis_fragmentations,
        )
    own_axes = offset[leaf.prepend_axis_num :]
    if any(extent and start % extent for start, extent in zip(own_axes, local, strict=True)):
        raise _invalid(
            leaf.key,
            "in a regular grid the offset must be a multiple of the local shape",
            expected=f"multiples of {local}",
            found=own_axes,
            remedy="For uneven cuts pass axis_fragmentations=None.",
        )


def _check_bounds(leaf: ShardedTensor) -> None:
    if leaf.allow_shape_mismatch:  # the last shards of a padded axis may extend beyond the tensor
        return
    shape = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    places = zip(leaf.global_offset, shape, leaf.global_shape, strict=True)
    if any(start + extent > whole for start, extent, whole in places):
        stop = leaf.box.stop
        raise _invalid(
            leaf.key,
            "the shard sticks out of the global tensor",
            expected=f"at most {tuple(leaf.global_shape)}",
            found=f"{tuple(leaf.global_offset)} .. {stop}",
        )


def require_tensor(data: Any, key: str) -> None:
    """Raise InvalidShardingError unless the data of the leaf ``key`` is a torch tensor."""
    if not isinstance(data, torch.Tensor):
        raise _invalid(
            key,
            "data must be a torch tensor",
            found=f"{type(data).__module__}.{type(data).__qualname__}",
            remedy="torch.as_tensor(data) makes one; from an array, it makes no copy.",
        )
    if data.is_nested:
        raise _invalid(
            key,
            "data is a nested tensor, which has no shape",
            remedy="Save its values and offsets.",
        )
