"""The table of shards: leaves of a rank checked and turned into columns, rows selected and joined,
packed into bytes.

One row is one shard. A rank describes its own leaves once; the tables of all ranks together are the
catalog, on which everything that concerns all ranks (coverage, layout, who writes what) is array
arithmetic.
"""

from __future__ import annotations

import itertools
import json
import pickle
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.dtypes import ELEMENT_TYPES
from dist_checkpointing.format.geometry import Box, Ints, changes, padded, padded_rows, sorted_rows
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
    tensor_memory,
)
from dist_checkpointing.mapping.objects_and_factories import invalid_sharding

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Integers = Int32s | Int64s
Bools = npt.NDArray[np.bool_]

OBJECT: Final = "object"
"""Stands in the dtype column for a ShardedObject."""

_ITEMSIZES = {row.name: row.itemsize for row in ELEMENT_TYPES}
_MANY_ROWS = 1 << 22
_MOST_HOLDERS = 64


class Columns:
    """A dataclass whose arrays have one value a row; its other fields concern all rows.

    Two-dimensional arrays are padded to one number of axes: shapes and lengths with 1, others
    with 0.
    """

    __match_args__: ClassVar[tuple[str, ...]]

    def take(self, rows: Any) -> Self:
        """The table of some rows, by mask or positions; itself if the mask is all true."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.all():
            return self
        given = [getattr(self, name) for name in self.__match_args__]
        return type(self)(*[v[rows] if isinstance(v, np.ndarray) else v for v in given])

    def joined(self, *others: Any) -> Self:
        """This table and the rows of others with the same other fields."""
        if not others:
            return self
        values = []
        for name in self.__match_args__:
            parts = [getattr(table, name) for table in (self, *others)]
            if isinstance(parts[0], np.ndarray):
                if parts[0].ndim == 2:
                    width = max(part.shape[1] for part in parts)
                    parts = [padded(part, width, _fill(name)) for part in parts]
                parts = [np.concatenate(parts)]
            values.append(parts[0])
        return type(self)(*values)


Item = TypeVar("Item")
Table = TypeVar("Table")


@dataclass(eq=False, init=False)
class EditablePlan(Generic[Item, Table]):
    """Rows: columns of ``table`` and, once they are asked for, ``items`` in a list.

    What a planner or a storage changes in the list is in the table when that is next asked for.
    """

    storage_data: object
    planner_data: object
    _items_of: ClassVar[Any]
    _table_of: ClassVar[Any]

    def __init__(
        self,
        items: Table | Iterable[Item] | None = None,
        storage_data: object = None,
        planner_data: object = None,
        *,
        table: Table | None = None,
    ) -> None:
        rows: Any = table if items is None else items
        is_table: bool = isinstance(rows, Columns)
        self._table: Table = rows if is_table else self._table_of(rows or ())
        self._items: list[Item] | None = None
        self._in_table: list[Item] = []
        self.storage_data, self.planner_data = storage_data, planner_data

    @property
    def items(self) -> list[Item]:
        if self._items is None:
            items = [*self._items_of(self._table)]
            self._in_table, self._items = items[:], items
        return self._items

    @property
    def table(self) -> Table:
        if self._items is not None and self._items != self._in_table:
            self._table, self._in_table = self._table_of(self._items), self._items[:]
        return self._table

    def with_items(self, items: Iterable[Item]) -> Self:
        """This plan with other items in place of its own."""
        return replace(self, items=items)  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False)
class ShardTable(Columns):
    """Shards as columns; row ``i`` of every array describes shard ``i``.

    Shapes and offsets are padded to the largest number of axes: shapes with 1, offsets with 0.
    What follows from the columns is computed once, when it is asked for.

    Attributes:
        names: The distinct keys and dtype names; ``keys`` and ``dtypes`` are positions in it.
        keys: Position of the key in ``names``.
        dtypes: Position of the dtype name in ``names`` (``"object"`` for objects).
        ndim: Number of global axes.
        global_shapes: ``[rows, axes]``; for objects the grid of cells.
        offsets: ``[rows, axes]``, first element of the shard's box.
        shapes: ``[rows, axes]``, shape of the shard's box.
        flat: ``[rows, 2]``, start and stop of the flattened range, -1 where there is none.
        main: Whether this is the main replica.
        sources: Which leaf of its rank this is, in flattening order.
        ranks: Which rank holds it; or, if there are ``holders``, which of them hold it.
        holders: Sets of ranks, ascending each. Tables that are the same on many ranks are then here
            once, and ``ranks`` are positions in this sequence.
    """

    names: tuple[str, ...]
    keys: Int32s
    dtypes: Int32s
    ndim: Int32s
    global_shapes: Int64s
    offsets: Int64s
    shapes: Int64s
    flat: Int64s
    main: Bools
    sources: Int32s
    ranks: Int32s
    holders: Sequence[Int32s] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        # What is only remembered does not travel.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def max_ndim(self) -> int:
        """Number of columns of the padded arrays."""
        return int(self.global_shapes.shape[1])

    def sorted_by_box(self) -> ShardTable:
        """The rows by key, then box, then start of the range; itself if they are so already."""
        order = sorted_rows(self.offsets, self.shapes, self.flat, self.keys)
        return self.take(order) if (order[1:] < order[:-1]).any() else self

    def by_part(self) -> tuple[Int64s, Bools]:
        """The rows by key, place and range, so that those of one part are together, in their order;
        and which of them, in that order, begin a part: one key, dtype, box and flattened range.
        """
        place = positions_of(self.offsets, self.global_shapes)
        first, last = self.flat.T
        others: list[Integers] = [last, self.dtypes, *self.offsets.T, *self.shapes.T]
        # Parts that begin at the same element are nearly always the same part.
        order = np.lexsort((first, place, self.keys))
        starts_here = changes([self.keys, place, first], order)
        differs = changes(others, order)
        if (differs & ~starts_here).any():
            order = np.lexsort((*others, first, place, self.keys))
            differs = changes(others, order)
        return order, starts_here | differs

    def rows_of(self, number: int) -> slice:
        """The rows of a key, in a table that is sorted by key."""
        return slice(*np.searchsorted(self.keys, np.array([number, number + 1], self.keys.dtype)))

    @property
    def rank_sets(self) -> Sequence[Int32s]:
        """The sets of ranks that ``ranks`` are positions in."""
        if self.holders is None:
            return [*np.arange(self.ranks.max(initial=-1) + 1, dtype=np.int32)[:, None]]
        return self.holders

    def ranks_of(self, rows: Any) -> Int32s:
        """All ranks that hold any of some rows, ascending."""
        numbers = np.unique(self.ranks[rows])
        if self.holders is None or not len(numbers):
            return numbers
        return np.unique(np.concatenate([self.holders[number] for number in numbers.tolist()]))

    def of_ranks(self) -> ShardTable:
        """The same with a row for every rank that holds one.

        Of rows that very many ranks hold (which is an error where it comes to this) no more than
        ``_MOST_HOLDERS`` are told apart.
        """
        if self.holders is None:
            return self
        sizes = np.array([len(ranks) for ranks in self.holders], dtype=np.int64)
        if sizes[self.ranks].sum() > _MANY_ROWS:
            sizes = np.minimum(sizes, _MOST_HOLDERS)
        held = zip(self.holders, sizes.tolist(), strict=True)
        members = np.concatenate([np.empty(0, np.int32), *(ranks[:size] for ranks, size in held)])
        begins = sizes.cumsum() - sizes
        rows, place = counted(sizes[self.ranks])
        # Rows of one rank each keep their order.
        is_same = len(rows) == len(self)
        table = self if is_same else self.take(rows)
        table = replace(table, ranks=members[begins[table.ranks] + place], holders=None)
        return table if is_same else table.take(np.lexsort((table.ranks, table.keys)))

    @cached_property
    def key_column(self) -> list[str]:
        """Key of every row."""
        return [self.names[position] for position in self.keys.tolist()]

    @property
    def dtype_column(self) -> list[str]:
        """Dtype name of every row."""
        return [self.names[position] for position in self.dtypes.tolist()]

    @property
    def global_shape_column(self) -> list[Ints]:
        """Global shape of every row; equal ones are one object."""
        return shared_shapes(self.global_shapes, self.ndim)

    @cached_property
    def is_object(self) -> Bools:
        """Which rows are objects."""
        number = self.names.index(OBJECT) if OBJECT in self.names else -1
        mask: Bools = self.dtypes == number
        return mask

    @cached_property
    def num_elements(self) -> Int64s:
        """Elements that each row holds (the range only, if flattened)."""
        boxes = self.shapes.prod(axis=1)
        return np.where(self.flat[:, 0] >= 0, self.flat[:, 1] - self.flat[:, 0], boxes)

    @cached_property
    def itemsizes(self) -> Int64s:
        """Bytes of an element of each row; 0 for objects."""
        itemsizes = np.zeros(len(self.names), dtype=np.int64)
        # Nearly all names are keys.
        for position in np.flatnonzero(np.bincount(self.dtypes)).tolist():
            itemsizes[position] = _ITEMSIZES.get(self.names[position], 0)
        return itemsizes[self.dtypes]

    @cached_property
    def num_bytes(self) -> Int64s:
        """Bytes that each row holds; 0 for objects."""
        return self.num_elements * self.itemsizes

    @cached_property
    def is_start(self) -> Bools:
        """Which rows are the first of their key, in a table that is sorted by key."""
        return changes([self.keys])

    @cached_property
    def starts(self) -> Int64s:
        """First row of each key, in a table that is sorted by key."""
        return np.flatnonzero(self.is_start)

    @cached_property
    def groups(self) -> KeyGroups:
        """The rows by key, in a table that is sorted by key."""
        return KeyGroups(self)

    def key(self, row: int) -> str:
        """Key of a row."""
        return self.names[int(self.keys[row])]

    def dtype(self, row: int) -> str:
        """Dtype name of a row."""
        return self.names[int(self.dtypes[row])]

    def global_shape(self, row: int) -> Ints:
        """Global shape of a row."""
        return tuple(self.global_shapes[row, : self.ndim[row]].tolist())

    def box(self, row: int) -> Box:
        """Box of a row."""
        axes = slice(self.ndim[row])
        return Box(tuple(self.offsets[row, axes].tolist()), tuple(self.shapes[row, axes].tolist()))

    def flat_range(self, row: int) -> tuple[int, int] | None:
        """Flattened range of a row."""
        start, stop = self.flat[row].tolist()
        return None if start < 0 else (start, stop)


class KeyGroups:
    """The rows of a sorted table as one group a key.

    Attributes:
        of_row: Group of each row.
        is_counted: Which rows have elements; the others only announce their key.
        num_counted: Number of these in each group.
        global_shapes: ``[groups, axes]``.
        chunk_shapes: ``[groups, axes]``, at least 1: the largest extents, which are the chunk if
            there is a grid; the whole shape of a tensor that nobody writes.
        fits: ``[rows, axes]``, whether a row begins and ends where a chunk of the grid does.
        is_grid: Per group, whether every counted row is exactly one chunk of the grid.
    """

    def __init__(self, table: ShardTable) -> None:
        starts, counted = table.starts, table.num_elements > 0
        count = len(starts)
        self.of_row: Int64s = table.is_start.cumsum() - 1
        self.is_counted: Bools = counted
        self.num_counted: Int64s = np.bincount(self.of_row[counted], minlength=count)
        chunks = table.global_shapes[starts]
        self.global_shapes: Int64s = chunks
        if count:
            rows = np.where(counted[:, None], table.shapes, 1)
            largest = np.maximum.reduceat(rows, starts, axis=0)
            del rows  # columns of all ranks take much memory
            chunks = np.where(self.num_counted[:, None] > 0, largest, chunks)
        self.chunk_shapes: Int64s = np.maximum(chunks, 1)
        chunk = self.chunk_shapes[self.of_row]
        self.fits: Bools = table.offsets % chunk == 0
        self.fits &= table.shapes == np.minimum(chunk, table.global_shapes - table.offsets)
        is_other = counted & ~(self.fits.all(axis=1) & (table.flat[:, 0] < 0))
        self.is_grid: Bools = np.bincount(self.of_row[is_other], minlength=count) == 0


def positions_of(offsets: Int64s, shapes: Int64s) -> Int64s:
    """Position of each offset in the C order of an array of its shape."""
    position = np.zeros(len(offsets), dtype=np.int64)
    for axis in range(offsets.shape[1]):
        position = position * shapes[:, axis] + offsets[:, axis]
    return position


COLUMNS = tuple(f.name for f in fields(ShardTable) if f.name not in ("names", "holders"))
"""The arrays of a table."""

_PACKED = tuple(name for name in COLUMNS if name != "ranks")
_WIDE = ("global_shapes", "offsets", "shapes", "flat")


def _fill(name: str) -> int:
    """What stands for an axis that a row does not have."""
    return int(name.endswith(("shapes", "lengths")))


def table_of_rows(rank: int, rows: Sequence[tuple[Any, ...]]) -> ShardTable:
    """The table of a rank.

    A row is key, dtype name, global shape, offset, shape, flattened range or None, whether it is a
    main replica, and which leaf it is.
    """
    count = len(rows)
    columns = zip(*rows, strict=True) if rows else [()] * 8
    keys, dtypes, global_shapes, offsets, shapes, ranges, main, sources = columns
    names = {name: i for i, name in enumerate(dict.fromkeys((*keys, *dict.fromkeys(dtypes))))}
    flat = np.full((count, 2), -1, dtype=np.int64)
    if is_flat := [i for i, ends in enumerate(ranges) if ends is not None]:
        flat[is_flat] = [ranges[i] for i in is_flat]
    return ShardTable(
        names=tuple(names),
        keys=np.fromiter(map(names.__getitem__, keys), np.int32, count),
        dtypes=np.fromiter(map(names.__getitem__, dtypes), np.int32, count),
        ndim=np.fromiter(map(len, global_shapes), np.int32, count),
        global_shapes=padded_rows(global_shapes, 1, 0),
        offsets=padded_rows(offsets, 0, 0),
        shapes=padded_rows(shapes, 1, 0),
        flat=flat,
        main=np.fromiter(main, np.bool_, count),
        sources=np.fromiter(sources, np.int32, count),
        ranks=np.full(count, rank, dtype=np.int32),
    )


NO_ROWS: Final = table_of_rows(0, ())


def counted(counts: Int64s) -> tuple[Int64s, Int64s]:
    """For each of several groups its number so many times, and the position in the group."""
    if (counts == 1).all():
        return np.arange(len(counts)), np.zeros(len(counts), dtype=np.int64)
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)


def shared_shapes(shapes: Int64s, ndim: Int32s) -> list[Ints]:
    """Padded shapes as tuples; equal ones are one object, because many rows have few shapes."""
    rows = list(zip(*shapes.T.tolist(), ndim.tolist(), strict=True))
    known = {row: row[: row[-1]] for row in set(rows)}
    return [known[row] for row in rows]


def concatenate(
    tables: Sequence[ShardTable | PackedTable], holders: Sequence[Int32s] | None = None
) -> ShardTable:
    """All rows of all tables in one, sorted by key name, then as given.

    Column by column, so that beside the result no more than one column is in memory.
    """
    tables = [table for table in tables if len(table)] or tables[:1]
    if not tables:
        return NO_ROWS
    # Ranks with parts of the same tensors often share one tuple of names.
    given = {id(table.names): table.names for table in tables}
    all_names = sorted(dict.fromkeys(itertools.chain.from_iterable(given.values())))
    position = {name: i for i, name in enumerate(all_names)}
    numbers = np.array([position[name] for names in given.values() for name in names], np.int32)
    begins = itertools.accumulate(map(len, given.values()), initial=0)
    begin_of = dict(zip(given, begins, strict=False))
    begin_of_row = np.repeat(
        [begin_of[id(table.names)] for table in tables], [len(table) for table in tables]
    )
    first, *others = tables
    joined = first.joined(*others) if isinstance(first, ShardTable) else None
    columns: dict[str, Any] = {}
    order: slice | Int32s = slice(None)
    for name in COLUMNS:  # keys first
        column = _unpacked(tables, name) if joined is None else getattr(joined, name)
        if name in ("keys", "dtypes"):
            column = numbers[begin_of_row + column]
        if name == "keys" and (column[1:] < column[:-1]).any():
            order = np.argsort(column, kind="stable").astype(np.int32)
        columns[name] = column[order]
    return ShardTable(tuple(all_names), holders=holders, **columns)


def _unpacked(tables: Sequence[Any], name: str) -> Any:
    """A column of packed tables, one below the other."""
    counts = np.array([len(table) for table in tables])
    if name == "ranks":
        return np.repeat(np.array([table.rank for table in tables], dtype=np.int32), counts)
    width = max(len(table.columns[name]) for table in tables)
    column = np.empty((width, counts.sum()), dtype=np.int64)
    starts = np.cumsum(counts) - counts
    for axis, values in enumerate(column):
        np.concatenate([table.steps(name, axis) for table in tables], out=values)
        if len(values):  # where a table begins, the step is from the end of the one before
            values[starts[1:]] -= np.add.reduceat(values, starts)[:-1]
        values.cumsum(out=values)
    if name in _WIDE:
        return column.T
    return column[0].astype(np.bool_ if name == "main" else np.int32)


def describe(leaves: Sequence[ShardedBase], rank: int) -> ShardTable:
    """The table of this rank's tensors and objects, in the given order.

    Raises:
        InvalidShardingError: for a leaf whose fields contradict each other (they are mutable, so
            they are checked again here), a dtype that cannot be stored or an empty key.
    """
    findings: list[Finding] = []
    rows: list[tuple[Any, ...]] = []
    for source, leaf in enumerate(leaves):
        try:
            leaf.validate_metadata_integrity()
            rows.append(_row(leaf, source))
        except InvalidShardingError as error:
            findings += error.findings
    InvalidShardingError.raise_if(findings, "the sharded state dict is invalid")
    return table_of_rows(rank, rows)


def _row(leaf: ShardedBase, source: int) -> tuple[Any, ...]:
    """The row of a leaf for ``table_of_rows``."""
    key: Any = leaf.key
    if not isinstance(key, str) or not key:
        raise invalid_sharding(None, "a key must be a string that is not empty", found=repr(key))
    try:
        key.encode()
    except UnicodeEncodeError as error:
        problem = f"a key must be text that UTF-8 can hold: {error}"
        raise invalid_sharding(None, problem, found=repr(key)) from error
    ends = None
    if isinstance(leaf, ShardedTensor):
        shape, flat = leaf.local_shape, leaf.flattened_range
        if leaf.prepend_axis_num:
            shape = (1,) * leaf.prepend_axis_num + tuple(shape)
        dtype = tensor_memory.from_torch(leaf.dtype, key=key).name
        if flat is not None:
            ends = flat.start, flat.stop
    elif isinstance(leaf, ShardedObject):
        shape, dtype = (1,) * len(leaf.global_shape), OBJECT
    else:
        raise invalid_sharding(key, "an unknown kind of sharded leaf", found=type(leaf).__name__)
    main = is_main_replica(leaf.replica_id)
    return key, dtype, leaf.global_shape, leaf.global_offset, shape, ends, main, source


_LIMITS: Final = {c: (int(np.iinfo(c).min), int(np.iinfo(c).max)) for c in "bhiq"}
"""The numbers that each code of an array can hold."""
_COMPRESSION_LEVEL = 1


def pack_columns(columns: Int64s) -> list[bytes]:
    """The bytes of each column of ``[columns, rows]``, which do not tell how many rows it has.

    Neighbours in a model look alike: a number takes a byte, and almost none once compressed.
    """
    steps = columns.copy()
    steps[:, 1:] -= columns[:, :-1]
    lows, highs = steps.min(axis=1, initial=0).tolist(), steps.max(axis=1, initial=0).tolist()
    packed = []
    for column, low, high in zip(steps, lows, highs, strict=True):
        code = next(c for c, (least, most) in _LIMITS.items() if least <= low and high <= most)
        packed.append(code.encode() + column.astype(code).tobytes())
    return packed


def unpack_columns(packed: Sequence[bytes], rows: int) -> Int64s:
    """The columns that ``pack_columns`` packed: ``[columns, rows]``."""
    columns = np.empty((len(packed), rows), dtype=np.int64)
    for column, data in zip(columns, packed, strict=True):
        np.frombuffer(data, chr(data[0]), rows, 1).cumsum(out=column)
    return columns


def pack(table: ShardTable) -> bytes:
    """The table without its ranks. There must be one rank only."""
    columns = (np.atleast_2d(getattr(table, name).T.astype(np.int64)) for name in _PACKED)
    names = json.dumps(table.names).encode()
    packed = names, len(table), [pack_columns(of_name) for of_name in columns]
    return zlib.compress(pickle.dumps(packed), _COMPRESSION_LEVEL)


class PackedTable:
    """A ShardTable of one rank as it travels; ``rank`` may be the number of a set of ranks."""

    def __init__(self, data: bytes, rank: int) -> None:
        names, self._rows, packed = pickle.loads(zlib.decompress(data))  # noqa: S301 - from a rank
        self.names: tuple[str, ...] = _names(names)
        self.rank = rank
        self.columns: dict[str, Sequence[bytes]] = dict(zip(_PACKED, packed, strict=True))

    def __len__(self) -> int:
        return int(self._rows)

    def steps(self, name: str, axis: int) -> Integers:
        """The first value of a column, and the difference of each value to the one before."""
        packed = self.columns[name]
        if axis < len(packed):
            return np.frombuffer(packed[axis], chr(packed[axis][0]), self._rows, 1)
        steps = np.zeros(self._rows, dtype=np.int64)
        steps[:1] = _fill(name)
        return steps

    def unpacked(self) -> ShardTable:
        return ShardTable(self.names, **{name: _unpacked([self], name) for name in COLUMNS})


@lru_cache(maxsize=64)
def _names(data: bytes) -> tuple[str, ...]:
    # Ranks that hold parts of the same tensors share one tuple, so that it is translated once.
    return tuple(json.loads(data))
