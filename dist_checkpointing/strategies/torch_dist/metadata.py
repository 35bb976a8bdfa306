"""``.metadata``: what a torch DCP checkpoint says it holds, read without trusting its pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import MAX_AXES
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.strategies.pickle_guard import BadPickle, check_pickle

_MAX_METADATA_BYTES = 1 << 33
_MAX_EXTENT = 1 << 62

StatePath = tuple[str | int, ...]
"""Keys and positions that lead to a value in a nested state dict."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor as DCP knows it, with the offsets and sizes of every part that is stored.

    One that was saved flattened has axes of Megatron's own in ``size``.
    """

    dtype: torch.dtype
    size: Ints
    chunks: tuple[tuple[Ints, Ints], ...]
    flattened_from: Ints | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is: bytes ``offset .. offset + length`` of a file in the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a checkpoint holds, as ``.metadata`` says it: tensors, and keys of all other values.

    Places are those of every chunk ``(key, offsets)`` and value ``(key, None)``; paths are those of
    keys in the nested state dict, as far as DCP noted them.
    """

    tensors: Mapping[str, DcpTensor]
    values: tuple[str, ...]
    places: Mapping[tuple[str, Ints | None], Place]
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
    content = _unpickle(location.read_bytes(path, _MAX_METADATA_BYTES), str(path))
    try:
        return _parse(content, str(path))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise _corrupt(f"{type(error).__name__}: {error}", str(path)) from error


def _corrupt(problem: str, path: str) -> CorruptCheckpointError:
    finding = Finding(problem, path=path, remedy="Use another checkpoint, or restore this file.")
    return CorruptCheckpointError("the metadata of the checkpoint cannot be read", [finding])


# The pickle.

_DCP = "torch.distributed.checkpoint"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"  # until PyTorch 2.3
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA_CLASSES = frozenset({(f"{_DCP}.metadata", "Metadata"), (_MEGATRON, "MCoreMetadata")})
_KNOWN = _METADATA_CLASSES | {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
        )
    ),
    *(
        (f"{_DCP}.planner", name)
        for name in (
            "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData", "SavePlan",
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.filesystem", "_StoragePrefix"),
    (_SHARDS, "TensorProperties"),
    (_SHARDS, "MEM_FORMAT_ENCODING"),
    (_MEGATRON, "MCoreSavePlan"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # how Python 3.11.0 to 3.11.3 names a member of an enum; never called
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")
    ),
}  # fmt: skip


class _Object:
    """Stands for an object of a class that the pickle names: what it was made of, and its state."""

    origin: tuple[str, str] = ("", "")
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

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
        if (module, name) == ("torch", "Size"):
            return tuple
        value = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) not in _KNOWN:
            # Go on, to name all of them.
            self.foreign.add(f"{module}.{name}")
        if (module, name) not in self._stubs:
            self._stubs[module, name] = type("Stub", (_Object,), {"origin": (module, name)})
        return self._stubs[module, name]


def _unpickle(data: bytes, path: str) -> _Object:
    try:
        check_pickle(data)
    except BadPickle as error:
        raise _corrupt(f"refused to unpickle: {error}", path) from error
    unpickler = _Unpickler(data)
    damage: Exception | None = None
    content = None
    try:
        content = unpickler.load()
    except Exception as error:  # noqa: BLE001 - whatever a damaged pickle makes it raise
        damage = error
    if unpickler.foreign:
        finding = Finding(
            "the file wants to use what is no part of DCP's metadata",
            found=", ".join(sorted(unpickler.foreign)),
            path=path,
            remedy="Save it again without, or use another checkpoint.",
        )
        raise UnsupportedFormatError("refused to unpickle", [finding])
    if damage is not None:
        raise _corrupt(f"{type(damage).__name__}: {damage}", path) from damage
    if not isinstance(content, _Object) or content.origin not in _METADATA_CLASSES:
        raise _corrupt("not the metadata of a DCP checkpoint", path)
    return content


# What it says.


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, _Object) or value.origin[1] != name:
        raise ValueError(f"expected a {name}, found {type(value).__name__}")
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise TypeError(f"a {name} without fields")
    return value.state


def _ints(values: Any) -> Ints:
    # type() and not isinstance(): True is an int to Python.
    if not isinstance(values, tuple | list) or not all(
        type(v) is int and 0 <= v < _MAX_EXTENT for v in values
    ):
        raise ValueError(f"expected numbers >= 0, found {values!r}")
    if len(values) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, found {len(values)}")
    return tuple(values)


def _parse(content: _Object, path: str) -> DcpMetadata:
    fields = content.state
    if not isinstance(fields, dict):
        raise TypeError("metadata without fields")
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
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(f"{key!r}: {type(error).__name__}: {error}") from error
    places, packed = _places(fields["storage_data"])
    if packed:
        findings = [
            Finding("stored through an extension that is not read", key, found=names, path=path)
            for key, names in packed.items()
        ]
        raise UnsupportedFormatError("the checkpoint is encoded", findings)
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


def _places(
    stored: Any,
) -> tuple[dict[tuple[str, Ints | None], Place], dict[str, list[Any]]]:
    places: dict[tuple[str, Ints | None], Place] = {}
    packed: dict[str, list[Any]] = {}
    for at, info in stored.items():
        index, where = _fields(at, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, file = index["fqn"], where["relative_path"]
        offset, length = _ints((where["offset"], where["length"]))
        if type(key) is not str or type(file) is not str or not _is_inside(file):
            raise ValueError(f"{key!r} is stored in {file!r}, which is no file of a checkpoint")
        chunk = index.get("offset")
        places[key, None if chunk is None else _ints(chunk)] = Place(file, offset, length)
        if where.get("transform_descriptors"):
            packed[key] = list(where["transform_descriptors"])
    return places, packed


def _is_inside(file: str) -> bool:
    path = Path(file)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file
    )


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
