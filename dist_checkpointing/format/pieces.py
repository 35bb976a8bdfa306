"""Pieces: the boxes of a tensor that are stored each on its own, because there is no chunk grid.

The pieces of all tensors are one set of arrays, so that what is done with all of them takes no
Python for each. A distributed optimizer has one piece a rank and a parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.geometry import Box

Int64s = npt.NDArray[np.int64]
Integers = npt.NDArray[np.int32] | Int64s

MAX_EXTENT = 1 << 62
MAX_AXES = 64
"""More axes than that no array of numpy has."""
_ONLY_INT = frozenset([int])
_ONLY_LIST = frozenset([list])
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Boxes of a tensor that are stored each on its own, because there is no chunk grid.

    Attributes:
        offsets: ``[pieces, axes]``, in elements of the global tensor.
        shapes: ``[pieces, axes]``.
        flat: ``[pieces, 2]``; a piece with ``start >= 0`` holds only elements ``start .. stop`` of
            the C-order flattening of its box, as a 1-D array.
    """

    offsets: Int64s
    shapes: Int64s
    flat: Int64s

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(cls, ndim: int, pieces: Iterable[tuple[Box, tuple[int, int] | None]]) -> Pieces:
        """A table of the given boxes and flat ranges."""
        rows = list(pieces)
        return cls(
            np.array([box.offset for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([box.shape for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([flat or (-1, -1) for _, flat in rows], dtype=np.int64).reshape(-1, 2),
        )

    @classmethod
    def from_lists(cls, offsets: Any, shapes: Any, flat: Any) -> Pieces:
        """The table from three lists as stored."""
        return cls.checked(*map(rows_from_lists, (offsets, shapes, flat)))

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
            text = f"flat range {start[row]}:{stop[row]} of a box of shape {shapes[row]}"
            raise ValueError(text)
        return cls(offsets, shapes, flat)

    def are_inside(self, shape: Sequence[int]) -> bool:
        """Whether all pieces lie in a tensor of this shape."""
        return bool((self.offsets + self.shapes <= np.array(shape, dtype=np.int64)).all())

    def __getitem__(self, row: int) -> tuple[Box, tuple[int, int] | None]:
        start, stop = self.flat[row].tolist()
        box = Box(tuple(self.offsets[row].tolist()), tuple(self.shapes[row].tolist()))
        return box, None if start < 0 else (start, stop)

    def __iter__(self) -> Iterator[tuple[Box, tuple[int, int] | None]]:
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
    _seen: dict[str, Pieces] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_row", {key: row for row, key in enumerate(self.keys_column)})
        object.__setattr__(self, "_seen", {})

    @classmethod
    def of(cls, pieces: Mapping[str, Pieces]) -> PieceColumns:
        """The pieces of these tensors, in their order."""
        if isinstance(pieces, cls):
            return pieces
        tables = list(pieces.values())
        ndim = np.array([table.offsets.shape[1] for table in tables], dtype=np.int64)
        starts = np.cumsum([0, *map(len, tables)], dtype=np.int64)
        width = int(ndim.max(initial=0))
        offsets = np.zeros((int(starts[-1]), width), dtype=np.int64)
        shapes = np.ones(offsets.shape, dtype=np.int64)
        flat = np.empty((len(offsets), 2), dtype=np.int64)
        for table, (first, last) in zip(tables, itertools.pairwise(starts.tolist()), strict=True):
            offsets[first:last, : table.offsets.shape[1]] = table.offsets
            shapes[first:last, : table.offsets.shape[1]] = table.shapes
            flat[first:last] = table.flat
        return cls(list(pieces), starts, ndim, offsets, shapes, flat)

    @classmethod
    def joined(cls, tables: Sequence[PieceColumns]) -> PieceColumns:
        """The pieces of all of these together; no two may hold the same tensor."""
        width = max((table.offsets.shape[1] for table in tables), default=0)
        counts = [np.diff(table.starts) for table in tables]
        pad = [((0, 0), (0, width - table.offsets.shape[1])) for table in tables]
        offsets = [np.pad(table.offsets, p) for table, p in zip(tables, pad, strict=True)]
        shapes = [
            np.pad(table.shapes, p, constant_values=1) for table, p in zip(tables, pad, strict=True)
        ]
        none = np.empty((0, width), dtype=np.int64)
        return cls(
            [*itertools.chain.from_iterable(table.keys_column for table in tables)],
            np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64),
            np.concatenate([none[:, :0].ravel(), *(table.ndim for table in tables)]),
            np.concatenate([none, *offsets]),
            np.concatenate([none, *shapes]),
            np.concatenate([np.empty((0, 2), dtype=np.int64), *(table.flat for table in tables)]),
        )

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
    """A two-dimensional column with at least so many axes."""
    missing = max(0, width - column.shape[1])
    return np.pad(column, ((0, 0), (0, missing)), constant_values=fill) if missing else column


def padded_rows(rows: Sequence[Sequence[int]], fill: int, width: int = 1) -> Int64s:
    """Ragged rows as one array with at least so many axes."""
    numbers = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
    ndim = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(width, int(ndim.max(initial=0)))
    if len(numbers) == len(rows) * width:
        return numbers.reshape(len(rows), width)
    table = np.full((len(rows), width), fill, dtype=np.int64)
    table[np.arange(width) < ndim[:, None]] = numbers
    return table


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


def changes(columns: Sequence[Integers], order: slice | Int64s = _ALL) -> npt.NDArray[np.bool_]:
    """Which rows, in this order, differ from the one before in any of the columns."""
    found = np.ones(len(columns[0]), dtype=np.bool_)
    found[1:] = False
    for column in columns:
        ordered = column[order]
        found[1:] |= ordered[1:] != ordered[:-1]
    return found


def ints_from_json(values: Any) -> list[int]:
    """A list of shapes or offsets as it came out of a JSON file."""
    # type() and not isinstance(): JSON true is an int to Python.
    if not isinstance(values, list) or not _ONLY_INT.issuperset(map(type, values)):
        raise ValueError(f"expected a list of ints >= 0, found {values!r}")
    if values and (min(values) < 0 or max(values) >= MAX_EXTENT):
        raise ValueError(f"expected a list of ints >= 0, found {values!r}")
    if len(values) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, found {len(values)}")
    return values


def rows_from_lists(rows: Any) -> Int64s:
    """Lists of ints, all of one length, as they came out of a JSON file: ``[rows, ints]``."""
    if not isinstance(rows, list) or not _ONLY_LIST.issuperset(map(type, rows)):
        raise ValueError("expected a list of lists")
    widths = set(map(len, rows)) or {0}
    if len(widths) > 1 or max(widths) > MAX_AXES:
        raise ValueError(f"expected lists of one length up to {MAX_AXES}, found {sorted(widths)}")
    numbers = [*itertools.chain.from_iterable(rows)]
    if not _ONLY_INT.issuperset(map(type, numbers)):
        raise ValueError("expected lists of ints")
    return np.array(numbers, dtype=np.int64).reshape(len(rows), widths.pop())
