"""How a stored tensor is told in zarr v3's own words: names and ``zarr.json`` of its nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.file_names import disk_name, disk_names
from dist_checkpointing.format.geometry import (
    Ints,
    Pieces,
    padded_rows,
    renumbered,
    rows_from_lists,
)
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.tensor_memory import DType
from dist_checkpointing.planning.load_plan import ReadTable, stored_ranges
from dist_checkpointing.planning.shard_table import ShardTable

METADATA_NAME = "zarr.json"
_ATTRIBUTE = "dist_checkpointing"
Node = dict[str, Any]


def chunk_name(index: Ints) -> str:
    """File name of a chunk: one flat folder an array, no tree of directories."""
    return ".".join(("c", *map(str, index)))


def piece_name(offset: Sequence[int], start: int) -> str:
    """Name of the array that holds one piece; ``start`` is that of its flattened range, or -1."""
    name = ".".join(("piece", *map(str, offset)))
    return name if start < 0 else f"{name}-{start}"


def padded_chunk(array: npt.NDArray[Any], shape: Ints) -> npt.NDArray[Any]:
    """A chunk at the edge of a tensor in its full size, with zeros behind the edge."""
    whole = np.zeros(shape, dtype=array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole


class ChunkNames(NamedTuple):
    """How the files of chunks are named: folders of keys, and the name of a chunk in its folder."""

    folders: Callable[[list[str]], list[str]] = disk_names
    chunk: Callable[[Ints], str] = chunk_name


def chunk_keys(table: ReadTable | ShardTable, index: Index, naming: ChunkNames) -> list[str]:
    """Paths below the checkpoint of the chunks and pieces of all rows, which are all tensors."""
    if isinstance(table, ShardTable):
        offsets, flat_starts = table.offsets, table.flat[:, 0]
    else:
        offsets, flat_starts = table.chunk_offsets, stored_ranges(table, index)[:, 0]
    (used, (keys,)), width = renumbered(len(table.names), table.keys), offsets.shape[1]
    names = [table.names[number] for number in used]
    _, shapes = index.shapes_of(names)
    chunks = padded_rows([shape or () for shape in shapes], 1, width)[:, :width]
    has_grid = np.array([shape is not None for shape in shapes], dtype=np.bool_)
    folders, on_grid, numbers = naming.folders(names), has_grid[keys], offsets // chunks[keys]
    is_first = on_grid & ~numbers.any(axis=1)
    ndim = table.ndim.tolist()
    ends = {axes: "/" + naming.chunk((0,) * axes) for axes in {*ndim}}
    found = [folders[key] + ends[axes] for key, axes in zip(keys.tolist(), ndim, strict=True)]
    for row in np.flatnonzero(~is_first).tolist():
        folder, axes = folders[int(keys[row])], ndim[row]
        if on_grid[row]:
            found[row] = f"{folder}/{naming.chunk(tuple(numbers[row, :axes].tolist()))}"
        else:
            start = int(flat_starts[row])
            name = piece_name(offsets[row, :axes].tolist(), start)
            found[row] = f"{folder}/{name}{ends[axes] if start < 0 else '/c.0'}"
    return found


def object_key(key: str, cell: Sequence[int], shape: Sequence[int]) -> bytes:
    """The key of one cell of a sharded object with a grid of this shape, in a database."""
    numbers = "_".join(".".join(map(str, numbers)) for numbers in (cell, shape))
    return f"{disk_name(key)}/shard_{numbers}".encode()


def row_keys(table: ShardTable | ReadTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a plan, in a database."""
    chunks = map(str.encode, chunk_keys(table.take(~table.is_object), index, ChunkNames()))
    if not table.is_object.any():
        return list(chunks)
    cells = table.offsets if isinstance(table, ShardTable) else table.chunk_offsets
    names = [table.names[key] for key in table.keys.tolist()]
    shapes = index.objects
    return [
        object_key(name, cell[: len(shapes[name])], shapes[name]) if is_object else next(chunks)
        for is_object, name, cell in zip(
            table.is_object.tolist(), names, cells.tolist(), strict=True
        )
    ]


# The level and the other parameters matter to the writer only; any reader decodes all of them.
CODECS: Final[dict[str, dict[str, Any]]] = {
    "zstd": {"level": 3, "checksum": False},
    "gzip": {"level": 5},
    "blosc": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"},
}


def array_json(
    shape: Ints,
    chunk: Ints,
    dtype: DType,
    codec: str | None = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Node:
    """``zarr.json`` of an array whose chunks are compressed by this codec."""
    configuration: dict[str, Any] = {} if codec is None else dict(CODECS[codec])
    if codec == "blosc":
        configuration |= {"typesize": dtype.itemsize, "blocksize": 0}
    codecs = [] if codec is None else [{"name": codec, "configuration": configuration}]
    to_bytes: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        to_bytes["configuration"] = {"endian": "little"}
    fill: Any = 0
    if dtype.name == "bool":
        fill = False
    elif dtype.name.startswith("complex"):
        fill = [0.0, 0.0]
    elif dtype.name == "float8_e8m0fnu":
        fill = 1.0  # it has no zero
    elif "float" in dtype.name:
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [to_bytes, *codecs],
        "attributes": dict(attributes),
    }


def node_texts(
    index: Index, codec: str | None = None, indent: int | None = None, rows: slice = slice(None)
) -> Iterator[tuple[str, str]]:
    """Path and text of the ``zarr.json`` of all arrays and groups of some tensors."""
    keys, shapes = index.keys_column, (index.global_shape_column, index.chunk_shape_column)
    columns = (disk_names(keys[rows]), *(c[rows] for c in (keys, index.dtype_column, *shapes)))
    for name, key, dtype, shape, chunk in zip(*columns, strict=True):
        if chunk is not None and name == key:
            text = _array_text(tuple(shape), tuple(chunk), dtype, codec, indent)
            yield f"{name}/{METADATA_NAME}", text
            continue
        tensor = index[key]
        yield f"{name}/{METADATA_NAME}", _text(top_node(tensor, codec), indent)
        for piece, own in piece_arrays(tensor):
            text = _array_text(own, own, dtype, codec, indent)
            yield f"{name}/{piece}/{METADATA_NAME}", text


@lru_cache(maxsize=1 << 12)
def _array_text(shape: Ints, chunk: Ints, dtype: str, codec: str | None, indent: int | None) -> str:
    # Thousands of tensors share a few shapes.
    return _text(array_json(shape, chunk, tensor_memory.from_name(dtype), codec), indent)


def _text(node: Node, indent: int | None) -> str:
    return json.dumps(node, indent=indent, separators=(",", ":" if indent is None else ": "))


def piece_arrays(tensor: StoredTensor) -> Iterator[tuple[str, Ints]]:
    """Name and shape of the array of each piece of a tensor."""
    if tensor.pieces is not None:
        columns = (tensor.pieces.offsets, tensor.pieces.shapes, tensor.pieces.flat)
        for offset, shape, (start, stop) in zip(*(c.tolist() for c in columns), strict=True):
            yield piece_name(offset, start), tuple(shape) if start < 0 else (stop - start,)


def top_node(tensor: StoredTensor, codec: str | None = None) -> Node:
    """``zarr.json`` of the array of a tensor, or of the group of its pieces."""
    ours: Node = {} if unquote(disk_name(tensor.key)) == tensor.key else {"key": tensor.key}
    if tensor.pieces is None:
        grid, attributes = tensor.grid, {_ATTRIBUTE: ours} if ours else {}
        return array_json(grid.global_shape, grid.chunk_shape, tensor.dtype, codec, attributes)
    ours |= {
        "global_shape": list(tensor.global_shape),
        "data_type": tensor.dtype.name,
        "offsets": tensor.pieces.offsets.tolist(),
        "shapes": tensor.pieces.shapes.tolist(),
        "flat": tensor.pieces.flat.tolist(),
    }
    return group_json({_ATTRIBUTE: ours})


def group_json(attributes: Mapping[str, Any]) -> Node:
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def parse(name: str, node: Mapping[str, Any]) -> StoredTensor:
    """The tensor that the top node ``name`` describes; the inverse of ``node_texts``."""
    ours = node.get("attributes", {}).get(_ATTRIBUTE, {})
    key = ours.get("key", unquote(name))
    if node["node_type"] == "array":
        chunk = tuple(node["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = tensor_memory.from_name(node["data_type"])
        return StoredTensor(key, dtype, tuple(node["shape"]), chunk)
    columns = (ours[name] for name in ("offsets", "shapes", "flat"))
    pieces = Pieces.checked(*map(rows_from_lists, columns))
    dtype = tensor_memory.from_name(ours["data_type"])
    return StoredTensor(key, dtype, tuple(ours["global_shape"]), None, pieces)
