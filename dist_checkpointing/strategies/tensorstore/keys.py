"""What a part of a checkpoint is called inside the database: the same names as in a zarr folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache

from dist_checkpointing.filesystem import local
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.strategies.zarr_v3_nodes import (
    METADATA_NAME,
    Node,
    array_json,
    chunk_name,
    describe,
    piece_name,
)


def metadata_values(tensor: StoredTensor) -> Iterator[tuple[str, bytes]]:
    """Keys and values of the ``zarr.json`` of a tensor."""
    name = local.disk_name(tensor.key)
    if tensor.chunk_shape is not None and name == tensor.key:
        shapes = (tensor.global_shape, tensor.chunk_shape)
        yield f"{name}/{METADATA_NAME}", _plain_array(*shapes, tensor.dtype)
        return
    for path, node in describe(tensor).items():
        yield f"{path}/{METADATA_NAME}", json.dumps(node, separators=(",", ":")).encode()


@lru_cache(maxsize=1024)
def _plain_array(shape: Ints, chunk_shape: Ints, dtype: DType) -> bytes:
    # Thousands of tensors share a few shapes.
    return json.dumps(array_json(shape, chunk_shape, dtype), separators=(",", ":")).encode()


def array_path(tensor: StoredTensor, box: Box, flat: tuple[int, int] | None) -> str:
    """The array that holds a chunk or piece, with a slash behind it."""
    name = local.disk_name(tensor.key)
    return f"{name}/" if tensor.pieces is None else f"{name}/{piece_name(box, flat)}/"


def chunk_key(tensor: StoredTensor, box: Box, flat: tuple[int, int] | None) -> str:
    """The key of a chunk or piece."""
    if tensor.pieces is None:
        index = tensor.grid.index_at(box.offset)
    else:
        index = (0,) * (len(box.shape) if flat is None else 1)
    return array_path(tensor, box, flat) + chunk_name(index)


def array_node(tensor: StoredTensor, box: Box, flat: tuple[int, int] | None) -> Node:
    """``zarr.json`` of the array that holds a chunk or piece."""
    if tensor.pieces is None:
        return array_json(tensor.global_shape, tensor.grid.chunk_shape, tensor.dtype)
    shape = box.shape if flat is None else (flat[1] - flat[0],)
    return array_json(shape, shape, tensor.dtype)


def object_key(key: str, offset: Ints, shape: Ints) -> str:
    """The key of one cell of a sharded object."""
    cell = "_".join(".".join(map(str, numbers)) for numbers in (offset, shape))
    return f"{local.disk_name(key)}/shard_{cell}"
