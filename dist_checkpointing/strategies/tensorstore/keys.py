"""Names of the parts of a checkpoint: keys in its database, as in a zarr folder, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from dist_checkpointing.format.file_names import disk_name, disk_names, is_of_optimizer
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.shard_table import Bools, ShardTable
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import MANIFEST_NAME
from dist_checkpointing.strategies.zarr_v3_nodes import (
    METADATA_NAME,
    array_json,
    chunk_keys_to_read,
    chunk_keys_to_write,
    piece_arrays,
    top_node,
)

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
    return f"{disk_name(key)}/shard_{cell}"


def keys_to_write(table: ShardTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a save plan."""
    is_object = table.is_object

    def cell_key(row: int) -> str:
        axes = int(table.ndim[row])
        numbers = (table.offsets[row, :axes].tolist(), table.global_shapes[row, :axes].tolist())
        return object_key(table.key(row), *numbers)

    return _in_rows(is_object, chunk_keys_to_write(table.take(~is_object), index), cell_key)


def keys_to_read(table: ReadTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a load plan."""
    is_object = table.is_object

    def cell_key(row: int) -> str:
        cell = table.chunk(row)
        return object_key(cell.fqn, cell.offset or (), index.objects[cell.fqn])

    return _in_rows(is_object, chunk_keys_to_read(table.take(~is_object), index), cell_key)


def _in_rows(
    is_object: Bools, chunks: Sequence[str], cell_key: Callable[[int], str]
) -> list[bytes]:
    """Keys of chunks and of the cells between them, in the order of the rows."""
    if not is_object.any():
        return list(map(str.encode, chunks))
    names = iter(chunks)
    return [
        (cell_key(row) if is_cell else next(names)).encode()
        for row, is_cell in enumerate(is_object.tolist())
    ]


def descriptions(index: Index) -> tuple[list[str], list[int], list[str]]:
    """Keys of the ``zarr.json`` of all arrays and groups, the text of each, and all texts."""
    found: list[str] = []
    numbers: list[int] = []
    texts: dict[str, int] = {}
    number_of: dict[tuple[Ints, Ints, str], int] = {}
    special: list[tuple[str, str, str]] = []
    names = disk_names(index.keys_column)
    columns = (index.keys_column, index.dtype_column, index.global_shape_column)
    for name, key, dtype, shape, chunk in zip(
        names, *columns, index.chunk_shape_column, strict=True
    ):
        if chunk is None or name != key:
            special.append((name, key, dtype))
            continue
        kind = (tuple(shape), tuple(chunk), dtype)
        if kind not in number_of:
            number_of[kind] = texts.setdefault(_array_text(*kind), len(texts))
        found.append(f"{name}/{METADATA_NAME}")
        numbers.append(number_of[kind])
    for row in special:
        for path, text in _nodes(index, *row):
            found.append(path)
            numbers.append(texts.setdefault(text, len(texts)))
    return found, numbers, list(texts)


def _nodes(index: Index, name: str, key: str, dtype: str) -> Iterator[tuple[str, str]]:
    """The same of a tensor that has pieces or another name on disk, with all of its text."""
    tensor = index[key]
    yield f"{name}/{METADATA_NAME}", json.dumps(top_node(tensor), separators=(",", ":"))
    for piece, shape in piece_arrays(tensor):
        yield f"{name}/{piece}/{METADATA_NAME}", _array_text(shape, shape, dtype)


@lru_cache(maxsize=1 << 12)
def _array_text(shape: Ints, chunk: Ints, dtype: str) -> str:
    head, middle, tail = _template(dtype)
    extents = (",".join(map(str, numbers)) for numbers in (shape, chunk))
    return f"{head}[{next(extents)}]{middle}[{next(extents)}]{tail}"


@lru_cache(maxsize=64)
def _template(dtype: str) -> tuple[str, str, str]:
    """The text around the two shapes."""
    node = array_json((), (), tensor_memory.from_name(dtype))
    head, middle, tail = json.dumps(node, separators=(",", ":")).split("[]")
    return head, middle, tail
