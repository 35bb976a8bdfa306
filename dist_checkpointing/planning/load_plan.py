"""WantedTable (the parts a rank wants, as columns, with their memory) and LoadPlan (one row a
read).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import add, attrgetter, le
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.geometry import Box, Ints, Window, padded_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedBase, ShardedObject
from dist_checkpointing.mapping.nested_dicts import Path, Position, chained
from dist_checkpointing.mapping.sharded_tensor import ShardedTensor
from dist_checkpointing.mapping.tensor_memory import plain_addresses
from dist_checkpointing.planning.items import NOWHERE, LoadItemType, MetadataIndex, ReadItem
from dist_checkpointing.planning.shard_table import (
    Bools,
    Columns,
    EditablePlan,
    Int32s,
    Int64s,
    positions_of,
)

_BLOCK_ROWS = 1024
_SHAPE_FIELDS = ("local_shape", "global_shape", "global_offset")
_FIELDS = ("key", "data", "dtype", *_SHAPE_FIELDS, "prepend_axis_num", "flattened_range")


class WantedTable:
    """The leaves that a rank wants, and the tensors among them as columns, one value a tensor.

    ``leaves`` are tensors and cells of sharded objects by path, and ``rows`` the same in a list.
    ``data`` is memory to fill, None where it is not made yet.
    """

    data: list[torch.Tensor | None]
    dtypes: list[torch.dtype]
    local_shapes: list[Ints]
    global_shapes: list[Ints]
    global_offsets: list[Ints]
    prepended: list[int]
    ranges: list[slice | None]

    def __init__(self, leaves: Mapping[Path, ShardedBase]) -> None:
        self.leaves = leaves
        self.rows: Sequence[ShardedBase] = list(leaves.values())
        self.tensors: list[ShardedTensor] = [t for t in self.rows if isinstance(t, ShardedTensor)]
        columns: list[list[Any]] = [[] for _ in _FIELDS]
        # In blocks, because a leaf that is in the cache of the processor is read in half the time.
        for start in range(0, len(self.tensors), _BLOCK_ROWS):
            block = self.tensors[start : start + _BLOCK_ROWS]
            for column, field in zip(columns, _FIELDS, strict=True):
                column.extend(map(attrgetter(field), block))
        keys, self.data, self.dtypes, *shapes, self.prepended, self.ranges = columns
        self.local_shapes, self.global_shapes, self.global_offsets = shapes
        # The index remembers what it has found for one tuple.
        self.keys: tuple[str, ...] = tuple(keys)

    @classmethod
    def of(cls, leaves: Iterable[ShardedBase]) -> WantedTable:
        """The table of leaves whose paths do not matter."""
        return cls({(Position(number),): leaf for number, leaf in enumerate(leaves)})

    def with_objects(self, cells: Mapping[Path, ShardedBase]) -> WantedTable:
        """This table of tensors, and cells of sharded objects behind them."""
        if not cells:
            return self
        table = copy.copy(self)
        table.leaves, table.rows = chained(self.leaves, cells), [*self.rows, *cells.values()]
        return table

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def sources(self) -> Int32s:
        """Position of each tensor among all leaves."""
        if len(self.tensors) == len(self.rows):
            return np.arange(len(self.rows), dtype=np.int32)
        is_tensor = [isinstance(leaf, ShardedTensor) for leaf in self.rows]
        return np.flatnonzero(is_tensor).astype(np.int32)

    @cached_property
    def box_shapes(self) -> Sequence[Ints]:
        """Shapes of the boxes in the global tensors."""
        if not any(self.prepended):
            return self.local_shapes
        pairs = zip(self.prepended, self.local_shapes, strict=True)
        return [(1,) * more + tuple(shape) for more, shape in pairs]

    @cached_property
    def ndim(self) -> Int32s:
        return np.fromiter(map(len, self.box_shapes), dtype=np.int32, count=len(self.keys))

    @cached_property
    def offsets(self) -> Int64s:
        """``[tensors, axes]``, first element of each box."""
        return padded_rows(self.global_offsets, 0)

    @cached_property
    def shapes(self) -> Int64s:
        """``[tensors, axes]``, shape of each box."""
        return padded_rows(self.box_shapes, 1)

    @cached_property
    def flat(self) -> Int64s:
        """``[tensors, 2]``, start and stop of the flattened range, -1 where there is none."""
        ranges = np.full((len(self.keys), 2), -1, dtype=np.int64)
        if self.ranges.count(None) < len(self.ranges):
            rows = [row for row, part in enumerate(self.ranges) if part is not None]
            ranges[rows] = [(part.start, part.stop) for part in self.ranges if part is not None]
        return ranges

    @property
    def are_ready(self) -> bool:
        """Whether every tensor has memory, all of which a whole global tensor fills.

        The box of a padded shard may extend beyond the global tensor.
        """
        if type(None) in set(map(type, self.data)):
            return False
        columns = (self.global_offsets, self.box_shapes, self.global_shapes)
        first, shape, whole = map(chain.from_iterable, columns)
        return all(map(le, map(add, first, shape), whole))

    @cached_property
    def num_bytes(self) -> Int64s:
        """Bytes of each tensor; 0 where memory is not made yet."""
        sizes = (0 if tensor is None else tensor.nbytes for tensor in self.data)
        return np.fromiter(sizes, dtype=np.int64, count=len(self.keys))

    @cached_property
    def data_dtypes(self) -> Sequence[torch.dtype]:
        """Element types of the tensors; that of the leaf where memory is not made yet."""
        pairs = zip(self.data, self.dtypes, strict=True)
        return [dtype if data is None else data.dtype for data, dtype in pairs]

    @cached_property
    def addresses(self) -> Int64s:
        """Address of the first value of each tensor; -1 if it is not CPU memory in C order.

        Valid for as long as nobody gives the tensors other memory.
        """
        return np.array(plain_addresses(self.data), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ReadTable(Columns):
    """Boxes to copy, as columns; row ``i`` of every array describes one of them.

    Shapes and offsets are ``[rows, axes]``, padded to the largest number of axes: shapes with 1,
    offsets with 0.

    ``keys`` are positions in ``names``, and ``sources`` the leaves of this rank that are filled.
    ``dest_offsets`` and ``chunk_offsets`` say where the shard and the stored chunk or piece begin
    in the tensor (``ndim`` axes), or which cell of an object it is. ``pieces`` are rows of the
    tensor's ``Pieces``, -1 on a chunk grid.

    The windows of a row, see ``Window``, lie in the shard (``dest_``) and in the chunk
    (``storage_``): an array of a shape that begins at element ``starts`` of what is there, and a
    box in it. They have ``window_ndim`` axes and boxes of one shape, ``lengths``; objects have
    none.

    ``given`` are the items that the table was made of; None if it was made as a table.
    """

    names: tuple[str, ...]
    keys: Int32s
    is_object: Bools
    ndim: Int32s
    window_ndim: Int32s
    sources: Int32s
    dest_offsets: Int64s
    dest_starts: Int64s
    dest_shapes: Int64s
    dest_boxes: Int64s
    pieces: Int64s
    chunk_offsets: Int64s
    storage_starts: Int64s
    storage_shapes: Int64s
    storage_boxes: Int64s
    lengths: Int64s
    given: npt.NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, items: Iterable[ReadItem]) -> ReadTable:
        """The table of some items."""
        given = list(items)
        positions: dict[str, int] = {}
        keys = [positions.setdefault(i.storage_index.fqn, len(positions)) for i in given]
        stored, wanted = [i.storage_index for i in given], [i.dest_index for i in given]
        ndim = [len(index.offset or ()) for index in stored]
        window_ndim = [len(i.lengths) for i in given]
        width = max((*ndim, *window_ndim), default=0)

        def numbers(values: Iterable[Any], dtype: Any = np.int32) -> Any:
            return np.array([-1 if value is None else value for value in values], dtype=dtype)

        def wide(rows: Iterable[Sequence[int] | None], fill: int = 0) -> Int64s:
            return padded_rows([tuple(row or ())[:width] for row in rows], fill, width)

        def windows(side: str) -> dict[str, Any]:
            own: list[Window] = [getattr(i, side) for i in given]
            return {
                f"{side}_starts": numbers((w.start for w in own), np.int64),
                f"{side}_shapes": wide((w.shape for w in own), 1),
                f"{side}_boxes": wide(w.box.offset for w in own),
            }

        return cls(
            names=tuple(positions),
            keys=numbers(keys),
            is_object=numbers((i.type is LoadItemType.BYTE_IO for i in given), np.bool_),
            ndim=numbers(ndim),
            window_ndim=numbers(window_ndim),
            sources=numbers(i.index for i in wanted),
            dest_offsets=wide(i.offset for i in wanted),
            pieces=numbers((i.index for i in stored), np.int64),
            chunk_offsets=wide(i.offset for i in stored),
            lengths=wide((i.lengths for i in given), 1),
            given=np.fromiter(given, np.object_, len(given)),
            **windows("dest"),
            **windows("storage"),
        )

    def followed_by(self, other: ReadTable) -> ReadTable:
        """This table and the rows of another one, which was made as this one: ``given`` or not."""
        other = replace(other, keys=other.keys + np.int32(len(self.names)))
        return replace(self.joined(other), names=(*self.names, *other.names))

    @property
    def num_elements(self) -> Int64s:
        """Elements that each row copies; 1 for an object."""
        counts: Int64s = self.lengths.prod(axis=1)
        return counts

    def key(self, row: int) -> str:
        """Key of a row."""
        return self.names[int(self.keys[row])]

    def _window(self, row: int, starts: Int64s, shapes: Int64s, boxes: Int64s) -> Window:
        ndim = self.window_ndim[row]
        shape, *box = (tuple(own[row, :ndim].tolist()) for own in (shapes, boxes, self.lengths))
        return Window(int(starts[row]), shape, Box(*box))

    def dest(self, row: int) -> Window:
        """Where the box of a row lies in the shard."""
        return self._window(row, self.dest_starts, self.dest_shapes, self.dest_boxes)

    def storage(self, row: int) -> Window:
        """Where the box of a row lies in the stored chunk."""
        return self._window(row, self.storage_starts, self.storage_shapes, self.storage_boxes)

    def chunk(self, row: int) -> MetadataIndex:
        """The stored chunk, piece or cell that a row is read from."""
        if self.given is not None:
            given: MetadataIndex = self.given[row].storage_index
            return given
        piece = int(self.pieces[row])
        offset = tuple(self.chunk_offsets[row, : self.ndim[row]].tolist())
        return MetadataIndex(self.key(row), offset, None if piece < 0 else piece)

    def item(self, row: int) -> ReadItem:
        """A row as an item."""
        if self.given is not None:
            given: ReadItem = self.given[row]
            return given
        chunk = self.chunk(row)
        offset = tuple(self.dest_offsets[row, : self.ndim[row]].tolist())
        index = MetadataIndex(chunk.fqn, offset, int(self.sources[row]))
        kind = LoadItemType.BYTE_IO if self.is_object[row] else LoadItemType.TENSOR
        return ReadItem(kind, index, self.dest(row), chunk, self.storage(row))

    def items(self) -> tuple[ReadItem, ...]:
        """All rows as items."""
        return tuple(map(self.item, range(len(self))))


def contiguous_ranges(
    starts: Int64s, shapes: Int64s, boxes: Int64s, lengths: Int64s
) -> tuple[Int64s, Bools]:
    """First element of boxes in arrays in memory, and whether each box is one run there.

    An array begins at an element and has a shape; the box has an offset in it and lengths. All but
    ``starts`` are ``[rows, axes]``.
    """
    is_run = np.ones(len(starts), dtype=np.bool_)
    if np.array_equal(lengths, shapes):
        return starts, is_run
    is_partial = np.zeros(len(starts), dtype=np.bool_)
    for axis in reversed(range(shapes.shape[1])):
        is_run &= ~is_partial | (lengths[:, axis] == 1)
        is_partial |= lengths[:, axis] != shapes[:, axis]
    return starts + positions_of(boxes, shapes), is_run


def stored_ranges(table: ReadTable, index: Index) -> Int64s:
    """Flattened range of the stored piece of each row, ``[rows, 2]``; -1 where there is none."""
    ranges = np.full((len(table), 2), -1, dtype=np.int64)
    rows = np.flatnonzero(table.pieces >= 0)
    if not len(rows):
        return ranges
    rows = rows[np.argsort(table.keys[rows], kind="stable")]
    keys, firsts = np.unique(table.keys[rows], return_index=True)
    for key, own in zip(keys.tolist(), np.split(rows, firsts[1:]), strict=True):
        ranges[own] = index.pieces[table.names[key]].flat[table.pieces[own]]
    return ranges


def stored_bytes(table: ReadTable, index: Index) -> Int64s:
    """Bytes of the stored chunk of each row: chunks are stored at full size, also at an edge."""
    ranges = stored_ranges(table, index)
    counts = table.storage_shapes.prod(axis=1)
    counts = np.where(ranges[:, 0] < 0, counts, ranges[:, 1] - ranges[:, 0])
    return counts * index.itemsizes_of(table.names)[table.keys]


def reads_of(chunks: Sequence[MetadataIndex], index: Index) -> ReadTable:
    """The table that reads whole stored chunks, for questions about where they are."""
    items = []
    for chunk in chunks:
        shape = array_shape(index[chunk.fqn], chunk.index)
        window, dest = Window(0, shape, Box.whole(shape)), replace(chunk, index=0)
        items.append(ReadItem(LoadItemType.TENSOR, dest, window, chunk, window))
    return ReadTable.of(items)


def array_shape(tensor: StoredTensor, piece: int | None) -> Ints:
    """Shape of the array of a stored chunk, or of a piece with this number."""
    if piece is None or tensor.pieces is None:
        return tensor.grid.chunk_shape
    box, flat = tensor.pieces[piece]
    return box.shape if flat is None else (flat[1] - flat[0],)


def object_rows(cells: Sequence[tuple[str, Ints, int]]) -> ReadTable:
    """The table that reads cells of sharded objects, each given as key, cell and leaf."""
    items = []
    for key, cell, source in cells:
        dest, stored = MetadataIndex(key, cell, source), MetadataIndex(key, cell)
        items.append(ReadItem(LoadItemType.BYTE_IO, dest, NOWHERE, stored, NOWHERE))
    return replace(ReadTable.of(items), given=None)


def misfits(leaf: ShardedObject, index: Index) -> list[Finding]:
    """Why the checkpoint cannot hold this cell of an object: no such object, or another grid."""
    stored = index.objects.get(leaf.key)
    if stored is None:
        return [Finding("not in the checkpoint", leaf.unique_key)]
    return [] if stored == tuple(leaf.global_shape) else [other_grid(leaf, stored)]


def other_grid(leaf: ShardedObject, stored: object, *, path: str | None = None) -> Finding:
    """What to say about a cell of an object that is stored in another grid, or in several."""
    return Finding(
        "the grid of the sharded object differs",
        leaf.unique_key,
        expected=tuple(leaf.global_shape),
        found=stored,
        path=path,
        remedy="Ask for the cells of the stored grid: an object cannot be resharded.",
    )


@dataclass(eq=False, init=False)
class LoadPlan(EditablePlan[ReadItem, ReadTable]):
    """What one rank reads.

    The rows are columns of ``table``; ``items`` is a list of them, and a planner may change either.

    Args:
        items: the boxes to copy, as a table or as items.
        table: the same as ``items``, which come before it.

    Attributes:
        table: The boxes to copy.
        storage_data: Data for a StorageReader's own use.
        planner_data: Data for a LoadPlanner's own use.
    """

    table: ReadTable
    _items_of, _table_of = staticmethod(ReadTable.items), staticmethod(ReadTable.of)
