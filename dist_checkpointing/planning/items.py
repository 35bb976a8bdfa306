"""What one rank writes: a plan, and the items that show its rows one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.shard_table import (
    OBJECT,
    ShardRow,
    ShardTable,
    concatenate,
    table_of_rows,
)
from dist_checkpointing.planning.tensor_data import TensorWriteData, unusable_tensor_data


class WriteItemType(Enum):
    """What a WriteItem carries."""

    TENSOR = "tensor"
    BYTE_IO = "byte_io"


@dataclass(frozen=True, slots=True)
class MetadataIndex:
    """Names a part of a global tensor or object.

    Attributes:
        fqn: The key.
        offset: First element of the part, in elements of the global tensor.
        index: Number of one of its leaves on the side of a rank; on the side of the checkpoint
            that of a piece of a tensor without chunk grid (None on a grid).
    """

    fqn: str
    offset: Ints | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A part of one of this rank's leaves, to be stored as one chunk (or one part of a chunk).

    Attributes:
        index: Key, offset of the part, and which leaf of this rank it comes from.
        type: Tensor or bytes.
        tensor_data: What and where, for tensors. A dict or an object with ``chunk``, ``properties``
            and ``size`` becomes a TensorWriteData.
        object_cell: Grid shape of a sharded object, for objects; the cell is ``index.offset``.
            None for an object of one cell.
        is_main_replica: Whether the user made this the copy to write.
        bytes_io_data: Anything, for an object; it is not kept.

    Raises:
        InvalidShardingError: if a tensor comes without usable ``tensor_data``, or bytes with any.
    """

    index: MetadataIndex
    type: WriteItemType
    tensor_data: TensorWriteData | None = None
    object_cell: Ints | None = None
    is_main_replica: bool = True
    bytes_io_data: object = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        data = self.tensor_data
        if (data is None) == (self.type is WriteItemType.TENSOR):
            raise unusable_tensor_data(
                "a tensor needs it, and bytes have none",
                self.index.fqn,
                expected="tensor_data" if data is None else "no tensor_data",
                found=data,
            )
        if data is not None and type(data) is not TensorWriteData:
            object.__setattr__(self, "tensor_data", TensorWriteData.of(data, self.index.fqn))

    def tensor_storage_size(self) -> int | None:
        """Bytes to store; None for an object."""
        if self.tensor_data is None:
            return None
        data = self.tensor_data
        count = data.chunk.num_elements
        if data.flat_range is not None:
            count = data.flat_range[1] - data.flat_range[0]
        return count * tensor_memory.from_name(data.dtype).itemsize


@dataclass(frozen=True, eq=False, init=False)
class SavePlan:
    """What one rank brings to a save (local plan), or writes (final plan).

    The rows are columns of ``table``; ``items`` shows them one by one, and ``with_items`` takes
    changed ones back, so that a planner may work on either.

    Args:
        items: the shards, as a table or as items.
        table: the same as ``items``.

    Attributes:
        table: The shards.
        index: What the whole checkpoint will hold; set by ``build_global_plan``.
        storage_data: Data for a StorageWriter's own use.
        planner_data: Data for a SavePlanner's own use.
    """

    table: ShardTable
    index: Index | None
    storage_data: object
    planner_data: object

    def __init__(
        self,
        items: ShardTable | Iterable[WriteItem] = (),
        storage_data: object = None,
        planner_data: object = None,
        *,
        table: ShardTable | None = None,
        index: Index | None = None,
    ) -> None:
        rows = items if table is None else table
        rows = rows if isinstance(rows, ShardTable) else table_of_rows(0, list(map(_row, rows)))
        vars(self).update(table=rows, index=index)
        vars(self).update(storage_data=storage_data, planner_data=planner_data)

    @cached_property
    def items(self) -> tuple[WriteItem, ...]:
        """The rows as items."""
        table = self.table
        columns = (
            table.keys,
            table.dtypes,
            table.ndim,
            table.global_shapes,
            table.offsets,
            table.shapes,
            table.flat,
            table.main,
            table.sources,
        )
        return tuple(
            _item(table.names[key], table.names[dtype], *rest)
            for key, dtype, *rest in zip(*(column.tolist() for column in columns), strict=True)
        )

    def item(self, row: int) -> WriteItem:
        """One row as an item, for when the others are not needed."""
        table = self.table
        return _item(
            table.key(row),
            table.dtype(row),
            int(table.ndim[row]),
            table.global_shapes[row].tolist(),
            table.offsets[row].tolist(),
            table.shapes[row].tolist(),
            table.flat[row].tolist(),
            bool(table.main[row]),
            int(table.sources[row]),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the plan."""
        return int(self.table.num_bytes.sum())

    def for_index(self, index: Index | None) -> SavePlan:
        """This plan with an index, unless it has one."""
        return replace(self, index=index) if self.index is None else self

    def with_items(self, items: Iterable[WriteItem]) -> SavePlan:
        """This plan with other items in place of its own."""
        rank = int(self.table.ranks[0]) if len(self.table) else 0
        return replace(self, table=table_of_rows(rank, list(map(_row, items))))


def _item(
    key: str,
    dtype: str,
    ndim: int,
    global_shape: list[int],
    offset: list[int],
    shape: list[int],
    flat: list[int],
    main: bool,
    source: int,
) -> WriteItem:
    box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
    index = MetadataIndex(key, box.offset, None if source < 0 else source)
    whole = tuple(global_shape[:ndim])
    if dtype == OBJECT:
        return WriteItem(index, WriteItemType.BYTE_IO, None, whole, main)
    flat_range = None if flat[0] < 0 else (flat[0], flat[1])
    data = TensorWriteData(box, dtype, whole, flat_range)
    return WriteItem(index, WriteItemType.TENSOR, data, None, main)


def _row(item: WriteItem) -> ShardRow:
    data = item.tensor_data
    if data is None:
        cell, shape = item.index.offset, item.object_cell
        if shape is None:
            shape = (1,) * len(cell or (0,))
        box, dtype, flat = Box(tuple(cell or (0,) * len(shape)), (1,) * len(shape)), OBJECT, None
    else:
        shape, box, dtype, flat = data.size, data.chunk, data.dtype, data.flat_range
    source = -1 if item.index.index is None else item.index.index
    main = item.is_main_replica
    return ShardRow(item.index.fqn, dtype, shape, box.offset, box.shape, flat, main, source)


class LocalPlans(tuple[SavePlan, ...]):  # noqa: SLOT001 - it keeps its catalog
    """The local plans of all ranks, in rank order."""

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> LocalPlans:
        """The plans as they are, or made of a sequence that a user's planner has changed."""
        return plans if isinstance(plans, cls) else cls(plans)

    @cached_property
    def catalog(self) -> ShardTable:
        """All their rows in one table, sorted by key."""
        return concatenate([plan.table for plan in self])
