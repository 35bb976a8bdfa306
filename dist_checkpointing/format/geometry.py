"""Boxes, flat ranges, chunk grids, and the pieces of tensors without one: all index arithmetic.

The pieces of all tensors are one set of arrays, so that what is done with all of them takes no
Python for each. A distributed optimizer has one piece a rank and a parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Ints = tuple[int, ...]
FlatRange = tuple[int, int] | None
"""Start and stop in the flattening of a box; None stands for the box as it is."""
Values = TypeVar("Values", bound=Any)
"""An array of numpy or a tensor of torch."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box ``offset <= x < offset + shape`` of a tensor; one of zero axes holds one element."""

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

    An ordinary chunk or tensor has ``start == 0`` and its own shape. A part of a flattened range
    begins inside the 1-D buffer, and is treated as an n-dimensional array there.
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


def unravel_range(start: int, stop: int, shape: Ints) -> tuple[Int64s, ...]:
    """Index arrays, one an axis, of a range of the flattening of an array of ``shape``."""
    if not shape:  # a scalar has no axes to index
        return ()
    return np.unravel_index(np.arange(start, stop), shape)


def split_flat_range(shape: Ints, start: int, stop: int) -> list[Box]:
    """Boxes of an array of ``shape`` that make up elements ``start .. stop`` of its flattening.

    They are contiguous and follow each other, at most ``2 * ndim - 1``: single elements, whole
    rows, planes, ..., up to the largest whole blocks, and smaller ones again. A range that does not
    lie inside the array is a ValueError.
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


Part = tuple[Box, FlatRange]
"""A part of a tensor: a box of it, or a range of the flattened box."""


def may_overlap(one: Part, other: Part) -> bool:
    """Whether two parts of a tensor may have elements in common; ranges of two boxes may not."""
    (box, flat), (other_box, other_flat) = one, other
    if box == other_box:
        (start, stop), (first, end) = (r or (0, box.num_elements) for r in (flat, other_flat))
        return max(start, first) < min(stop, end)
    return box.intersect(other_box) is not None


def boxes_of_part(box: Box, flat_range: FlatRange) -> list[Box]:
    if flat_range is None:
        return [box]
    return [run.moved(box.offset) for run in split_flat_range(box.shape, *flat_range)]


def values_of_part(box: Box, flat_range: FlatRange, values: Values) -> Iterator[tuple[Box, Values]]:
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
        return tuple(-(-g // c) for g, c in zip(self.global_shape, self.chunk_shape, strict=True))

    def box(self, index: Ints) -> Box:
        """The part of the tensor that chunk ``index`` holds."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        shape = tuple(
            min(c, g - o)
            for o, c, g in zip(offset, self.chunk_shape, self.global_shape, strict=True)
        )
        return Box(offset, shape)

    def index_at(self, offset: Ints) -> Ints:
        return tuple(o // c for o, c in zip(offset, self.chunk_shape, strict=True))

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
    """``box`` cut into blocks of rows that are contiguous in it, of at most so many elements each.

    If single rows are still too large, the next axis is cut too.
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


Integers = npt.NDArray[np.int32] | Int64s
MAX_EXTENT = 1 << 62
MAX_AXES = 64
"""More axes than that no array of numpy has."""
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Boxes of a tensor without a chunk grid, as ``[pieces, axes]`` offsets and shapes.

    A piece with ``start >= 0`` in ``flat``, ``[pieces, 2]``, holds only elements ``start .. stop``
    of the C-order flattening of its box, as a 1-D array.
    """

    offsets: Int64s
    shapes: Int64s
    flat: Int64s

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(cls, ndim: int, pieces: Iterable[Part]) -> Pieces:
        rows = list(pieces)
        return cls(
            np.array([box.offset for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([box.shape for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([flat or (-1, -1) for _, flat in rows], dtype=np.int64).reshape(-1, 2),
        )

    @classmethod
    def checked(cls, offsets: Int64s, shapes: Int64s, flat: Int64s) -> Pieces:
        """The table of columns that came out of a file, if they fit together."""
        for column, least in ((offsets, 0), (shapes, 0), (flat, -1)):
            if column.size and not least <= column.min() <= column.max() < MAX_EXTENT:
                raise ValueError(f"expected ints from {least} to 2**62")
        if not len(offsets) == len(shapes) == len(flat) or not len(flat):
            raise ValueError("pieces of different length, or none")
        if offsets.shape != shapes.shape:
            raise ValueError("offsets and shapes with different axes")
        if flat.shape[1] != 2:
            raise ValueError("a flat range has a start and a stop")
        is_flat = (flat >= 0).any(axis=1)
        start, stop = flat.T
        # An exact product may need more than 64 bits, and then no stop is too high.
        sizes = shapes.astype(np.float64).prod(axis=1)
        sizes = np.where(sizes < MAX_EXTENT, shapes.prod(axis=1), MAX_EXTENT)
        wrong = np.flatnonzero(is_flat & ((start < 0) | (start > stop) | (stop > sizes)))
        if len(wrong):
            row = wrong[0]
            raise ValueError(f"flat range {start[row]}:{stop[row]} of a box of shape {shapes[row]}")
        return cls(offsets, shapes, flat)

    def __getitem__(self, row: int) -> Part:
        start, stop = self.flat[row].tolist()
        box = Box(tuple(self.offsets[row].tolist()), tuple(self.shapes[row].tolist()))
        return box, None if start < 0 else (start, stop)

    def __iter__(self) -> Iterator[Part]:
        rows = zip(self.offsets.tolist(), self.shapes.tolist(), self.flat.tolist(), strict=True)
        for offset, shape, (start, stop) in rows:
            yield Box(tuple(offset), tuple(shape)), None if start < 0 else (start, stop)


def sorted_rows(offsets: Int64s, shapes: Int64s, flat: Int64s, keys: Integers) -> Int64s:
    """Positions of pieces by key, then box, then start."""
    columns = [keys, *offsets.T, *shapes.T, flat[:, 0]]
    is_tie = np.ones(max(len(flat) - 1, 0), dtype=np.bool_)
    for column in columns:
        if (is_tie & (column[1:] < column[:-1])).any():
            return np.lexsort(columns[::-1])
        is_tie &= column[1:] == column[:-1]
    return np.arange(len(flat))


@dataclass(frozen=True, slots=True, eq=False)
class PieceColumns(Mapping[str, Pieces]):
    """The pieces of many tensors as one set of arrays; those of one tensor are a part of them.

    The rows of each tensor begin at ``starts``, ``[tensors + 1]``. The others are as in Pieces;
    further axes are 0 in ``offsets`` and 1 in ``shapes``.
    """

    keys_column: Sequence[str]
    starts: Int64s
    ndim: Int64s
    offsets: Int64s
    shapes: Int64s
    flat: Int64s
    _row: Mapping[str, int] = field(init=False, repr=False)
    _seen: dict[str, Pieces] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_row", {key: row for row, key in enumerate(self.keys_column)})

    @classmethod
    def of(cls, pieces: Mapping[str, Pieces]) -> PieceColumns:
        if isinstance(pieces, cls):
            return pieces
        tables = list(pieces.values())
        ndim = np.array([table.offsets.shape[1] for table in tables], dtype=np.int64)
        return cls._stacked(list(pieces), ndim, map(len, tables), tables)

    @classmethod
    def joined(cls, tables: Sequence[PieceColumns]) -> PieceColumns:
        """The pieces of all of these together; no two may hold the same tensor."""
        keys = [*itertools.chain.from_iterable(table.keys_column for table in tables)]
        ndim = np.concatenate([np.empty(0, dtype=np.int64), *(table.ndim for table in tables)])
        counts = itertools.chain.from_iterable(np.diff(table.starts).tolist() for table in tables)
        return cls._stacked(keys, ndim, counts, tables)

    @classmethod
    def _stacked(
        cls,
        keys: Sequence[str],
        ndim: Int64s,
        counts: Iterable[int],
        tables: Sequence[Pieces | PieceColumns],
    ) -> PieceColumns:
        """The rows of all tables, so many for each key."""
        tables = tables or [Pieces.of(0, ())]
        width = max(table.offsets.shape[1] for table in tables)
        columns = (
            [padded(table.offsets, width, 0) for table in tables],
            [padded(table.shapes, width, 1) for table in tables],
            [table.flat for table in tables],
        )
        joined = (own[0] if len(own) == 1 else np.concatenate(own) for own in columns)
        return cls(keys, np.cumsum([0, *counts], dtype=np.int64), ndim, *joined)

    def __getitem__(self, key: str) -> Pieces:
        found = self._seen.get(key)
        if found is None:
            row = self._row[key]
            rows = slice(*self.starts[row : row + 2].tolist())
            ndim = int(self.ndim[row])
            found = self._seen[key] = Pieces(
                self.offsets[rows, :ndim], self.shapes[rows, :ndim], self.flat[rows]
            )
        return found

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_column)

    def __len__(self) -> int:
        return len(self.keys_column)

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceColumns, tuple(getattr(self, f.name) for f in fields(self) if f.init)


def padded(column: Int64s, width: int, fill: int) -> Int64s:
    if column.shape[1] >= width:
        return column
    table = np.full((len(column), width), fill, dtype=column.dtype)
    table[:, : column.shape[1]] = column
    return table


def padded_rows(rows: Sequence[Sequence[int]], fill: int, width: int = 1) -> Int64s:
    """Ragged rows as one array with at least so many axes."""
    numbers = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
    width = max(width, max(map(len, rows), default=0))
    if len(numbers) == len(rows) * width:
        return numbers.reshape(len(rows), width)
    ndim = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), width), fill, dtype=np.int64)
    table[np.arange(width) < ndim[:, None]] = numbers
    return table


def renumbered(count: int, *columns: Integers) -> tuple[list[int], list[Int64s]]:
    """Those of so many numbers that occur in columns, ascending, and the columns as positions among
    these.
    """
    is_used = np.zeros(count, dtype=np.bool_)
    for column in columns:
        is_used[column] = True
    positions = is_used.cumsum() - 1
    return is_used.nonzero()[0].tolist(), [positions[column] for column in columns]


def row_bytes(
    columns: Sequence[Integers], by_axis: Sequence[Int64s], ndim: Int64s
) -> Iterator[memoryview]:
    """The numbers of each row as bytes that are equal for equal rows, however wide the columns are.

    Axis by axis, so that what tells rows apart stands first, however many axes other rows have.
    """
    axes = range(int(ndim.max(initial=0)))
    wide = [*columns, *(column[:, axis] for axis in axes for column in by_axis)]
    matrix = memoryview(np.stack(wide, axis=1).astype("<i8").tobytes())
    width, ends = 8 * len(wide), 8 * (len(columns) + len(by_axis) * ndim)
    return (matrix[row * width : row * width + end] for row, end in enumerate(ends.tolist()))


def changes(columns: Sequence[Integers], order: slice | Int64s = _ALL) -> Bools:
    """Which rows, in this order, differ from the one before in any of the columns."""
    found: Bools = np.arange(len(columns[0])) == 0
    for column in columns:
        ordered = column[order]
        found[1:] |= ordered[1:] != ordered[:-1]
    return found


def are_extents(values: list[Any]) -> bool:
    """Whether what came out of a JSON file are ints from 0 to 2**62."""
    # type() and not isinstance(): JSON true is an int to Python.
    are_ints = {int}.issuperset(map(type, values))
    return are_ints and 0 <= min(values, default=0) <= max(values, default=0) < MAX_EXTENT


def ints_from_json(values: Any) -> list[int]:
    """A list of shapes or offsets as it came out of a JSON file."""
    if not isinstance(values, list) or not are_extents(values):
        raise ValueError(f"expected a list of ints >= 0, found {values!r}")
    if len(values) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, found {len(values)}")
    return values


def rows_from_lists(rows: Any) -> Int64s:
    """Lists of ints, all of one length, as they came out of a JSON file: ``[rows, ints]``."""
    if not isinstance(rows, list) or not {list}.issuperset(map(type, rows)):
        raise ValueError("expected a list of lists")
    widths = set(map(len, rows)) or {0}
    if len(widths) > 1 or max(widths) > MAX_AXES:
        raise ValueError(f"expected lists of one length up to {MAX_AXES}, found {sorted(widths)}")
    numbers = [*itertools.chain.from_iterable(rows)]
    if not {int}.issuperset(map(type, numbers)):
        raise ValueError("expected lists of ints")
    return np.array(numbers, dtype=np.int64).reshape(len(rows), widths.pop())
