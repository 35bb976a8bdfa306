"""Boxes, chunk grids and flat ranges: all index arithmetic, on plain integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Ints = tuple[int, ...]
Values = TypeVar("Values", bound=Any)
"""An array of numpy or a tensor of torch."""


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned box ``offset <= x < offset + shape``, in elements of a global tensor.

    A box of zero axes holds exactly one element.
    """

    offset: Ints
    shape: Ints

    def __str__(self) -> str:
        return f"{self.offset} .. {self.stop}"

    @classmethod
    def whole(cls, shape: Ints) -> Box:
        """The box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def offsets(self) -> Ints:
        """``offset``, under the name that torch DCP gives it."""
        return self.offset

    @property
    def sizes(self) -> Ints:
        """``shape``, under the name that torch DCP gives it."""
        return self.shape

    @property
    def stop(self) -> Ints:
        """First index after the box on every axis."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part of both boxes; None if it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return None if any(extent <= 0 for extent in shape) else Box(start, shape)

    def contains(self, other: Box) -> bool:
        """Whether ``other`` lies completely inside."""
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def relative_to(self, origin: Ints) -> Box:
        """The same box, counted from ``origin``."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def moved(self, by: Ints) -> Box:
        """The inverse of ``relative_to``."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of this box in an array of the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Window:
    """A box inside a C-order array of ``shape`` that begins at element ``start`` of a buffer.

    Windows address both stored chunks and destination tensors. An ordinary chunk has ``start == 0``
    and its own shape. A part of a flattened range begins inside the 1-D buffer, and is treated as
    an n-dimensional array there.
    """

    start: int
    shape: Ints
    box: Box

    @property
    def array_size(self) -> int:
        """Number of elements of the array that the box is a part of."""
        return math.prod(self.shape)

    def part(self, block: Box) -> Window:
        """The window of a block inside the box; the block is given relative to the box."""
        return Window(self.start, self.shape, block.moved(self.box.offset))

    def contiguous_range(self) -> tuple[int, int] | None:
        """``(start, stop)`` in elements of the buffer if the box is contiguous there, else None."""
        begin = self.start + ravel_offset(self.box.offset, self.shape)
        seen_partial = False
        for extent, full in zip(reversed(self.box.shape), reversed(self.shape), strict=True):
            if seen_partial and extent != 1:
                return None
            seen_partial = seen_partial or extent != full
        return begin, begin + self.box.num_elements


def ravel_offset(offset: Ints, shape: Ints) -> int:
    """Position of the element at ``offset`` in the C-order flattening of an array of ``shape``."""
    position = 0
    for index, extent in zip(offset, shape, strict=True):
        position = position * extent + index
    return position


def unravel(position: int, shape: Ints) -> Ints:
    """Offset of the element at ``position`` in the C-order flattening; inverts ``ravel_offset``."""
    offset = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        offset.append(index)
    return tuple(reversed(offset))


def unravel_range(start: int, stop: int, shape: Ints) -> tuple[npt.NDArray[np.int64], ...]:
    """Index arrays, one an axis, of a range of the flattening of an array of ``shape``."""
    if not shape:  # a scalar has no axes to index
        return ()
    return np.unravel_index(np.arange(start, stop), shape)


def split_flat_range(shape: Ints, start: int, stop: int) -> list[Box]:
    """Boxes of an array of ``shape`` that make up elements ``start .. stop`` of its flattening.

    Each box is contiguous, and the boxes follow each other in flat order. There are at most
    ``2 * ndim - 1`` of them: the range begins with single elements, goes on with whole rows,
    planes, ..., up to the largest whole blocks, and ends with smaller ones again.

    Raises:
        ValueError: if the range does not lie inside the array.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}:{stop} is outside an array of shape {shape}")
    boxes = []
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    position = start
    while position < stop:
        if not shape:
            return [Box((), ())]
        # The outermost axis on which a whole step begins here and fits. The innermost always fits.
        axis = next(
            a
            for a, stride in enumerate(strides)
            if position % stride == 0 and position + stride <= stop
        )
        offset = unravel(position, shape)
        extent = min((stop - position) // strides[axis], shape[axis] - offset[axis])
        boxes.append(Box(offset, (1,) * axis + (extent,) + shape[axis + 1 :]))
        position += extent * strides[axis]
    return boxes


def boxes_of_part(box: Box, flat_range: tuple[int, int] | None) -> list[Box]:
    """The boxes that make up a part of a tensor: a box of it, or a range of the flattened box."""
    if flat_range is None:
        return [box]
    return [run.moved(box.offset) for run in split_flat_range(box.shape, *flat_range)]


def values_of_part(
    box: Box, flat_range: tuple[int, int] | None, values: Values
) -> Iterator[tuple[Box, Values]]:
    """The boxes of a part, see ``boxes_of_part``, and the values of each, in its shape."""
    if flat_range is None:
        yield box, values
        return
    for run in boxes_of_part(box, flat_range):
        yield run, values[: run.num_elements].reshape(run.shape)
        values = values[run.num_elements :]


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A tensor of ``global_shape`` cut into chunks of ``chunk_shape``.

    The last chunk on an axis may stick out of the tensor; its box is clipped, its stored shape is
    not. Extents of ``chunk_shape`` are at least 1.
    """

    global_shape: Ints
    chunk_shape: Ints

    @property
    def counts(self) -> Ints:
        """Number of chunks along each axis."""
        return tuple(
            -(-extent // chunk)
            for extent, chunk in zip(self.global_shape, self.chunk_shape, strict=True)
        )

    def box(self, index: Ints) -> Box:
        """The part of the tensor that chunk ``index`` holds."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        shape = tuple(
            min(c, g - o)
            for o, c, g in zip(offset, self.chunk_shape, self.global_shape, strict=True)
        )
        return Box(offset, shape)

    def index_at(self, offset: Ints) -> Ints:
        """Index of the chunk that holds the element at ``offset``."""
        return tuple(o // c for o, c in zip(offset, self.chunk_shape, strict=True))

    def is_chunk(self, box: Box) -> bool:
        """Whether ``box`` is a chunk that lies completely inside the tensor."""
        places = zip(box.offset, box.shape, self.chunk_shape, self.global_shape, strict=True)
        return all(n == c and o % c == 0 and o + n <= g for o, n, c, g in places)

    def intersecting(self, box: Box) -> Iterator[tuple[Ints, Box]]:
        """Every chunk that meets ``box``, with the common part; none for an empty box."""
        if box.num_elements == 0:
            return
        first = self.index_at(box.offset)
        last = self.index_at(tuple(s - 1 for s in box.stop))
        ranges = [range(a, b + 1) for a, b in zip(first, last, strict=True)]
        for index in itertools.product(*ranges):
            common = self.box(index).intersect(box)
            if common is not None:
                yield index, common


def largest_divisor_block(extent: int, max_block: int) -> int:
    """Largest divisor of ``extent`` that is at most ``max_block`` (at least 1)."""
    if max_block >= extent:
        return max(extent, 1)
    small = [d for d in range(1, math.isqrt(extent) + 1) if extent % d == 0]
    return max(d for d in (*small, *(extent // s for s in small)) if d <= max(max_block, 1))


def split_rows(box: Box, max_elements: int) -> list[Box]:
    """``box`` cut into contiguous blocks of rows with at most ``max_elements`` elements each.

    If single rows are still too large, the axis is cut into single rows and the next axis is cut
    too. So every block is contiguous in the C order of the box.
    """
    if box.num_elements <= max(max_elements, 1):
        return [box]
    axis = next(a for a, extent in enumerate(box.shape) if extent > 1)
    row_elements = box.num_elements // box.shape[axis]
    step = max(1, max_elements // row_elements)
    blocks = []
    for begin in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + begin, *box.offset[axis + 1 :])
        extent = min(step, box.shape[axis] - begin)
        block = Box(offset, (*box.shape[:axis], extent, *box.shape[axis + 1 :]))
        blocks += split_rows(block, max_elements)
    return blocks
