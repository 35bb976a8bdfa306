"""How a stored tensor is told in zarr v3's own words: names and ``zarr.json`` of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Pieces, StoredTensor

METADATA_NAME = "zarr.json"
_ATTRIBUTE = "dist_checkpointing"

Node = dict[str, Any]


def chunk_name(index: Ints) -> str:
    """File name of a chunk: one flat folder an array, no tree of directories."""
    return ".".join(("c", *map(str, index)))


def piece_name(box: Box, flat: tuple[int, int] | None) -> str:
    """Name of the array that holds one piece of a tensor without chunk grid."""
    name = ".".join(("piece", *map(str, box.offset)))
    return name if flat is None else f"{name}-{flat[0]}"


def array_json(
    shape: Ints,
    chunk: Ints,
    dtype: DType,
    codecs: Sequence[Node] = (),
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Node:
    """``zarr.json`` of an array.

    Args:
        shape: of the array.
        chunk: of its chunks.
        dtype: of its elements.
        codecs: what compresses the bytes of a chunk.
        attributes: of the node.
    """
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


def describe(tensor: StoredTensor, codecs: Sequence[Node] = ()) -> dict[str, Node]:
    """Path below the checkpoint -> content of ``zarr.json``, for all nodes of a tensor."""
    name = local.disk_name(tensor.key)
    nodes = {name: top_node(tensor, codecs)}
    for box, flat in tensor.pieces or ():
        shape = box.shape if flat is None else (flat[1] - flat[0],)
        nodes[f"{name}/{piece_name(box, flat)}"] = array_json(shape, shape, tensor.dtype, codecs)
    return nodes


def top_node(tensor: StoredTensor, codecs: Sequence[Node] = ()) -> Node:
    """``zarr.json`` of the array of a tensor, or of the group of its pieces."""
    ours: Node = {} if unquote(local.disk_name(tensor.key)) == tensor.key else {"key": tensor.key}
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
    """``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def parse(name: str, node: Mapping[str, Any]) -> StoredTensor:
    """The tensor that the top node ``name`` describes; the inverse of ``describe``."""
    ours = node["attributes"].get(_ATTRIBUTE, {})
    key = ours.get("key", unquote(name))
    if node["node_type"] == "array":
        chunk = tuple(node["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = dtypes.from_name(node["data_type"])
        return StoredTensor(key, dtype, tuple(node["shape"]), chunk)
    pieces = Pieces.from_lists(ours["offsets"], ours["shapes"], ours["flat"])
    dtype = dtypes.from_name(ours["data_type"])
    return StoredTensor(key, dtype, tuple(ours["global_shape"]), None, pieces)
