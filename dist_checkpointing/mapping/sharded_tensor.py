"""ShardedTensor: a local tensor and its place in a global one; its constructors, ``narrow``, and
the checks of its fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints, unravel_range
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.mapping.dtensor_boxes import local_box
from dist_checkpointing.mapping.objects_and_factories import (
    ReplicaId,
    ShardedBase,
    invalid_sharding,
    plain_int,
    plain_ints,
    plain_range,
    plain_replica_id,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FIELDS: Callable[[Any], tuple[Any, ...]] = attrgetter(
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


def fields_of(leaf: ShardedTensor) -> tuple[Any, ...]:
    """All that a leaf says, without its values: the fields, dtype and shape of data."""
    data: Any = leaf.data
    try:
        return (*_FIELDS(leaf), data.dtype, data.shape)
    except (AttributeError, RuntimeError):  # no tensor, or a nested one, which has no shape
        return (*_FIELDS(leaf), type(data))


def require_tensor(data: Any, key: str) -> None:
    if not isinstance(data, torch.Tensor):
        found = f"{type(data).__module__}.{type(data).__qualname__}"
        remedy = "torch.as_tensor(data) makes one; from an array, it makes no copy."
        raise invalid_sharding(key, "data must be a torch tensor", found=found, remedy=remedy)
    if data.is_nested:
        problem = "data is a nested tensor, which has no shape"
        raise invalid_sharding(key, problem, remedy="Save its values and offsets.")


RankOffset = tuple[SupportsIndex, SupportsIndex, SupportsIndex]
"""An axis, the position of this part along it, and the number of parts, all of one size."""


@dataclass
class ShardedTensor(ShardedBase):
    """A local tensor and its place in a global one.

    Attributes:
        key: Name of the global tensor.
        data: The local tensor; None in a template that only describes.
        dtype: Element type of ``data``.
        local_shape: Shape of the local tensor (before flattening), without prepended axes.
        global_shape: Shape of the global tensor, prepended axes included.
        global_offset: Where the local tensor begins, in elements, prepended axes included.
        axis_fragmentations: Number of chunks along each global axis of a regular grid; None for
            an uneven one.
        replica_id: All zeros on exactly one of the ranks that hold the same part.
        prepend_axis_num: Number of leading axes that exist only globally (local extent 1).
        allow_shape_mismatch: On load, the stored global shape may differ, and the local tensor may
            extend beyond the global one; elements that are not stored are zero.
        flattened_range: If given, ``data`` is 1-D and holds this slice of the C-order flattening
            of a tensor of ``local_shape``.

    Integers of other types, such as numpy's, become plain ints.

    Raises:
        InvalidShardingError: from the constructor, if the fields contradict each other.

    Example:
        >>> rows = torch.ones(2, 3)  # rows 3 and 4 of a tensor of 7 rows, which are cut unevenly
        >>> shard = ShardedTensor.from_offset("w", rows, (7, 3), (3, 0))
        >>> shard.global_slice()
        (slice(3, 5, None), slice(0, 3, None))
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

    # Who casts values of another dtype to ``dtype`` in a save, "planner" or "writer". No field:
    # ``save`` alone sets it, on leaves of its own.
    cast_by = ""

    def __post_init__(self) -> None:
        key = self.key
        self.local_shape = plain_ints(self.local_shape, "local_shape", key)
        self.global_shape = plain_ints(self.global_shape, "global_shape", key)
        self.global_offset = plain_ints(self.global_offset, "global_offset", key)
        if (grid := self.axis_fragmentations) is not None:
            self.axis_fragmentations = plain_ints(grid, "axis_fragmentations", key)
        self.replica_id = plain_replica_id(self.replica_id, key)
        self.prepend_axis_num = plain_int(self.prepend_axis_num, "prepend_axis_num", key)
        self.flattened_range = plain_range(self.flattened_range, key)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        # A leaf is checked by its constructor and by every save; most stay as they are.
        checked = self.__dict__.get("_checked")
        if checked is None or checked != fields_of(self):
            self._check_fields()
            self.__dict__["_checked"] = fields_of(self)

    def _check_fields(self) -> None:
        """Raise InvalidShardingError if the fields contradict each other."""
        for name in ("local_shape", "global_shape", "global_offset"):
            values = getattr(self, name)
            if min(plain_ints(values, name, self.key), default=0) < 0:
                raise self._wrong(f"{name} must hold ints >= 0", found=values)
        plain_replica_id(self.replica_id, self.key)
        prepended, axes = self.prepend_axis_num, len(self.global_shape)
        if prepended < 0:
            raise self._wrong("prepend_axis_num must not be negative", found=prepended)
        if len(self.global_offset) != axes:
            problem = "global_offset and global_shape must have one entry for each axis"
            expected, found = f"global_shape {self.global_shape}", f"offset {self.global_offset}"
            raise self._wrong(problem, expected=expected, found=found)
        if len(self.local_shape) + prepended != axes:
            problem = "local axes and prepended axes must add up to the global ones"
            found = f"local_shape {tuple(self.local_shape)} with {prepended} prepended"
            raise self._wrong(problem, expected=f"global_shape {self.global_shape}", found=found)
        self._check_data(tuple(self.local_shape))
        if self.axis_fragmentations is not None:
            self._check_grid(self.axis_fragmentations)
        # The last shards of a padded axis may extend beyond the tensor.
        if self.sticks_out and not self.allow_shape_mismatch:
            problem = "the shard sticks out of the global tensor"
            whole = f"at most {tuple(self.global_shape)}"
            raise self._wrong(problem, expected=whole, found=str(self.box))

    def _check_data(self, shape: Ints) -> None:
        flat, data, what = self.flattened_range, self.data, "data"
        if flat is not None:
            if flat.step is not None:
                raise self._wrong("flattened_range must not have a step", found=flat)
            size = math.prod(shape)
            if flat.start is None or flat.stop is None or not 0 <= flat.start <= flat.stop <= size:
                problem = "flattened_range must lie inside the local tensor"
                raise self._wrong(problem, expected=f"0 <= start <= stop <= {size}", found=flat)
            shape, what = (flat.stop - flat.start,), f"flattened data for {flat}"
        if data is None:
            return
        require_tensor(data, self.key)
        if data.dtype != self.dtype and not self.cast_by:
            raise self._wrong("data has another dtype", expected=self.dtype, found=data.dtype)
        if tuple(data.shape) != shape:
            raise self._wrong(f"{what} has another shape", expected=shape, found=tuple(data.shape))

    def _check_grid(self, grid: Ints) -> None:
        if len(grid) != len(self.global_shape):
            problem = "axis_fragmentations must have one entry for each global axis"
            raise self._wrong(problem, expected=f"global_shape {self.global_shape}", found=grid)
        if any(count < 1 for count in grid):
            raise self._wrong("axis_fragmentations must be at least 1", found=grid)
        local, offset = tuple(self.local_shape), tuple(self.global_offset[self.prepend_axis_num :])
        if any(extent and start % extent for start, extent in zip(offset, local, strict=True)):
            raise self._wrong(
                "in a regular grid the offset must be a multiple of the local shape",
                expected=f"multiples of {local}",
                found=offset,
                remedy="For uneven cuts pass axis_fragmentations=None.",
            )

    @property
    def has_regular_grid(self) -> bool:
        """Whether a regular grid was declared."""
        return self.axis_fragmentations is not None

    @property
    def box(self) -> Box:
        """The box of the global tensor that ``local_shape`` covers, prepended axes included."""
        shape = (1,) * self.prepend_axis_num + tuple(self.local_shape)
        return Box(tuple(self.global_offset), shape)

    @property
    def sticks_out(self) -> bool:
        """Whether the box extends beyond the global tensor, which a padded shard may."""
        return not Box.whole(tuple(self.global_shape)).contains(self.box)

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
            raise self._wrong("an uneven grid has no chunk indices")
        box = self.box
        return tuple(o // e if e else 0 for o, e in zip(box.offset, box.shape, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Extent of a chunk along each global axis.

        Raises:
            InvalidShardingError: for an uneven grid, or a global shape that the grid does not
                divide (unless ``allow_shape_mismatch``).
        """
        if self.axis_fragmentations is None:
            raise self._wrong("an uneven grid has no chunk extents")
        chunks = []
        for extent, count in zip(self.global_shape, self.axis_fragmentations, strict=True):
            if extent % count and not self.allow_shape_mismatch:
                problem = "the grid does not divide the global shape"
                raise self._wrong(problem, expected=f"a divisor of {extent}", found=count)
            chunks.append(extent // count)
        return tuple(chunks)

    def local_coordinates(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Index arrays of the elements in ``flattened_range``, one for each local axis."""
        flat = self._require_flat()
        return unravel_range(flat.start, flat.stop, tuple(self.local_shape))

    def global_coordinates(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Index arrays of the elements in ``flattened_range``, one for each global axis."""
        flat, box = self._require_flat(), self.box
        axes = unravel_range(flat.start, flat.stop, box.shape)
        return tuple(a + offset for a, offset in zip(axes, box.offset, strict=True))

    def _require_flat(self) -> slice:
        if self.flattened_range is None:
            raise self._wrong("only a flattened shard has coordinates")
        return self.flattened_range

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    def init_data(
        self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Set ``data`` to ``init_fn(shape, dtype=, device=)`` if it is None."""
        if self.data is None:
            flat = self.flattened_range
            shape = tuple(self.local_shape) if flat is None else (flat.stop - flat.start,)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """The shard narrowed to ``length`` rows from ``start`` along local axis ``dim``.

        All ranks must narrow in the same way, because the global shape and offset shrink in
        proportion.

        Returns:
            A list of one shard. It is empty if a flattened shard has no element in the rows.

        Raises:
            InvalidShardingError: if the axis is not cut evenly, or a flattened shard is narrowed
                along another axis than 0.
        """
        if not -len(self.local_shape) <= dim < len(self.local_shape):
            raise self._wrong("no such local axis", found=dim)
        dim = dim % len(self.local_shape)
        extent = self.local_shape[dim]
        axis = dim + self.prepend_axis_num
        if extent == 0 or self.global_shape[axis] % extent or self.global_offset[axis] % extent:
            raise self._wrong(f"axis {dim} is not sharded evenly and cannot be narrowed")
        stop = start + length
        if not 0 <= start <= stop <= extent:
            problem = f"rows outside local axis {dim}"
            raise self._wrong(problem, expected=f"0 .. {extent}", found=f"{start} .. {stop}")
        data, flat = self.data, self.flattened_range
        if flat is not None:
            if dim != 0:
                raise self._wrong(
                    "a flattened shard can only be narrowed along axis 0, because what is left of "
                    "it along another axis is not one range of the narrowed shard's elements",
                    expected="axis 0",
                    found=f"axis {dim}",
                    remedy="Narrow the tensor before it is flattened.",
                )
            row = math.prod(self.local_shape[1:])
            first, last = max(flat.start, start * row), min(flat.stop, stop * row)
            if first >= last:
                return []
            data = None if data is None else data[first - flat.start : last - flat.start]
            flat = slice(first - start * row, last - start * row)
        elif data is not None:
            data = data.narrow(dim, start, length)

        def scaled(values: Ints) -> Ints:
            return (*values[:axis], values[axis] * length // extent, *values[axis + 1 :])

        return [
            replace(
                self,
                data=data,
                local_shape=(*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
                global_shape=scaled(self.global_shape),
                global_offset=scaled(self.global_offset),
                flattened_range=flat,
            )
        ]

    @classmethod
    def of_box(
        cls, stored: StoredTensor, box: Box, flat_range: tuple[int, int] | None = None
    ) -> ShardedTensor:
        """A shard without data that wants a box of a stored tensor.

        Args:
            stored: what the checkpoint has.
            box: in elements of the global tensor.
            flat_range: if given, only these elements of the flattened box.
        """
        grid = (1,) * len(box.shape) if box.shape == stored.global_shape else None
        flat = None if flat_range is None else slice(*flat_range)
        dtype, shape = stored.dtype.torch, stored.global_shape
        return cls(
            stored.key, None, dtype, box.shape, shape, box.offset, grid, flattened_range=flat
        )

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: RankOffset,
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
                included) the tensor is cut into ``count`` equal parts and this is part
                ``position``. Other axes are not cut.
            replica_id: all zeros on exactly one of the ranks that hold this part.
            prepend_axis_num: number of leading axes that exist only globally.
            flattened_range: must be None; see ``from_rank_offsets_flat``.
            **init_kwargs: passed to the constructor, e.g. ``allow_shape_mismatch``.

        Raises:
            InvalidShardingError: for impossible positions; ValueError for a flattened range.

        Example:
            >>> columns = torch.ones(8, 3)  # part 1 of 4 along axis 1
            >>> shard = ShardedTensor.from_rank_offsets("w", columns, (1, 1, 4))
            >>> shard.global_shape, shard.global_offset
            ((8, 12), (0, 3))
        """
        if flattened_range is not None:
            raise ValueError(
                "from_rank_offsets takes whole tensors; use from_rank_offsets_flat for a "
                "flattened_range"
            )
        require_tensor(data, key)
        prepend_axis_num = plain_int(prepend_axis_num, "prepend_axis_num", key)
        extents = [1] * prepend_axis_num + list(data.shape)
        offset, counts = [0] * len(extents), [1] * len(extents)
        seen: set[int] = set()
        for rank_offset in rank_offsets:
            parts = plain_ints(rank_offset, "a rank offset", key)
            axis, position, count = parts if len(parts) == 3 else (-1, 0, 0)
            if not 0 <= axis < len(extents) or axis in seen or not 0 <= position < count:
                problem = "(axis, position, count) needs each axis at most once, 0 <= axis < ndim"
                expected = f"axis < {len(extents)}"
                if 0 <= axis < len(extents) and axis not in seen:
                    problem = f"position {position} is outside axis {axis}, split into {count}"
                    expected = f"0 <= position < {count}"
                finding = Finding(problem, key, expected=expected, found=parts)
                message = f"Invalid rank offsets: {rank_offsets} for key {key}."
                raise InvalidShardingError(message, [finding])
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
        *rank_offsets: RankOffset,
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

        Example:
            >>> flat = torch.ones(5)  # elements 3 to 7 of a tensor of 4 x 3
            >>> shard = ShardedTensor.from_rank_offsets_flat(
            ...     "w", flat, (4, 3), flattened_range=slice(3, 8)
            ... )
            >>> shard.local_shape, shard.flattened_range
            ((4, 3), slice(3, 8, None))
        """
        if flattened_range is None:
            raise invalid_sharding(key, "from_rank_offsets_flat needs a flattened_range")
        require_tensor(data, key)
        flattened_range = plain_range(flattened_range, key)
        assert flattened_range is not None
        start, stop = flattened_range.start, flattened_range.stop
        fits = start is not None and stop is not None and data.numel() == stop - start
        if data.ndim != 1 or not fits:
            problem = "data must be 1-D and as long as flattened_range"
            shape = tuple(data.shape)
            raise invalid_sharding(key, problem, expected=flattened_range, found=shape)
        shape = plain_ints(non_flat_local_shape, "non_flat_local_shape", key)
        like = torch.empty(shape, dtype=data.dtype, device="meta")
        whole = cls.from_rank_offsets(key, like, *rank_offsets, **kwargs)
        return replace(whole, data=data, flattened_range=flattened_range)

    @classmethod
    def from_offset(
        cls,
        key: str,
        data: torch.Tensor,
        global_shape: Iterable[SupportsIndex],
        offset: Iterable[SupportsIndex],
        *,
        replica_id: ReplicaId = 0,
    ) -> ShardedTensor:
        """A shard anywhere in a global tensor, however the other ranks shard it.

        Args:
            key: name of the global tensor.
            data: the local tensor, with as many axes as the global one.
            global_shape: shape of the global tensor.
            offset: where ``data`` begins in it, in elements.
            replica_id: all zeros on exactly one of the ranks that hold this part.

        Raises:
            InvalidShardingError: if ``data`` does not lie in the global tensor.

        Example:
            >>> rows = torch.ones(2, 3)  # rows 3 and 4 of a tensor of 7 rows
            >>> ShardedTensor.from_offset("w", rows, (7, 3), (3, 0)).global_slice()
            (slice(3, 5, None), slice(0, 3, None))
        """
        require_tensor(data, key)
        shape = plain_ints(global_shape, "global_shape", key)
        grid = (1,) * len(shape) if shape == tuple(data.shape) else None
        start = plain_ints(offset, "offset", key)
        return cls(key, data, data.dtype, tuple(data.shape), shape, start, grid, replica_id)

    @classmethod
    def from_dtensor(cls, key: str, tensor: DTensor) -> ShardedTensor:
        """The part of a DTensor that this rank holds, sharded evenly or not. Not collective.

        ``data`` is the local tensor itself, so ``load`` fills the DTensor in place. Ranks along
        mesh axes that replicate the tensor are its replicas.
        ``dist_checkpointing.interop.shard_state_dict`` does this for a whole state dict, also
        where a rank holds rows that are not neighbours.

        Args:
            key: name of the global tensor.
            tensor: any DTensor with Shard and Replicate placements.

        Raises:
            InvalidShardingError: for a Partial placement, on a rank outside of the mesh, and where
                the part of a rank is not one box.
        """
        part, shape = local_box(key, tensor), tuple(tensor.shape)
        box, data, replica_id = part.boxes[0], part.data, part.replica_id or 0
        return cls(key, data, data.dtype, box.shape, shape, box.offset, part.grid, replica_id)
