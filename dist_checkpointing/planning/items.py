"""One row at a time, as planners of torch DCP see it: WriteItem, ReadItem, MetadataIndex, Metadata.

The library plans with tables; only planners and storages of users ask for items.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from dist_checkpointing.errors import CheckpointingException, Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints, Window, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.chunking import Layout, RowBlockLayout, index_of, whole_items
from dist_checkpointing.planning.coverage import main_rows
from dist_checkpointing.planning.shard_table import (
    COLUMNS,
    OBJECT,
    EditablePlan,
    ShardTable,
    concatenate,
    table_of_rows,
)

_ITEMSIZES = {row.name: row.itemsize for row in tensor_memory.DTYPES}
NOWHERE = Window(0, (), Box((), ()))
"""The windows of a cell of a sharded object."""


@dataclass(frozen=True, slots=True, init=False)
class TensorWriteData:
    """The tensor part of a WriteItem.

    Args:
        chunk: a Box, or anything with ``offsets`` and ``sizes``.
        dtype: a dtype, its name, or anything with a ``dtype``.
        properties: the same as ``dtype``.

    Attributes:
        chunk: The box to write, in elements of the global tensor.
        dtype: Name of the stored dtype.
        size: Global shape.
        flat_range: If given, only these elements of the flattened box, as a 1-D tensor.

    Raises:
        InvalidShardingError: if these are not a box, a dtype and a shape.
    """

    chunk: Box
    dtype: str
    size: Ints
    flat_range: tuple[int, int] | None

    def __init__(
        self,
        chunk: Any,
        dtype: Any = None,
        size: Sequence[int] = (),
        flat_range: tuple[int, int] | None = None,
        *,
        properties: Any = None,
    ) -> None:
        if type(chunk) is not Box:
            chunk = Box(_ints(_part(chunk, "offsets")), _ints(_part(chunk, "sizes")))
        dtype = properties if dtype is None else dtype
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "dtype", _dtype_name(dtype))
        object.__setattr__(self, "size", size if type(size) is tuple else _ints(size))
        object.__setattr__(self, "flat_range", flat_range)

    @classmethod
    def of(cls, given: Any, key: str) -> TensorWriteData:
        """The same of a dict or an object with the names of the planner protocol.

        Raises:
            InvalidShardingError: if it lacks ``chunk``, ``properties`` or ``size``, or they do not
                fit together.
        """
        try:
            data = cls(*(_part(given, name) for name in ("chunk", "properties", "size")))
        except InvalidShardingError as error:
            (finding,) = error.findings
            raise InvalidShardingError(error.message, [replace(finding, key=key)]) from None
        box, axes = data.chunk, len(data.size)
        if not len(box.offset) == len(box.shape) == axes:
            problem = "chunk and size have different numbers of axes"
            expected = f"{axes} offsets and sizes, as size has"
            raise _unusable_data(problem, key, expected, f"offsets {box.offset}, sizes {box.shape}")
        return data

    @property
    def properties(self) -> TensorWriteData:
        """What has the ``dtype``: this."""
        return self

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _part_of(given: Any, name: str) -> Any:
    """What a dict or an object has under a name; None if it has nothing."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _part(given: Any, name: str) -> Any:
    part = _part_of(given, name)
    if part is None:
        expected = "chunk (offsets, sizes), properties (dtype) and size"
        raise _unusable_data(f"it has no {name}", None, expected, given)
    return part


def _ints(given: Any) -> Ints:
    try:
        return tuple(map(int, given))
    except (TypeError, ValueError):
        raise _unusable_data("not a shape or an offset", None, "integers", given) from None


def _dtype_name(given: Any) -> str:
    if not isinstance(given, str | torch.dtype):
        given = _part(given, "dtype")
    if isinstance(given, torch.dtype):
        return tensor_memory.from_torch(given).name
    return str(given).rpartition(".")[2].lower()


def _unusable_data(
    problem: str, key: str | None, expected: object, found: object
) -> InvalidShardingError:
    remedy = "Give it a TensorWriteData, or a dict or an object with its names."
    finding = Finding(problem, key, expected, found, remedy=remedy)
    return InvalidShardingError("the tensor_data of a WriteItem is not usable", [finding])


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
        bytes_io_data: Anything, for an object; it is not kept.
        object_cell: Grid shape of a sharded object, for objects; the cell is ``index.offset``.
            None for an object of one cell.
        is_main_replica: Whether the user made this the copy to write.

    Raises:
        InvalidShardingError: if a tensor comes without usable ``tensor_data``, or bytes with any.
    """

    index: MetadataIndex
    type: WriteItemType
    tensor_data: TensorWriteData | None = None
    bytes_io_data: object = field(default=None, compare=False, repr=False)
    object_cell: Ints | None = field(default=None, kw_only=True)
    is_main_replica: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        data = self.tensor_data
        if (data is None) == (self.type is WriteItemType.TENSOR):
            expected = "tensor_data" if data is None else "no tensor_data"
            problem = "a tensor needs it, and bytes have none"
            raise _unusable_data(problem, self.index.fqn, expected, data)
        if data is not None and type(data) is not TensorWriteData:
            object.__setattr__(self, "tensor_data", TensorWriteData.of(data, self.index.fqn))

    def tensor_storage_size(self) -> int | None:
        """Bytes to store, 4 for each element of an unknown dtype; None for an object."""
        if self.tensor_data is None:
            return None
        data = self.tensor_data
        count = data.chunk.num_elements
        if data.flat_range is not None:
            count = data.flat_range[1] - data.flat_range[0]
        return count * _ITEMSIZES.get(data.dtype, 4)


def _items(table: ShardTable) -> Iterator[WriteItem]:
    columns = (getattr(table, name).tolist() for name in COLUMNS)
    for key, dtype, ndim, whole, offset, shape, flat, main, source, _ in zip(*columns, strict=True):
        box, size = Box(tuple(offset[:ndim]), tuple(shape[:ndim])), tuple(whole[:ndim])
        index = MetadataIndex(table.names[key], box.offset, None if source < 0 else source)
        is_object = table.names[dtype] == OBJECT
        flat_range = None if flat[0] < 0 else (flat[0], flat[1])
        data = None if is_object else TensorWriteData(box, table.names[dtype], size, flat_range)
        kind = WriteItemType.BYTE_IO if is_object else WriteItemType.TENSOR
        cell = size if is_object else None
        yield WriteItem(index, kind, data, object_cell=cell, is_main_replica=main)


def _table_of(items: Iterable[WriteItem]) -> ShardTable:
    # Items do not say whose they are.
    return table_of_rows(0, [*map(_row, items)])


def _row(item: WriteItem) -> tuple[Any, ...]:
    index, data = item.index, item.tensor_data
    source = -1 if index.index is None else index.index
    if data is not None:
        box, dtype, shape, flat = data.chunk, data.dtype, data.size, data.flat_range
        if dtype not in _ITEMSIZES:
            known = ", ".join(_ITEMSIZES)
            raise _unusable_data("this dtype cannot be stored", index.fqn, known, dtype)
        return index.fqn, dtype, shape, box.offset, box.shape, flat, item.is_main_replica, source
    grid = item.object_cell
    if grid is None:
        grid = (1,) * len(index.offset or (0,))
    cell, one = tuple(index.offset or (0,) * len(grid)), (1,) * len(grid)
    return index.fqn, OBJECT, grid, cell, one, None, item.is_main_replica, source


@dataclass(eq=False, init=False)
class SavePlan(EditablePlan[WriteItem, ShardTable]):
    """What one rank brings to a save (local plan), or writes (final plan).

    The rows are columns of ``table``; ``items`` is a list of them, and a planner may change either.

    Args:
        items: the shards, as a table or as items.
        table: the same as ``items``, which come before it.

    Attributes:
        table: The shards.
        index: What the whole checkpoint will hold; set by ``build_global_plan``.
        storage_data: Data for a StorageWriter's own use.
        planner_data: Data for a SavePlanner's own use.
    """

    table: ShardTable
    index: Index | None
    _items_of, _table_of = staticmethod(_items), staticmethod(_table_of)

    def __init__(
        self,
        items: ShardTable | Iterable[WriteItem] | None = None,
        storage_data: object = None,
        planner_data: object = None,
        *,
        table: ShardTable | None = None,
        index: Index | None = None,
    ) -> None:
        super().__init__(items, storage_data, planner_data, table=table)
        self.index = index

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the plan."""
        return int(self.table.num_bytes.sum())

    def for_index(self, index: Index | None) -> SavePlan:
        """This plan with an index, unless it has one."""
        return replace(self, index=index) if self.index is None else self


class LoadItemType(Enum):
    """What a ReadItem carries."""

    TENSOR = "tensor"
    BYTE_IO = "byte_io"


@dataclass(frozen=True, slots=True, init=False)
class ReadItem:
    """A box to copy from a stored chunk into one of this rank's leaves.

    Made either of two windows or of ``dest_offsets``, ``storage_offsets`` and ``lengths``. The
    shapes of the windows are then found from the indices when the plan is used.

    Args:
        dest: a window, or the same as ``dest_offsets``.
        storage: a window, or the same as ``storage_offsets``.
        lengths: shape of the box.
        dest_offsets: offset of the box in the destination.
        storage_offsets: offset of the box in the stored chunk.

    Attributes:
        type: Tensor or bytes.
        dest_index: Key, offset of the destination shard, and which leaf of this rank it is.
        dest: Where the box lies in the destination's memory.
        storage_index: Key, offset of the stored chunk, and which piece it is.
        storage: Where the box lies in the stored chunk, whose elements are in C order.

    Raises:
        InvalidShardingError: if it does not say which box goes where.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest: Window
    storage_index: MetadataIndex
    storage: Window

    def __init__(
        self,
        type: LoadItemType,  # noqa: A002 - the name that the protocol gives it
        dest_index: MetadataIndex,
        dest: Window | Sequence[int] | None = None,
        storage_index: MetadataIndex | None = None,
        storage: Window | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        *,
        dest_offsets: Sequence[int] | None = None,
        storage_offsets: Sequence[int] | None = None,
    ) -> None:
        if storage_index is None:
            raise _incomplete(dest_index, "storage_index", None)
        if not isinstance(dest, Window):
            offsets = dest if dest_offsets is None else dest_offsets
            dest = _unplaced(type, dest_index, "dest_offsets", offsets, lengths)
        if not isinstance(storage, Window):
            offsets = storage if storage_offsets is None else storage_offsets
            storage = _unplaced(type, storage_index, "storage_offsets", offsets, lengths)
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "dest_index", dest_index)
        object.__setattr__(self, "dest", dest)
        object.__setattr__(self, "storage_index", storage_index)
        object.__setattr__(self, "storage", storage)

    @property
    def dest_offsets(self) -> Ints:
        """Offset of the box in the destination."""
        return _offsets(self.dest)

    @property
    def storage_offsets(self) -> Ints:
        """Offset of the box in the stored chunk."""
        return _offsets(self.storage)

    @property
    def lengths(self) -> Ints:
        """Shape of the box."""
        return self.dest.box.shape

    @property
    def is_placed(self) -> bool:
        """Whether everything about it is known, so that it can be read."""
        windows = (self.dest, self.storage)
        return (
            self.dest_index.index is not None
            and self.storage_index.offset is not None
            and all(len(window.shape) == len(window.box.shape) for window in windows)
        )

    def parts(self, max_elements: int) -> Iterator[ReadItem]:
        """The same in blocks of rows with at most so many elements each; itself if it is small."""
        if self.dest.box.num_elements <= max_elements:
            yield self
            return
        for block in split_rows(Box.whole(self.lengths), max_elements):
            yield replace(self, dest=self.dest.part(block), storage=self.storage.part(block))


def _offsets(window: Window) -> Ints:
    # A range of a flattened tensor may begin anywhere in what is stored, which has one axis too.
    return (window.start + window.box.offset[0],) if len(window.shape) == 1 else window.box.offset


def _incomplete(index: MetadataIndex, name: str, found: object) -> InvalidShardingError:
    finding = Finding(
        f"a ReadItem lacks a usable {name}",
        index.fqn,
        expected="storage_index, and for a tensor dest_offsets, storage_offsets and lengths of as "
        "many integers as the tensor has axes",
        found=found,
        remedy="Pass these by keyword.",
    )
    return InvalidShardingError("the plan of a planner cannot be used", [finding])


def _unplaced(
    kind: LoadItemType, index: MetadataIndex, name: str, offsets: Any, lengths: Any
) -> Window:
    """A window whose array is not known yet."""
    if kind is LoadItemType.BYTE_IO:
        return NOWHERE
    try:
        box = Box(tuple(map(int, offsets)), tuple(map(int, lengths)))
        if len(box.offset) == len(box.shape):
            return Window(0, (), box)
    except (TypeError, ValueError):
        pass
    raise _incomplete(index, name, (offsets, lengths))


_EXTRAS = ("planner_data", "storage_data", "storage_meta", "version")


class Metadata(Index):
    """What a checkpoint holds, and what a planner, a writer and a reader keep with it.

    It is an Index of the tensors and objects. A writer may pickle it in ``finish``, and a reader
    return it from ``read_metadata``, which is then called on every rank.

    Args:
        state_dict_metadata: for each key of a tensor anything with ``properties`` (which has a
            ``dtype``), ``size`` and ``chunks`` (each has ``offsets`` and ``sizes``), such as a
            TensorStorageMetadata of torch; for an object of one cell, anything else.
        planner_data: for a planner's own use.
        storage_data: for a storage's own use.
        storage_meta: for a storage's own use.
        version: of the format, for a storage's own use.
        columns: the fields of an Index, in place of ``state_dict_metadata``.

    Raises:
        InvalidShardingError: if a tensor has no usable ``properties``, ``size`` or ``chunks``.

    Example:
        >>> import torch
        >>> from dist_checkpointing.planning import Metadata
        >>> chunk = {"offsets": (0,), "sizes": (4,)}
        >>> tensor = {"properties": torch.float32, "size": (4,), "chunks": [chunk]}
        >>> metadata = Metadata({"w": tensor}, storage_data={"w": "w.bin"})
        >>> metadata["w"].global_shape, metadata.storage_data
        ((4,), {'w': 'w.bin'})
    """

    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: str = "1.0"

    def __init__(
        self,
        state_dict_metadata: Mapping[str, Any] | None = None,
        planner_data: Any = None,
        storage_data: Any = None,
        storage_meta: Any = None,
        version: str = "1.0",
        **columns: Any,
    ) -> None:
        if not columns:
            described = _described(state_dict_metadata or {})
            index = index_of(whole_items(RowBlockLayout()), described, main_rows(described))
            columns = {field.name: getattr(index, field.name) for field in fields(Index)}
        super().__init__(**columns)
        extras = (planner_data, storage_data, storage_meta, version)
        self.__dict__.update(zip(_EXTRAS, extras, strict=True))

    @classmethod
    def from_index(cls, index: Index) -> Metadata:
        """The same as an index; itself if it is one."""
        if isinstance(index, cls):
            return index
        metadata = cls.__new__(cls)
        metadata.__dict__.update(index.__dict__)  # with what it has worked out
        return metadata

    @classmethod
    def laid_out(
        cls, given: object, layout: Layout, announced: ShardTable, written: ShardTable
    ) -> Metadata:
        """What the checkpoint holds if every item of a user's planner is stored as one chunk.

        ``given`` is what the planner returned, whose data for its own use is kept, and ``layout``
        one of ``whole_items``. Both tables are sorted by key.

        Raises:
            CheckpointingException: if the planner returned no metadata.
        """
        if not hasattr(given, "state_dict_metadata"):
            problem = "build_global_plan must return the plans of all ranks and what they make up"
            finding = Finding(problem, None, "Metadata or Index", type(given).__name__)
            raise CheckpointingException("the plan of a planner cannot be used", [finding])
        filled = written.take(written.num_elements > 0)
        metadata = cls.from_index(index_of(layout, announced, filled))
        extras = {name: getattr(given, name) for name in _EXTRAS if hasattr(given, name)}
        metadata.__dict__.update(extras)
        return metadata

    @cached_property
    def state_dict_metadata(self) -> dict[str, Any]:
        """For each key a TensorStorageMetadata or BytesStorageMetadata of torch."""
        dcp = importlib.import_module("torch.distributed.checkpoint.metadata")
        size = torch.Size
        described: dict[str, Any] = {}
        for tensor in self.values():
            boxes = [(size(box.offset), size(box.shape)) for box, _ in tensor.parts()]
            described[tensor.key] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=tensor.dtype.torch),
                size(tensor.global_shape),
                [dcp.ChunkStorageMetadata(*box) for box in boxes],
            )
        return described | {key: dcp.BytesStorageMetadata() for key in self.objects}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in _EXTRAS}


def _described(state_dict_metadata: Mapping[str, Any]) -> ShardTable:
    """The chunks of tensors and the cells of objects as a table, sorted by key."""
    items: list[WriteItem] = []
    for key, described in state_dict_metadata.items():
        chunks = _part_of(described, "chunks")
        if chunks is None:
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            continue
        rest = {name: _part_of(described, name) for name in ("properties", "size")}
        if not chunks and rest["size"] is not None:  # a tensor without elements
            chunks = [Box.whole(tuple(rest["size"]))]
        for chunk in chunks:
            data: Any = {**rest, "chunk": chunk}
            items.append(WriteItem(MetadataIndex(key), WriteItemType.TENSOR, data))
    return concatenate([SavePlan(items).table])
