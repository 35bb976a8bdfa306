"""How a stored tensor is told in zarr v3's own words: names and ``zarr.json`` of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import numpy as np

from dist_checkpointing.format.file_names import disk_name, disk_names
from dist_checkpointing.format.geometry import Ints, Pieces, padded_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.tensor_memory import DType
from dist_checkpointing.planning.load_plan import ReadTable, stored_ranges
from dist_checkpointing.planning.shard_table import Int32s, Int64s, ShardTable

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


def chunk_keys(
    index: Index,
    names: Sequence[str],
    keys: Int32s,
    ndim: Int32s,
    offsets: Int64s,
    flat_starts: Int64s,
) -> list[str]:
    """Paths below the checkpoint of many chunks and pieces, as columns of a table of a plan.

    Offsets are those of the chunks, or of the boxes of the pieces, ``[chunks, axes]``; the start of
    a flattened range is -1 where there is none.
    """
    width, used = offsets.shape[1], np.flatnonzero(np.bincount(keys, minlength=len(names)))
    used_names = [names[number] for number in used.tolist()]
    _, chunk_shapes = index.shapes_of(used_names)
    chunks = np.ones((len(names), width), dtype=np.int64)
    chunks[used] = padded_rows([shape or () for shape in chunk_shapes], 1, width)[:, :width]
    has_grid = np.zeros(len(names), dtype=np.bool_)
    has_grid[used] = [shape is not None for shape in chunk_shapes]
    folders = dict(zip(used.tolist(), disk_names(used_names), strict=True))
    on_grid, numbers = has_grid[keys], offsets // chunks[keys]
    is_first = on_grid & ~numbers.any(axis=1)
    ends = ["/" + chunk_name((0,) * axes) for axes in range(int(ndim.max(initial=0)) + 1)]
    rows = zip(keys.tolist(), ndim.tolist(), strict=True)
    found = [folders[key] + ends[axes] for key, axes in rows]
    for row in np.flatnonzero(~is_first).tolist():
        folder, axes = folders[int(keys[row])], int(ndim[row])
        if on_grid[row]:
            found[row] = f"{folder}/{chunk_name(tuple(numbers[row, :axes].tolist()))}"
        else:
            start = int(flat_starts[row])
            name = piece_name(offsets[row, :axes].tolist(), start)
            found[row] = f"{folder}/{name}{ends[axes] if start < 0 else '/c.0'}"
    return found


def chunk_keys_to_read(table: ReadTable, index: Index) -> list[str]:
    """Paths of the chunks of all rows of a load plan, which are all tensors."""
    starts = stored_ranges(table, index)[:, 0]
    return chunk_keys(index, table.names, table.keys, table.ndim, table.chunk_offsets, starts)


def chunk_keys_to_write(table: ShardTable, index: Index) -> list[str]:
    """Paths of the chunks of all rows of a save plan, which are all tensors."""
    starts = table.flat[:, 0]
    return chunk_keys(index, table.names, table.keys, table.ndim, table.offsets, starts)


def array_json(
    shape: Ints,
    chunk: Ints,
    dtype: DType,
    codecs: Sequence[Node] = (),
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Node:
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


def nodes_of(tensor: StoredTensor, codecs: Sequence[Node] = ()) -> dict[str, Node]:
    """Path below the checkpoint -> content of ``zarr.json``, for all nodes of a tensor."""
    name = disk_name(tensor.key)
    nodes = {name: top_node(tensor, codecs)}
    for own_name, shape in piece_arrays(tensor):
        nodes[f"{name}/{own_name}"] = array_json(shape, shape, tensor.dtype, codecs)
    return nodes


def piece_arrays(tensor: StoredTensor) -> Iterator[tuple[str, Ints]]:
    """Name and shape of the array of each piece of a tensor."""
    if tensor.pieces is not None:
        columns = (tensor.pieces.offsets, tensor.pieces.shapes, tensor.pieces.flat)
        for offset, shape, (start, stop) in zip(*(c.tolist() for c in columns), strict=True):
            yield piece_name(offset, start), tuple(shape) if start < 0 else (stop - start,)


def top_node(tensor: StoredTensor, codecs: Sequence[Node] = ()) -> Node:
    """``zarr.json`` of the array of a tensor, or of the group of its pieces."""
    ours: Node = {} if unquote(disk_name(tensor.key)) == tensor.key else {"key": tensor.key}
    if tensor.pieces is None:
        grid, attributes = tensor.grid, {_ATTRIBUTE: ours} if ours else {}
        return array_json(grid.global_shape, grid.chunk_shape, tensor.dtype, codecs, attributes)
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
    """The tensor that the top node ``name`` describes; the inverse of ``nodes_of``."""
    ours = node["attributes"].get(_ATTRIBUTE, {})
    key = ours.get("key", unquote(name))
    if node["node_type"] == "array":
        chunk = tuple(node["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = tensor_memory.from_name(node["data_type"])
        return StoredTensor(key, dtype, tuple(node["shape"]), chunk)
    pieces = Pieces.from_lists(ours["offsets"], ours["shapes"], ours["flat"])
    dtype = tensor_memory.from_name(ours["data_type"])
    return StoredTensor(key, dtype, tuple(ours["global_shape"]), None, pieces)
