"""The table of shards: leaves of a rank checked and turned into columns, rows selected and joined,
packed into bytes.

Neighbours in a model look alike, so that a number takes a byte, and almost none once compressed.

One row is one shard. A rank describes its own leaves once; the tables of all ranks together are the
catalog, on which everything that concerns all ranks (coverage, layout, who writes what) is array
arithmetic.

A shard takes a few bytes, whatever its shape.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.dtypes import ELEMENT_TYPES
from dist_checkpointing.format.geometry import MAX_EXTENT, Box, Ints, padded_rows
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
    tensor_memory,
)
from dist_checkpointing.mapping.sharded_tensor import fields_of

if TYPE_CHECKING:
    pass


_CODES: Final = "bhiq"


_INT_SIZES: Final = {ord(code): np.dtype(code).itemsize for code in _CODES}


def pack_column(column: Int64s) -> bytes:
    """The bytes of a column of int64, which do not tell how many rows it has."""
    steps = np.diff(column, prepend=0)
    low, high = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
    for code in _CODES:
        limits = np.iinfo(np.dtype(code))
        if limits.min <= low and high <= limits.max:
            return code.encode() + steps.astype(np.dtype(code)).tobytes()
    raise AssertionError("an int64 fits into an int64")


def column_end(data: bytes, begin: int, rows: int) -> int:
    """Where the bytes of a packed column end."""
    return begin + 1 + rows * _INT_SIZES[data[begin]]


def unpack_column(data: bytes, begin: int, rows: int) -> Int64s:
    """The packed column that begins there."""
    steps = np.frombuffer(data, chr(data[begin]), rows, begin + 1)
    return np.cumsum(steps, dtype=np.int64)


OBJECT = "object"


"""Stands in the dtype column for a ShardedObject."""


_ITEMSIZES = {row.name: row.itemsize for row in ELEMENT_TYPES}


Int32s = npt.NDArray[np.int32]


Int64s = npt.NDArray[np.int64]


Integers = Int32s | Int64s


Bools = npt.NDArray[np.bool_]


_MANY_ROWS = 1 << 22


_MOST_HOLDERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Shards as columns; row ``i`` of every array describes shard ``i``.

    Shapes and offsets are padded to the largest number of axes: shapes with 1, offsets with 0.

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

    @property
    def max_ndim(self) -> int:
        """Number of columns of the padded arrays."""
        return int(self.global_shapes.shape[1])

    def take(self, rows: Any) -> ShardTable:
        """The table of some rows, by mask or positions; itself if the mask is all true."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.all():
            return self
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def followed_by(self, other: ShardTable) -> ShardTable:
        """This table and more rows, which must use the same names and holders."""
        assert self.names == other.names
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in COLUMNS
        }
        return replace(self, **columns)

    def ranks_of(self, rows: Any) -> Int32s:
        """All ranks that hold any of some rows, ascending."""
        numbers = np.unique(self.ranks[rows])
        if self.holders is None or not len(numbers):
            return numbers
        return np.unique(np.concatenate([self.holders[number] for number in numbers.tolist()]))

    def first_rank(self, row: int) -> int:
        """The lowest rank that holds a row."""
        number = int(self.ranks[row])
        return number if self.holders is None else int(self.holders[number][0])

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
        begins = np.cumsum(sizes) - sizes
        held = zip(self.holders, sizes.tolist(), strict=True)
        members = np.concatenate([np.empty(0, np.int32), *(ranks[:size] for ranks, size in held)])
        counts = sizes[self.ranks]
        if (counts == 1).all():
            return replace(self, ranks=members[begins[self.ranks]], holders=None)
        rows = np.repeat(np.arange(len(self)), counts)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ranks = members[begins[self.ranks[rows]] + place]
        table = replace(self.take(rows), ranks=ranks, holders=None)
        return table.take(np.lexsort((ranks, table.keys)))

    @property
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

    @property
    def num_bytes(self) -> Int64s:
        """Bytes that each row holds; 0 for objects."""
        return self.num_elements * self.itemsizes

    @property
    def itemsizes(self) -> Int64s:
        """Bytes of an element of each row; 0 for objects."""
        itemsizes = np.zeros(len(self.names), dtype=np.int64)
        # Nearly all names are keys.
        for position in np.flatnonzero(np.bincount(self.dtypes)).tolist():
            itemsizes[position] = _ITEMSIZES.get(self.names[position], 0)
        return itemsizes[self.dtypes]

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
        ndim = self.ndim[row]
        return Box(
            tuple(self.offsets[row, :ndim].tolist()), tuple(self.shapes[row, :ndim].tolist())
        )

    def flat_range(self, row: int) -> tuple[int, int] | None:
        """Flattened range of a row."""
        start, stop = self.flat[row].tolist()
        return None if start < 0 else (start, stop)

    @property
    def is_object(self) -> Bools:
        """Which rows are objects."""
        if OBJECT not in self.names:
            return np.zeros(len(self), dtype=np.bool_)
        mask: Bools = self.dtypes == self.names.index(OBJECT)
        return mask

    @property
    def num_elements(self) -> Int64s:
        """Elements that each row holds (the range only, if flattened)."""
        boxes = self.shapes.prod(axis=1)
        return np.where(self.flat[:, 0] >= 0, self.flat[:, 1] - self.flat[:, 0], boxes)


COLUMNS = tuple(f.name for f in fields(ShardTable) if f.name not in ("names", "holders"))


"""The arrays of a table."""


class ShardRow(NamedTuple):
    """A row on its way into a table; see the attributes of ShardTable."""

    key: str
    dtype: str
    global_shape: Ints
    offset: Ints
    shape: Ints
    flat: tuple[int, int] | None
    main: bool
    source: int


def table_of_rows(rank: int, rows: Sequence[ShardRow]) -> ShardTable:
    return table_of(rank, *(zip(*rows, strict=True) if rows else [()] * len(ShardRow._fields)))


def table_of(
    rank: int,
    keys: Sequence[str],
    dtypes: Sequence[str],
    global_shapes: Sequence[Ints],
    offsets: Sequence[Ints],
    shapes: Sequence[Ints],
    flat: Sequence[tuple[int, int] | None],
    main: Sequence[bool],
    sources: Sequence[int],
) -> ShardTable:
    """The table of a rank from lists, one value a shard; see the attributes of ShardTable."""
    distinct = dict.fromkeys(itertools.chain(keys, dict.fromkeys(dtypes)))
    names = dict(zip(distinct, range(len(distinct)), strict=True))
    ndim = np.fromiter(map(len, global_shapes), dtype=np.int32, count=len(keys))
    count = len(keys)
    ranges = np.full((count, 2), -1, dtype=np.int64)
    has_range = [row for row, own in enumerate(flat) if own is not None]
    if has_range:
        ranges[has_range] = [own for own in flat if own is not None]
    return ShardTable(
        names=tuple(names),
        keys=np.fromiter(map(names.__getitem__, keys), dtype=np.int32, count=count),
        dtypes=np.fromiter(map(names.__getitem__, dtypes), dtype=np.int32, count=count),
        ndim=ndim,
        global_shapes=padded_rows(global_shapes, 1, 0),
        offsets=padded_rows(offsets, 0, 0),
        shapes=padded_rows(shapes, 1, 0),
        flat=ranges,
        main=np.fromiter(main, dtype=np.bool_, count=count),
        sources=np.fromiter(sources, dtype=np.int32, count=count),
        ranks=np.full(count, rank, dtype=np.int32),
    )


def shared_shapes(shapes: Int64s, ndim: Int32s) -> list[Ints]:
    """Padded shapes as tuples; equal ones are one object, because many rows have few shapes."""
    known: dict[Ints, Ints] = {}
    rows = zip(shapes.tolist(), ndim.tolist(), strict=True)
    own = (tuple(shape[:axes]) for shape, axes in rows)
    return [known.setdefault(shape, shape) for shape in own]


def concatenate(
    tables: Sequence[ShardTable | PackedTable], holders: Sequence[Int32s] | None = None
) -> ShardTable:
    """All rows of all tables in one, sorted by key name, then as given.

    Column by column, so that beside the result no more than one column is in memory.
    """
    tables = [table for table in tables if len(table)] or tables[:1]
    given = list({id(table.names): table.names for table in tables}.values())
    names = sorted(given[0] if len(given) == 1 else set(itertools.chain(*given)))
    position = {name: i for i, name in enumerate(names)}
    width = max((table.max_ndim for table in tables), default=0)
    translation: dict[int, Int32s] = {}
    for table in tables:
        if id(table.names) not in translation:
            moved = [position[name] for name in table.names]
            translation[id(table.names)] = np.array(moved, dtype=np.int32)

    columns: dict[str, Any] = {}
    for name in COLUMNS:  # keys first
        parts = []
        for table in tables:
            part = getattr(table, name) if isinstance(table, ShardTable) else table.column(name)
            if name in ("keys", "dtypes"):
                part = translation[id(table.names)][part] if len(part) else part
            elif name in ("global_shapes", "offsets", "shapes") and part.shape[1] != width:
                fill = 0 if name == "offsets" else 1
                part = np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill)
            parts.append(part)
        column = np.concatenate(parts)
        if name == "keys":
            order = np.argsort(column, kind="stable").astype(np.int32)
        columns[name] = column[order]
    return ShardTable(tuple(names), holders=holders, **columns)


def describe(leaves: Sequence[ShardedBase], rank: int) -> ShardTable:
    """The table of this rank's tensors and objects, in the given order.

    Raises:
        InvalidShardingError: for a leaf whose fields contradict each other (they are mutable, so
            they are checked again here), a dtype that cannot be stored or an empty key.
    """
    table = _columns(leaves, rank)
    if table is not None:
        return table
    # One by one, to say of each what is wrong with it.
    findings: list[Finding] = []
    rows: list[ShardRow] = []
    for source, leaf in enumerate(leaves):
        try:
            rows.append(_row(leaf, source))
        except InvalidShardingError as error:
            findings += error.findings
    if findings:
        raise InvalidShardingError("the sharded state dict is invalid", findings)
    return table_of_rows(rank, rows)


def _columns(leaves: Sequence[ShardedBase], rank: int) -> ShardTable | None:
    """The table, unless there is anything unusual about any leaf: ``_row`` knows what it is."""
    if not leaves or not {ShardedTensor, ShardedObject}.issuperset(map(type, leaves)):
        return None
    rows = [
        (*fields_of(leaf), leaf.data) if type(leaf) is ShardedTensor else _object(leaf)
        for leaf in leaves
    ]
    keys, types, local, whole, offsets, grids, replicas, prepended, padding, ranges, data = zip(
        *rows, strict=True
    )
    del rows
    try:
        if not (
            {str}.issuperset(map(type, keys))
            and all(keys)
            and "".join(keys).encode()
            and all(map(_are_ints, (local, whole, offsets)))
            and _are_ints([(number,) for number in prepended])
            and min(prepended) >= 0
            and _are_ints([r if type(r) is tuple else (r,) for r in replicas])
            and _are_ints([(r.start, r.stop) for r in ranges if r is not None])
            and all(r is None or r.step is None for r in ranges)
            and all(map(_fits, data, types, local, ranges))
        ):
            return None
        name_of = {
            t: OBJECT if t is OBJECT else tensor_memory.from_torch(t).name for t in set(types)
        }
        dtype_names = [name_of[dtype] for dtype in types]
        boxes: Sequence[Any] = local
        if any(prepended):
            boxes = [(1,) * more + own for more, own in zip(prepended, local, strict=True)]
        ndim = list(map(len, whole))
        if not list(map(len, offsets)) == list(map(len, boxes)) == ndim:
            return None
        flat = [None if r is None else (r.start, r.stop) for r in ranges]
        is_main = {replica: is_main_replica(replica) for replica in set(replicas)}
        main = [is_main[replica] for replica in replicas]
        columns = (keys, dtype_names, whole, offsets, boxes, flat, main, range(len(leaves)))
        table = table_of(rank, *columns)
        is_flat = np.array([r is not None for r in ranges])
        is_padded = np.array([bool(may) for may in padding])
        is_right = _is_right(table, is_flat, is_padded) and _are_on_grid(table, grids)
    except (AttributeError, TypeError, UnicodeEncodeError, OverflowError, InvalidShardingError):
        return None
    return table if is_right else None


def _object(leaf: Any) -> tuple[Any, ...]:
    cell = (1,) * len(leaf.global_shape)
    shape, offset = leaf.global_shape, leaf.global_offset
    return leaf.key, OBJECT, cell, shape, offset, None, leaf.replica_id, 0, True, None, None


def _are_ints(rows: Sequence[Any]) -> bool:
    """Whether all are tuples of ints."""
    # type() and not isinstance(): True is an int to Python, and a subclass may be anything.
    return {tuple}.issuperset(map(type, rows)) and {int}.issuperset(
        map(type, itertools.chain.from_iterable(rows))
    )


def _fits(data: Any, dtype: Any, local_shape: Any, flat: Any) -> bool:
    if data is None or dtype is OBJECT:
        return True
    if not isinstance(data, torch.Tensor) or data.is_nested or data.dtype != dtype:
        return False
    shape = local_shape if flat is None else (flat.stop - flat.start,)
    return bool(data.shape == shape)


def _is_right(table: ShardTable, is_flat: Bools, is_padded: Bools) -> bool:
    """Whether numbers are extents, shards lie in their tensors, and ranges in their shards."""
    columns = (table.global_shapes, table.offsets, table.shapes)
    if any((c < 0).any() or (c >= MAX_EXTENT).any() for c in columns):
        return False
    start, stop = table.flat[is_flat].T
    sizes = table.shapes[is_flat].astype(np.float64).prod(axis=1)
    inside = (table.offsets + table.shapes <= table.global_shapes).all(axis=1)
    return bool(
        (inside | is_padded).all()
        and (sizes < MAX_EXTENT).all()
        and ((start >= 0) & (start <= stop)).all()
        and (stop <= table.shapes[is_flat].prod(axis=1)).all()
    )


def _are_on_grid(table: ShardTable, grids: Sequence[Any]) -> bool:
    """Whether shards that name a regular grid begin at a multiple of their shape."""
    rows = np.array([grid is not None for grid in grids], dtype=np.bool_)
    counts = [grid for grid in grids if grid is not None]
    if not _are_ints(counts) or list(map(len, counts)) != table.ndim[rows].tolist():
        return False
    if min(itertools.chain.from_iterable(counts), default=1) < 1:
        return False
    return not (table.offsets[rows] % np.maximum(table.shapes[rows], 1)).any()


def _row(leaf: ShardedBase, source: int) -> ShardRow:
    key: object = leaf.key
    if not isinstance(key, str) or not key:
        finding = Finding("a key must be a string that is not empty", found=repr(key))
        raise InvalidShardingError("invalid key", [finding])
    try:
        key.encode()
    except UnicodeEncodeError as error:
        finding = Finding(f"a key must be text that UTF-8 can hold: {error}", found=repr(key))
        raise InvalidShardingError("invalid key", [finding]) from error
    leaf.validate_metadata_integrity()
    main = is_main_replica(leaf.replica_id)
    if isinstance(leaf, ShardedTensor):
        box, flat, dtype = (
            leaf.box,
            leaf.flat_range,
            tensor_memory.from_torch(leaf.dtype, key=key).name,
        )
    elif isinstance(leaf, ShardedObject):
        cell = (1,) * len(leaf.global_shape)
        box, flat, dtype = Box(tuple(leaf.global_offset), cell), None, OBJECT
    else:
        finding = Finding("cannot be described", key, found=type(leaf).__name__)
        raise InvalidShardingError("unknown kind of sharded leaf", [finding])
    shape = tuple(leaf.global_shape)
    return ShardRow(key, dtype, shape, box.offset, box.shape, flat, main, source)


_HEAD = struct.Struct("<QQQ")


_COLUMNS = ("keys", "dtypes", "ndim", "main", "sources")


_WIDE_COLUMNS = ("global_shapes", "offsets", "shapes", "flat")


_LEVEL = 1


def pack(table: ShardTable) -> bytes:
    """The table without its ranks. There must be one rank only."""
    names = json.dumps(table.names).encode()
    columns = [getattr(table, name).astype(np.int64) for name in _COLUMNS]
    for name in _WIDE_COLUMNS:
        columns += list(getattr(table, name).T)
    parts = [_HEAD.pack(len(table), table.max_ndim, len(names)), names]
    parts += map(pack_column, columns)
    return zlib.compress(b"".join(parts), _LEVEL)


class PackedTable:
    """A table whose columns are unpacked when they are asked for.

    ``rank`` may be the number of the set of ranks that hold it.
    """

    def __init__(self, data: bytes, rank: int) -> None:
        self._raw = raw = zlib.decompress(data)
        self._rank = rank
        self._rows, self.max_ndim, names_size = _HEAD.unpack_from(raw)
        self.names: tuple[str, ...] = _names(raw[_HEAD.size : _HEAD.size + names_size])
        self._begins = [_HEAD.size + names_size]
        for _ in range(len(_COLUMNS) + 3 * self.max_ndim + 2):
            self._begins.append(column_end(raw, self._begins[-1], self._rows))

    def __len__(self) -> int:
        return int(self._rows)

    def column(self, name: str) -> Any:
        if name == "ranks":
            return np.full(self._rows, self._rank, dtype=np.int32)
        if name in _COLUMNS:
            return self._numbers(_COLUMNS.index(name)).astype(
                np.bool_ if name == "main" else np.int32
            )
        first = len(_COLUMNS) + self.max_ndim * _WIDE_COLUMNS.index(name)
        width = 2 if name == "flat" else self.max_ndim
        columns = np.empty((self._rows, width), dtype=np.int64)
        for axis in range(width):
            columns[:, axis] = self._numbers(first + axis)
        return columns

    def _numbers(self, number: int) -> Int64s:
        return unpack_column(self._raw, self._begins[number], self._rows)


def unpack(data: bytes, rank: int) -> ShardTable:
    """The table of a rank, as it was packed by that rank."""
    table = PackedTable(data, rank)
    return ShardTable(names=table.names, **{name: table.column(name) for name in COLUMNS})


def unpack_all(packed: Sequence[bytes]) -> list[ShardTable]:
    """The tables of all ranks, in rank order; those of copies are unpacked once."""
    known: dict[bytes, ShardTable] = {}
    tables = []
    for rank, data in enumerate(packed):
        table = known.get(data)
        if table is None:
            table = known[data] = unpack(data, rank)
        tables.append(replace(table, ranks=np.full(len(table), rank, dtype=np.int32)))
    return tables


@lru_cache(maxsize=64)
def _names(data: bytes) -> tuple[str, ...]:
    # Ranks that hold parts of the same tensors share one tuple, so that it is translated once.
    return tuple(json.loads(data))
