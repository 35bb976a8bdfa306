"""A table of shards as few bytes: what ranks exchange before a save.

Columns are stored as differences from row to row, in the smallest integers that hold them, and
compressed: neighbours in a model look alike, so a shard takes a few bytes, whatever its shape.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_checkpointing.planning.shard_table import Int64s, ShardTable

_HEAD = struct.Struct("<QQQ")
_COLUMNS = ("keys", "dtypes", "ndim", "main", "sources")
_WIDE_COLUMNS = ("global_shapes", "offsets", "shapes", "flat")
_CODES = "bhiq"
_LEVEL = 1


def pack(table: ShardTable) -> bytes:
    """The table without its ranks. There must be one rank only."""
    names = json.dumps(table.names).encode()
    columns = [getattr(table, name).astype(np.int64) for name in _COLUMNS]
    for name in _WIDE_COLUMNS:
        columns += list(getattr(table, name).T)
    parts = [_HEAD.pack(len(table), table.max_ndim, len(names)), names]
    for column in columns:
        steps = np.diff(column, prepend=0)
        code = _smallest(steps)
        parts += [code.encode(), steps.astype(np.dtype(code)).tobytes()]
    return zlib.compress(b"".join(parts), _LEVEL)


def unpack(data: bytes, rank: int) -> ShardTable:
    """The table of a rank, as it was packed by that rank."""
    raw = zlib.decompress(data)
    rows, width, names_size = _HEAD.unpack_from(raw)
    position = _HEAD.size + names_size
    names = _names(raw[_HEAD.size : position])
    columns: list[Int64s] = []
    for _ in range(len(_COLUMNS) + 3 * width + 2):
        dtype = np.dtype(chr(raw[position]))
        steps = np.frombuffer(raw, dtype, rows, position + 1)
        columns.append(np.cumsum(steps, dtype=np.int64))
        position += 1 + rows * dtype.itemsize
    narrow = zip(_COLUMNS, columns, strict=False)
    own: dict[str, Any] = {name: column.astype(np.int32) for name, column in narrow}
    own["main"] = own["main"].astype(np.bool_)
    wide = columns[len(_COLUMNS) :]
    for name in _WIDE_COLUMNS:
        count = 2 if name == "flat" else width
        taken, wide = wide[:count], wide[count:]
        own[name] = np.stack(taken, axis=1) if taken else np.empty((rows, 0), dtype=np.int64)
    return ShardTable(names=names, ranks=np.full(rows, rank, dtype=np.int32), **own)


def unpack_all(packed: Sequence[bytes]) -> list[ShardTable]:
    """The tables of all ranks, in rank order; those of copies are unpacked once."""
    known: dict[bytes, ShardTable] = {}
    tables = []
    for rank, data in enumerate(packed):
        table = known.get(data)
        if table is None:
            table = known[data] = unpack(data, rank)
        tables.append(replace(table, ranks=np.full(len(table), rank, dtype=np.int32)))
    return tables


def _smallest(steps: npt.NDArray[np.int64]) -> str:
    low, high = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
    for code in _CODES:
        limits = np.iinfo(np.dtype(code))
        if limits.min <= low and high <= limits.max:
            return code
    raise AssertionError("an int64 fits into an int64")


@lru_cache(maxsize=64)
def _names(data: bytes) -> tuple[str, ...]:
    # Ranks that hold parts of the same tensors share one tuple, so that it is translated once.
    return tuple(json.loads(data))
