"""Names of the parts of a checkpoint: keys in its database, as in a zarr folder, and files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.ocdbt.manifest import MANIFEST_NAME
from dist_checkpointing.format.optimizer_keys import is_of_optimizer
from dist_checkpointing.planning.shard_table import Int32s, Int64s
from dist_checkpointing.strategies.zarr_v3_nodes import METADATA_NAME, array_json, top_node

NODES_FOLDER: Final = "d"
DATA_FOLDER: Final = "data"
CREATED_NAMES: Final = (MANIFEST_NAME, NODES_FOLDER, DATA_FOLDER)

DATA_GROUPS: Final = ("model", "optimizer")
"""An optimizer's tensors lie in data files of their own: dropping them deletes these files, whereas
deleting keys from a database frees nothing."""


def group_of(key: str) -> int:
    """The data group that a key belongs to, as a position in ``DATA_GROUPS``."""
    return int(is_of_optimizer(key))


def object_key(key: str, offset: Sequence[int], shape: Sequence[int]) -> str:
    """The key of one cell of a sharded object."""
    cell = "_".join(".".join(map(str, numbers)) for numbers in (offset, shape))
    return f"{local.disk_name(key)}/shard_{cell}"


def value_keys(
    index: Index, names: Sequence[str], keys: Int32s, ndim: Int32s, offsets: Int64s, flat: Int64s
) -> list[bytes]:
    """The keys of chunks, pieces and cells of objects, as columns.

    Args:
        index: what the checkpoint holds.
        names: keys of tensors and objects; others may be among them.
        keys: position in ``names``.
        ndim: number of axes.
        offsets: ``[rows, axes]``, first element of the chunk or piece, or the cell.
        flat: first element of a flattened piece; -1 for one that is not.
    """
    chunks = np.ones((len(names), offsets.shape[1]), dtype=np.int64)
    cells: dict[int, Ints] = {}
    in_pieces = set()
    folders = [f"{local.disk_name(name)}/" for name in names]
    for number in np.unique(keys).tolist():
        name = names[number]
        chunk = index.chunk_shape(name)
        if chunk is not None:
            chunks[number, : len(chunk)] = chunk
        elif name in index.objects:
            cells[number] = index.objects[name]
        else:
            in_pieces.add(number)
    places = offsets // chunks[keys]
    columns = (keys.tolist(), ndim.tolist(), places.tolist(), flat.tolist())
    made = []
    for number, axes, place, start in zip(*columns, strict=True):
        at = tuple(place[:axes])
        if number in cells:
            made.append(object_key(names[number], at, cells[number]).encode())
            continue
        key = folders[number]
        if number in in_pieces:
            key += f"{_piece(at, start)}/"
            at = (0,) * (axes if start < 0 else 1)
        made.append((key + _chunk(at)).encode())
    return made


@lru_cache(maxsize=1 << 12)
def _chunk(index: Ints) -> str:
    return ".".join(("c", *map(str, index)))


def _piece(offset: Sequence[int], start: int) -> str:
    name = ".".join(("piece", *map(str, offset)))
    return name if start < 0 else f"{name}-{start}"


def descriptions(index: Index) -> Iterator[tuple[str, str]]:
    """Keys of the ``zarr.json`` of all arrays and groups, and their texts; many are alike."""
    columns = (index.keys_column, index.dtype_column, index.global_shape_column)
    for key, dtype, shape, chunk in zip(*columns, index.chunk_shape_column, strict=True):
        name = local.disk_name(key)
        if chunk is not None and name == key:
            yield f"{name}/{METADATA_NAME}", _array_text(tuple(shape), tuple(chunk), dtype)
            continue
        tensor = index[key]
        yield f"{name}/{METADATA_NAME}", json.dumps(top_node(tensor), separators=(",", ":"))
        if tensor.pieces is None:
            continue
        pieces = (tensor.pieces.offsets, tensor.pieces.shapes, tensor.pieces.flat)
        for offset, extents, (start, stop) in zip(*(p.tolist() for p in pieces), strict=True):
            stored = tuple(extents) if start < 0 else (stop - start,)
            path = f"{name}/{_piece(offset, start)}/{METADATA_NAME}"
            yield path, _array_text(stored, stored, dtype)


@lru_cache(maxsize=1 << 12)
def _array_text(shape: Ints, chunk: Ints, dtype: str) -> str:
    head, middle, tail = _template(dtype)
    extents = (",".join(map(str, numbers)) for numbers in (shape, chunk))
    return f"{head}[{next(extents)}]{middle}[{next(extents)}]{tail}"


@lru_cache(maxsize=64)
def _template(dtype: str) -> tuple[str, str, str]:
    """The text around the two shapes."""
    node = array_json((), (), dtypes.from_name(dtype))
    head, middle, tail = json.dumps(node, separators=(",", ":")).split("[]")
    return head, middle, tail
