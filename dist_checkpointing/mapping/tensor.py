"""ShardedTensor: a local tensor and its place in a global one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.geometry import Box, unravel_range
from dist_checkpointing.mapping.base import ReplicaId, ShardedBase, require_tensor
from dist_checkpointing.mapping.base import invalid_sharding as _invalid


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor and its place in a global one.

    Attributes:
        key: name of the global tensor.
        data: the local tensor; None in a template that only describes.
        dtype: element type of ``data``.
        local_shape: shape of the local tensor (before flattening), without prepended axes.
        global_shape: shape of the global tensor, prepended axes included.
        global_offset: where the local tensor begins, in elements, prepended axes included.
        axis_fragmentations: number of chunks along each global axis of a regular grid; None for
            an uneven one.
        replica_id: all zeros on exactly one of the ranks that hold the same part.
        prepend_axis_num: number of leading axes that exist only globally (local extent 1).
        allow_shape_mismatch: on load, the stored global shape may differ; what is not stored is
            zero.
        flattened_range: if given, ``data`` is 1-D and holds this slice of the C-order flattening
            of a tensor of ``local_shape``.

    Raises:
        InvalidShardingError: from the constructor, if the fields contradict each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        for name in ("local_shape", "global_shape", "global_offset"):
            values = getattr(self, name)
            if not all(isinstance(value, int) and value >= 0 for value in values):
                raise _invalid(self.key, f"{name} must hold ints >= 0", found=values)
        local, offset = tuple(self.local_shape), tuple(self.global_offset)
        if self.prepend_axis_num < 0:
            raise _invalid(
                self.key, "prepend_axis_num must not be negative", found=self.prepend_axis_num
            )
        if len(self.global_shape) != len(offset):
            raise _invalid(
                self.key,
                "global_offset and global_shape must have one entry for each axis",
                expected=f"{len(self.global_shape)} axes",
                found=f"global_offset {offset}",
            )
        if len(local) + self.prepend_axis_num != len(self.global_shape):
            raise _invalid(
                self.key,
                "local axes and prepended axes must add up to the global ones",
                expected=f"{len(self.global_shape)} axes",
                found=f"local_shape {local} with {self.prepend_axis_num} prepended",
            )
        self._validate_data(local)
        self._validate_grid(local, offset)
        self._validate_bounds()

    def _validate_data(self, local: tuple[int, ...]) -> None:
        flat = self.flattened_range
        if flat is not None:
            if flat.step is not None:
                raise _invalid(self.key, "flattened_range must not have a step", found=flat)
            size = math.prod(local)
            if flat.start is None or flat.stop is None or not 0 <= flat.start <= flat.stop <= size:
                raise _invalid(
                    self.key,
                    "flattened_range must lie inside the local tensor",
                    expected=f"0 <= start <= stop <= {size}",
                    found=flat,
                )
        if self.data is None:
            return
        require_tensor(self.key, self.data)
        if self.data.dtype != self.dtype:
            raise _invalid(
                self.key, "data has another dtype", expected=self.dtype, found=self.data.dtype
            )
        expected = local if flat is None else (flat.stop - flat.start,)
        if tuple(self.data.shape) != expected:
            what = "data" if flat is None else f"flattened data for {flat}"
            raise _invalid(
                self.key,
                f"{what} has another shape",
                expected=expected,
                found=tuple(self.data.shape),
            )

    def _validate_grid(self, local: tuple[int, ...], offset: tuple[int, ...]) -> None:
        if self.axis_fragmentations is None:
            return
        if len(self.axis_fragmentations) != len(self.global_shape):
            raise _invalid(
                self.key,
                "axis_fragmentations must have one entry for each global axis",
                expected=f"{len(self.global_shape)} axes",
                found=self.axis_fragmentations,
            )
        if any(count < 1 for count in self.axis_fragmentations):
            raise _invalid(
                self.key,
                "axis_fragmentations must be at least 1",
                found=self.axis_fragmentations,
            )
        own_axes = offset[self.prepend_axis_num :]
        if any(extent and start % extent for start, extent in zip(own_axes, local, strict=True)):
            raise _invalid(
                self.key,
                "in a regular grid the offset must be a multiple of the local shape",
                expected=f"multiples of {local}",
                found=own_axes,
                remedy="For uneven cuts pass axis_fragmentations=None.",
            )

    def _validate_bounds(self) -> None:
        if self.allow_shape_mismatch:  # the last shards of a padded axis may stick out
            return
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        places = zip(self.global_offset, shape, self.global_shape, strict=True)
        if any(start + extent > whole for start, extent, whole in places):
            stop = self.box.stop
            raise _invalid(
                self.key,
                "the shard sticks out of the global tensor",
                expected=f"at most {tuple(self.global_shape)}",
                found=f"{tuple(self.global_offset)} .. {stop}",
            )

    @property
    def has_regular_grid(self) -> bool:
        """Whether the user declared a regular grid."""
        return self.axis_fragmentations is not None

    @property
    def box(self) -> Box:
        """The box of the global tensor that ``local_shape`` covers, prepended axes included."""
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        return Box(tuple(self.global_offset), shape)

    @property
    def flat_range(self) -> tuple[int, int] | None:
        """``flattened_range`` as ``(start, stop)``."""
        flat = self.flattened_range
        return None if flat is None else (flat.start, flat.stop)

    def global_slice(self) -> tuple[int | slice, ...]:
        """Index of the shard in the global tensor: ints on prepended axes, slices elsewhere."""
        own = self.box.slices()[self.prepend_axis_num :]
        return (*self.global_offset[: self.prepend_axis_num], *own)

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Index of the shard in the chunk grid; 0 on empty axes.

        Raises:
            InvalidShardingError: for an uneven grid.
        """
        if self.axis_fragmentations is None:
            raise _invalid(self.key, "an uneven grid has no chunk indices")
        box = self.box
        return tuple(o // e if e else 0 for o, e in zip(box.offset, box.shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Extent of a chunk along each global axis.

        Raises:
            InvalidShardingError: for an uneven grid, or a global shape that the grid does not
                divide (unless ``allow_shape_mismatch``).
        """
        if self.axis_fragmentations is None:
            raise _invalid(self.key, "an uneven grid has no chunk extents")
        chunks = []
        for extent, count in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if extent % count and not self.allow_shape_mismatch:
                raise _invalid(
                    self.key,
                    "the grid does not divide the global shape",
                    expected=f"a divisor of {extent}",
                    found=count,
                )
            chunks.append(extent // count)
        return tuple(chunks)

    def local_coordinates(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Index arrays, one a local axis, of the elements in ``flattened_range``."""
        flat = self._require_flat()
        return unravel_range(flat.start, flat.stop, tuple(self.local_shape))

    def global_coordinates(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Index arrays, one a global axis, of the elements in ``flattened_range``."""
        flat, box = self._require_flat(), self.box
        axes = unravel_range(flat.start, flat.stop, box.shape)
        return tuple(a + offset for a, offset in zip(axes, box.offset, strict=True))

    def _require_flat(self) -> slice:
        if self.flattened_range is None:
            raise _invalid(self.key, "only a flattened shard has coordinates")
        return self.flattened_range

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    def init_data(
        self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """If ``data`` is None, make it: ``init_fn(shape, dtype=, device=)``."""
        if self.data is not None:
            return
        flat = self.flattened_range
        shape = tuple(self.local_shape) if flat is None else (flat.stop - flat.start,)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """The shard cut to ``length`` rows from ``start`` along local axis ``dim``.

        Every rank is taken to narrow alike, so the global shape and offset shrink in proportion.

        Returns:
            One shard; for a flattened one, none if the range has no element in common.

        Raises:
            InvalidShardingError: if the axis is not evenly cut, or a flattened shard is narrowed
                along another axis than 0.
        """
        if not -len(self.local_shape) <= dim < len(self.local_shape):
            raise _invalid(self.key, "no such local axis", found=dim)
        dim = dim % len(self.local_shape)
        extent = self.local_shape[dim]
        axis = dim + self.prepend_axis_num
        if extent == 0 or self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            raise _invalid(self.key, f"axis {dim} is not cut evenly and cannot be narrowed")
        if not 0 <= start <= start + length <= extent:
            raise _invalid(
                self.key,
                f"rows outside local axis {dim}",
                expected=f"0 .. {extent}",
                found=f"{start} .. {start + length}",
            )

        def scaled(values: Sequence[int]) -> tuple[int, ...]:
            return (*values[:axis], values[axis] * length // extent, *values[axis + 1 :])

        local_shape = (*self.local_shape[:dim], length, *self.local_shape[dim + 1 :])
        shape, offset = scaled(self.global_shape), scaled(self.global_offset)
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            flat = None
        else:
            if dim != 0:
                raise _invalid(self.key, "a flattened shard can only be narrowed along axis 0")
            row = math.prod(self.local_shape[1:])
            own = self.flattened_range
            first = max(own.start, start * row)
            last = min(own.stop, (start + length) * row)
            if first >= last:
                return []
            data = None if self.data is None else self.data[first - own.start : last - own.start]
            flat = slice(first - start * row, last - start * row)
        narrowed = replace(
            self,
            data=data,
            local_shape=local_shape,
            global_shape=shape,
            global_offset=offset,
            flattened_range=flat,
        )
        return [narrowed]

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """A shard of a regular grid, described by positions in it.

        Args:
            key: name of the global tensor.
            data: the local tensor.
            *rank_offsets: ``(axis, position, count)``: along global ``axis`` (prepended axes
                included) the tensor is cut into ``count`` equal parts and this is number
                ``position``. Axes that are not named are not cut.
            replica_id: zero(s) on exactly one holder of this part.
            prepend_axis_num: number of leading axes that exist only globally.
            flattened_range: must be None; see ``from_rank_offsets_flat``.
            **init_kwargs: passed to the constructor, e.g. ``allow_shape_mismatch``.

        Raises:
            InvalidShardingError: for impossible positions; ValueError for a flattened range.
        """
        if flattened_range is not None:
            raise ValueError(
                "from_rank_offsets takes whole tensors; use from_rank_offsets_flat for a "
                "flattened_range"
            )
        extents = [1] * prepend_axis_num + list(data.shape)
        offset, counts = [0] * len(extents), [1] * len(extents)
        seen: set[int] = set()
        for axis, position, count in rank_offsets:
            if not 0 <= axis < len(extents) or axis in seen or not 0 <= position < count:
                raise InvalidShardingError(
                    f"Invalid rank offsets: {rank_offsets} for key {key}.",
                    [
                        Finding(
                            "(axis, position, count) needs each axis at most once, "
                            "0 <= axis < ndim and 0 <= position < count",
                            key,
                            expected=f"axis < {len(extents)}",
                            found=(axis, position, count),
                        )
                    ],
                )
            seen.add(axis)
            offset[axis], counts[axis] = position * extents[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(extent * count for extent, count in zip(extents, counts, strict=True)),
            tuple(offset),
            tuple(counts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """A 1-D slice of the flattening of a shard of a regular grid.

        Args:
            key: name of the global tensor.
            data: 1-D tensor with ``flattened_range.stop - flattened_range.start`` elements.
            non_flat_local_shape: shape of the shard before it was flattened.
            *rank_offsets: as for ``from_rank_offsets``.
            flattened_range: which elements of the flattened shard ``data`` holds.
            **kwargs: as for ``from_rank_offsets``.

        Raises:
            InvalidShardingError: if range, data and shape do not fit.
        """
        if flattened_range is None:
            raise _invalid(key, "from_rank_offsets_flat needs a flattened_range")
        require_tensor(key, data)
        start, stop = flattened_range.start, flattened_range.stop
        fits = start is not None and stop is not None and data.numel() == stop - start
        if data.ndim != 1 or not fits:
            raise _invalid(
                key,
                "data must be 1-D and as long as flattened_range",
                expected=flattened_range,
                found=tuple(data.shape),
            )
        shape = torch.empty(tuple(non_flat_local_shape), dtype=data.dtype, device="meta")
        whole = cls.from_rank_offsets(key, shape, *rank_offsets, **kwargs)
        return replace(whole, data=data, flattened_range=flattened_range)
