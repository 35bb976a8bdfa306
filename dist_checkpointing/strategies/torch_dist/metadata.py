"""``.metadata``: its pickle read safely and written, as an index with the place of every part;
Megatron's form of flattened tensors.

A tensor of global shape ``[X, Y]`` whose boxes of shape ``[x, y]`` are flattened becomes one of
shape ``[X/x, Y/y, x*y]``; elements ``a .. b`` of the box at ``[i*x, j*y]`` are its chunk at
``[i, j, a]`` with shape ``[1, 1, b-a]``.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata as dcp

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import require_file_name
from dist_checkpointing.format.foreign_formats import COMMON_STATE_FNAME
from dist_checkpointing.format.geometry import MAX_AXES, Box, Ints, Pieces, ravel_offset
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.mapping import ShardedObject, tensor_memory
from dist_checkpointing.planning import MetadataIndex, ReadTable
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.strategies.base import object_cells
from dist_checkpointing.strategies.pickle_scanner import BadPickle, check_pickle
from dist_checkpointing.threads import paused_collector


def common_box_shape(tensor: StoredTensor) -> Ints | None:
    """The shape of the boxes of a tensor that can be stored in this way; None if it cannot.

    It can if all of it is flattened and the boxes divide it evenly.
    """
    pieces = tensor.pieces
    if pieces is None or not len(pieces) or (pieces.flat[:, 0] < 0).any():
        return None
    shape = pieces.shapes[0]
    whole = np.array(tensor.global_shape, dtype=np.int64)
    even = (pieces.shapes == shape).all() and not (pieces.offsets % shape).any()
    return tuple(shape.tolist()) if even and not (whole % shape).any() else None


def flattened_chunk(box: Box, flat: tuple[int, int]) -> Box:
    """The box of a piece in the tensor as stored."""
    index = tuple(o // n for o, n in zip(box.offset, box.shape, strict=True))
    return Box((*index, flat[0]), (*(1 for _ in index), flat[1] - flat[0]))


def piece_of_chunk(global_shape: Ints, size: Ints, chunk: Box) -> tuple[Box, tuple[int, int]]:
    """The box and flat range that a stored chunk is."""
    *counts, num_elements = size or (0,)
    uneven = len(counts) != len(global_shape) or 0 in counts
    if uneven or any(n % c for n, c in zip(global_shape, counts, strict=True)):
        raise ValueError(f"a tensor of shape {global_shape} flattened into {size}")
    shape = tuple(n // c for n, c in zip(global_shape, counts, strict=True))
    if math.prod(shape) != num_elements or chunk.shape[:-1] != (1,) * len(shape):
        raise ValueError(f"a chunk of shape {chunk.shape} in {global_shape} flattened into {size}")
    offset = tuple(i * n for i, n in zip(chunk.offset, shape, strict=False))
    return Box(offset, shape), (chunk.offset[-1], chunk.stop[-1])


_MAX_METADATA_BYTES = 1 << 33
_MAX_EXTENT = 1 << 62
Chunk = tuple[Ints, Ints]
"""Offsets and sizes of a stored part of a tensor."""
At = tuple[str, Ints | None]
"""What is stored at one place: a chunk by key and offsets, or the value of a key."""
StatePath = tuple[str | int, ...]
"""Keys and positions that lead to a value in a nested state dict."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor as DCP knows it, with the offsets and sizes of every part that is stored.

    One that was saved flattened has axes of Megatron's own in ``size``.
    """

    dtype: torch.dtype
    size: Ints
    chunks: tuple[Chunk, ...]
    flattened_from: Ints | None = None


class Place(NamedTuple):
    """Where a record is: bytes ``offset .. offset + length`` of a file in the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a checkpoint holds, as ``.metadata`` says it: tensors, and keys of all other values.

    Paths are those of keys in the nested state dict, as far as DCP noted them.
    """

    tensors: Mapping[str, DcpTensor]
    values: tuple[str, ...]
    places: Mapping[At, Place]
    paths: Mapping[str, StatePath] = field(default_factory=dict)

    def without_tensors(self, prefix: str) -> DcpMetadata:
        gone = {key for key in self.tensors if key.startswith(prefix)}
        return replace(
            self,
            tensors={key: t for key, t in self.tensors.items() if key not in gone},
            places={at: place for at, place in self.places.items() if at[0] not in gone},
            paths={key: path for key, path in self.paths.items() if key not in gone},
        )


def read_dcp_metadata(folder: Location) -> DcpMetadata:
    """What the checkpoint in ``folder`` holds.

    Raises:
        CorruptCheckpointError: if ``.metadata`` is missing or damaged.
        UnsupportedFormatError: if it wants a class that is not DCP's or Megatron's, or holds
            something that is not read.
    """
    path = folder / DCP_METADATA_NAME
    if not location.is_file(path):
        finding = Finding("missing", path=str(path), remedy="Restore it, or use another one.")
        raise CorruptCheckpointError("the checkpoint has no metadata", [finding])
    data = location.read_bytes(path, _MAX_METADATA_BYTES)
    unpickler = _Unpickler(data)
    try:
        # Nothing that is made of it is garbage before it ends.
        with paused_collector():
            check_pickle(data)
            parsed = _parse(unpickler.load(), str(path))
    except Exception as error:  # whatever a damaged pickle makes it raise
        if not unpickler.foreign:
            if isinstance(error, CheckpointingException):
                raise
            what = "refused to unpickle" if isinstance(error, BadPickle) else type(error).__name__
            raise _corrupt(f"{what}: {error}", str(path)) from error
    if unpickler.foreign:
        finding = Finding(
            "the file wants to use what is no part of DCP's metadata",
            found=", ".join(sorted(unpickler.foreign)),
            path=str(path),
            remedy="Save it again without, or use another checkpoint.",
        )
        raise UnsupportedFormatError("refused to unpickle", [finding])
    return parsed


def _corrupt(problem: str, path: str) -> CorruptCheckpointError:
    finding = Finding(problem, path=path, remedy="Use another checkpoint, or restore this file.")
    return CorruptCheckpointError("the metadata of the checkpoint cannot be read", [finding])


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS = "Path PosixPath PurePath PurePosixPath WindowsPath"
_KNOWN = {
    (module, name)
    for module, names in {
        f"{_DCP}.metadata": (
            "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata "
            "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING StorageMeta"
        ),
        f"{_DCP}.planner": "WriteItem WriteItemType TensorWriteData BytesIOWriteData SavePlan",
        f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
        # Until PyTorch 2.3.
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
        _MEGATRON: "MCoreMetadata MCoreSavePlan",
        "torch.serialization": "_get_layout",
        # How Python 3.11.0 to 3.11.3 names a member of an enum; never called.
        "builtins": "getattr",
        "pathlib": _PATHS,
        "pathlib._local": _PATHS,
    }.items()
    for name in names.split()
}
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
_METADATA_CLASSES = {(f"{_DCP}.metadata", "Metadata"), (_MEGATRON, "MCoreMetadata")}


class _Object:
    """Stands for an object of a class that the pickle names: its state."""

    origin: tuple[str, str] = ("", "")
    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Take any arguments; those of dtypes and enums do not matter."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of DCP metadata and runs nothing that it names.

    Every class in it becomes a stub that is made for this one pickle, so that a hostile one cannot
    change a class of ours or PyTorch's either.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.foreign: set[str] = set()
        self._stubs: dict[tuple[str, str], type[_Object]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        if (module, name) not in _KNOWN:
            # Go on, to name all of them; one stub serves for them, because a class takes 1 KiB.
            self.foreign.add(f"{module}.{name}")
            module = name = ""
        if (module, name) not in self._stubs:
            self._stubs[module, name] = type("Stub", (_Object,), {"origin": (module, name)})
        return self._stubs[module, name]


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, _Object) or value.origin[1] != name:
        raise ValueError(f"expected a {name}, found {type(value).__name__}")
    if not isinstance(value.state, dict | None):
        raise TypeError(f"a {name} without fields")
    return value.state or {}


def _ints(values: Any) -> Ints:
    # type() and not isinstance(): True is an int to Python.
    if not isinstance(values, tuple | list) or not all(
        type(v) is int and 0 <= v < _MAX_EXTENT for v in values
    ):
        raise ValueError(f"expected numbers >= 0, found {values!r}")
    if len(values) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, found {len(values)}")
    return tuple(values)


def _parse(content: Any, path: str) -> DcpMetadata:
    if not isinstance(content, _Object) or content.origin not in _METADATA_CLASSES:
        raise _corrupt("not the metadata of a DCP checkpoint", path)
    fields = _fields(content, content.origin[1])
    special = fields.get("mcore_data") or {}
    tensors: dict[str, DcpTensor] = {}
    values: list[str] = []
    for key, entry in fields["state_dict_metadata"].items():
        if type(key) is not str or not isinstance(entry, _Object):
            raise ValueError(f"entry {key!r} is no tensor and no value")
        if entry.origin[1] == "BytesStorageMetadata":
            values.append(key)
            continue
        try:
            tensors[key] = _tensor(key, entry, special.get(key) or {})
        except Exception as error:
            raise ValueError(f"{key!r}: {type(error).__name__}: {error}") from error
    places = _places(fields["storage_data"], path)
    return DcpMetadata(tensors, tuple(values), places, _paths(fields.get("planner_data")))


def _tensor(key: str, entry: _Object, special: Any) -> DcpTensor:
    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key!r} has no dtype")
    size = _ints(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        place = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _ints(place["offsets"]), _ints(place["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(
            o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{key!r} has a chunk at {offsets} of {sizes} in {size}")
        chunks.append((offsets, sizes))
    whole = special.get("nd_reformulated_orig_global_shape")
    return DcpTensor(dtype, size, tuple(chunks), None if whole is None else _ints(whole))


def _places(stored: Any, path: str) -> dict[At, Place]:
    places: dict[At, Place] = {}
    findings: dict[str, Finding] = {}
    for at, info in stored.items():
        index, where = _fields(at, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, file = index["fqn"], where["relative_path"]
        offset, length = _ints((where["offset"], where["length"]))
        if type(key) is not str:
            raise TypeError(f"{key!r} is no key")
        chunk = index.get("offset")
        place = Place(require_file_name(file), offset, length)
        places[key, None if chunk is None else _ints(chunk)] = place
        if encoding := where.get("transform_descriptors"):
            problem = "stored through an extension that is not read"
            findings[key] = Finding(problem, key, found=list(encoding), path=path)
    if findings:
        raise UnsupportedFormatError("the checkpoint is encoded", list(findings.values()))
    return places


def _paths(planner_data: Any) -> dict[str, StatePath]:
    """The paths that DCP's default planner leaves; another planner may have left anything."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if type(key) is str
        and isinstance(path, tuple)
        and path
        and all(type(step) is str or (type(step) is int and step >= 0) for step in path)
    }


COMMON_STATE_CELL = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Where Megatron-Core keeps the common state since 0.19, when it has no ``common.pt``."""


@dataclass(frozen=True, eq=False)
class PlacedIndex(Index):
    """An index that also knows where every chunk is, so that only rank 0 reads ``.metadata``.

    ``places`` are position in ``files``, offset and length in bytes. Those of a tensor or an object
    follow its first row, in the order of the grid or of the pieces.
    """

    files: Sequence[str] = ()
    places: Int64s = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    first_row: Mapping[str, int] = field(default_factory=dict)
    first_cell: Mapping[str, int] = field(default_factory=dict)

    def cell_row(self, key: str, cell: Ints) -> int:
        shape = self.objects[key]
        # Of a cell that is not in the grid numpy says so.
        return self.first_cell[key] + (int(np.ravel_multi_index(cell, shape)) if shape else 0)

    def row(self, chunk: MetadataIndex) -> int:
        if chunk.fqn in self.objects:
            return self.cell_row(chunk.fqn, chunk.offset or ())
        tensor, first = self[chunk.fqn], self.first_row[chunk.fqn]
        if tensor.pieces is not None:
            assert chunk.index is not None
            return first + chunk.index
        assert chunk.offset is not None
        return first + ravel_offset(tensor.grid.index_at(chunk.offset), tensor.grid.counts)

    def records(self, table: ReadTable) -> Int64s:
        """The rows of the stored chunks and cells that the rows of a load plan read."""
        firsts = [self.first_row.get(key, 0) for key in table.names]
        found = np.array(firsts, dtype=np.int64)[table.keys] + np.maximum(table.pieces, 0)
        # What begins at the origin is the first chunk.
        later = (table.pieces < 0) & table.chunk_offsets.any(axis=1)
        for row in np.flatnonzero(table.is_object | later).tolist():
            chunk, is_cell = table.chunk(row), table.is_object[row]
            cell = chunk.offset or ()
            found[row] = self.cell_row(chunk.fqn, cell) if is_cell else self.row(chunk)
        return found

    def place(self, row: int) -> Place:
        file, offset, length = self.places[row].tolist()
        return Place(self.files[file], offset, length)


@paused_collector()
def placed_index(metadata: DcpMetadata, folder: Location) -> PlacedIndex:
    """What ``.metadata`` says, as an index.

    Raises:
        CorruptCheckpointError: if it contradicts itself.
        UnsupportedFormatError: if it holds a dtype that is not read.
    """
    path, places = str(folder / DCP_METADATA_NAME), metadata.places
    known = {row.torch for row in tensor_memory.DTYPES}
    unknown = [
        Finding("unknown stored dtype", key, found=tensor.dtype, path=path)
        for key, tensor in metadata.tensors.items()
        if tensor.dtype not in known
    ]
    UnsupportedFormatError.raise_if(unknown, "the checkpoint holds dtypes we cannot read")
    tensors: list[StoredTensor] = []
    rows: list[Place] = []
    first_row: dict[str, int] = {}
    first_cell: dict[str, int] = {}
    findings: list[Finding] = []
    for key in sorted(metadata.tensors):
        first_row[key] = len(rows)
        try:
            tensor, chunks = _stored(key, metadata.tensors[key])
            rows += [places[key, offset] for offset in chunks]
            tensors.append(tensor)
        except KeyError as error:
            findings.append(Finding("a chunk is stored nowhere", key, found=error, path=path))
        except ValueError as error:
            findings.append(Finding(str(error), key, path=path))
    is_common = not location.is_file(folder / COMMON_STATE_FNAME)
    # A value whose name is not that of a cell is one that plain DCP saved: common state.
    cells: dict[str, list[Ints]] = {}
    for name in metadata.values:
        leaf = None if is_common and name == COMMON_STATE_CELL else cell_named(name)
        if leaf is not None:
            cells.setdefault(leaf.key, []).append(tuple(leaf.global_shape))
    objects = {key: shapes[0] for key, shapes in sorted(cells.items())}
    for key, shape in objects.items():
        first_cell[key] = len(rows)
        shapes = set(cells[key])
        if len(shapes) > 1 or math.prod(shape) != len(cells[key]):
            found = f"{len(cells[key])} cells of {sorted(shapes)}"
            findings.append(Finding("not every cell once", key, found=found, path=path))
            continue
        names = [cell.unique_key for cell in object_cells({key: shape})]
        lost = [name for name in names if (name, None) not in places]
        findings += [Finding("an object is stored nowhere", name, path=path) for name in lost]
        rows += [places[name, None] for name in names if not lost]
    CorruptCheckpointError.raise_if(findings, "the metadata of the checkpoint contradicts itself")
    files: dict[str, int] = {}
    table = [(files.setdefault(row.file, len(files)), *row[1:]) for row in rows]
    plain = Index.of(tensors, objects)
    return PlacedIndex(
        **plain.__getstate__(),
        files=tuple(files),
        places=np.array(table, dtype=np.int64).reshape(-1, 3),
        first_row=first_row,
        first_cell=first_cell,
    )


def dcp_tensor(stored: StoredTensor, chunks: Iterable[Chunk]) -> DcpTensor:
    """A tensor of an index as DCP knows it, see ``chunk_of_part``."""
    box_shape, shape = common_box_shape(stored), stored.global_shape
    if box_shape is None:
        return DcpTensor(stored.dtype.torch, shape, tuple(chunks))
    counts = tuple(whole // own for whole, own in zip(shape, box_shape, strict=True))
    return DcpTensor(stored.dtype.torch, (*counts, math.prod(box_shape)), tuple(chunks), shape)


def _stored(key: str, tensor: DcpTensor) -> tuple[StoredTensor, list[Ints]]:
    """A tensor, and the offsets by which DCP knows its chunks, in the order of the index."""
    dtype = tensor_memory.from_torch(tensor.dtype)
    # Some writers list empty chunks; they hold nothing and may share the offset of a real one.
    chunks = [(offsets, sizes) for offsets, sizes in tensor.chunks if 0 not in sizes]
    shape = tensor.size
    if tensor.flattened_from is None:
        if 0 in shape:
            return StoredTensor.undivided(key, dtype, shape), []
        if (grid := _grid_order(shape, chunks)) is not None:
            return StoredTensor(key, dtype, shape, grid[0]), [chunks[i][0] for i in grid[1]]
        parts: list[Any] = [(Box(*chunk), None) for chunk in chunks]
    else:
        shape = tensor.flattened_from
        parts = [piece_of_chunk(shape, tensor.size, Box(*chunk)) for chunk in chunks]
    stored = StoredTensor(key, dtype, shape, None, Pieces.of(len(shape), parts))
    return stored, [offsets for offsets, _ in chunks]


def _grid_order(shape: Ints, chunks: Sequence[Chunk]) -> tuple[Ints, Iterable[int]] | None:
    """The chunk shape and the positions of the chunks in order of the grid, if they make one."""
    if len(chunks) == 1 and chunks[0][1] == shape:
        return shape, (0,)
    if not chunks or not shape:
        return None
    offsets, sizes = np.array(chunks, dtype=np.int64).swapaxes(0, 1)
    chunk, whole = sizes.max(axis=0), np.array(shape, dtype=np.int64)
    fits = not (offsets % chunk).any() and (sizes == np.minimum(chunk, whole - offsets)).all()
    _, order = np.unique(offsets, axis=0, return_index=True)
    if fits and len(order) == len(chunks) == math.prod((-(-whole // chunk)).tolist()):
        return tuple(chunk.tolist()), order.tolist()
    return None


def cell_named(name: str) -> ShardedObject | None:
    """The cell of a sharded object that a name means; None if it is a name of another kind."""
    try:
        leaf = ShardedObject.empty_from_unique_key(name)
    except InvalidShardingError:
        return None
    inside = all(0 <= i < n for i, n in zip(leaf.global_offset, leaf.global_shape, strict=True))
    # A number may be written in several ways, but a cell has one name.
    return leaf if inside and leaf.unique_key == name else None


DCP_VERSION = "1.0.0"
_PROTOCOL = 4  # what Megatron writes; every Python that PyTorch 2 runs on reads it


@paused_collector()
def to_pickle(metadata: DcpMetadata) -> bytes:
    """The bytes of ``.metadata``."""
    dtypes = {tensor.dtype for tensor in metadata.tensors.values()}
    properties = {dtype: dcp.TensorProperties(dtype=dtype) for dtype in dtypes}
    entries: dict[str, Any] = {
        key: dcp.TensorStorageMetadata(
            properties[tensor.dtype],
            torch.Size(tensor.size),
            [dcp.ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in tensor.chunks],
        )
        for key, tensor in metadata.tensors.items()
    }
    entries |= {key: dcp.BytesStorageMetadata() for key in metadata.values}
    index_of, info_of = dcp.MetadataIndex, filesystem._StorageInfo  # noqa: SLF001 - DCP's readers expect it
    content = dcp.Metadata(
        entries,
        # DCP's own tools (dcp_to_torch_save, partial loads) ask where each key belongs.
        planner_data={key: metadata.paths.get(key, (key,)) for key in entries},
        storage_data={index_of(*at): info_of(*place) for at, place in metadata.places.items()},
        storage_meta=dcp.StorageMeta(),
    )
    content.version = DCP_VERSION  # before torch 2.9 it is no field
    # An attribute and not a class of its own: readers without Megatron know only DCP's classes.
    special = "nd_reformulated_orig_global_shape"
    content.mcore_data = {  # type: ignore[attr-defined]
        key: {} if tensor.flattened_from is None else {special: tensor.flattened_from}
        for key, tensor in metadata.tensors.items()
    }
    return pickle.dumps(content, _PROTOCOL)
