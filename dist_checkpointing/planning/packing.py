"""A table of shards as few bytes: what ranks exchange before a save.

A shard takes a few bytes, whatever its shape.
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

from dist_checkpointing.planning.shard_table import (
    COLUMNS,
    Int64s,
    ShardTable,
    column_end,
    pack_column,
    unpack_column,
)

_HEAD = struct.Struct("<QQQ")
_COLUMNS = ("keys", "dtypes", "ndim", "main", "sources")
_WIDE_COLUMNS = ("global_shapes", "offsets", "shapes", "flat")
_LEVEL = 1


def pack(table: ShardTable) -> bytes:
    """The table without its ranks. There must be one rank only."""
    names = json.dumps(table.names).encode()
    columns = [getattr(table, name).astype(np.int64) for name in _COLUMNS]
    for name in _WIDE_COLUMNS:
        columns += list(getattr(table, name).T)
    parts = [_HEAD.pack(len(table), table.max_ndim, len(names)), names]
    parts += map(pack_column, columns)
    return zlib.compress(b"".join(parts), _LEVEL)


class PackedTable:
    """A table whose columns are unpacked when they are asked for.

    ``rank`` may be the number of the set of ranks that hold it.
    """

    def __init__(self, data: bytes, rank: int) -> None:
        self._raw = raw = zlib.decompress(data)
        self._rank = rank
        self._rows, self.max_ndim, names_size = _HEAD.unpack_from(raw)
        self.names: tuple[str, ...] = _names(raw[_HEAD.size : _HEAD.size + names_size])
        self._begins = [_HEAD.size + names_size]
        for _ in range(len(_COLUMNS) + 3 * self.max_ndim + 2):
            self._begins.append(column_end(raw, self._begins[-1], self._rows))

    def __len__(self) -> int:
        return int(self._rows)

    def column(self, name: str) -> Any:
        if name == "ranks":
            return np.full(self._rows, self._rank, dtype=np.int32)
        if name in _COLUMNS:
            return self._numbers(_COLUMNS.index(name)).astype(
                np.bool_ if name == "main" else np.int32
            )
        first = len(_COLUMNS) + self.max_ndim * _WIDE_COLUMNS.index(name)
        width = 2 if name == "flat" else self.max_ndim
        columns = np.empty((self._rows, width), dtype=np.int64)
        for axis in range(width):
            columns[:, axis] = self._numbers(first + axis)
        return columns

    def _numbers(self, number: int) -> Int64s:
        return unpack_column(self._raw, self._begins[number], self._rows)


def unpack(data: bytes, rank: int) -> ShardTable:
    """The table of a rank, as it was packed by that rank."""
    table = PackedTable(data, rank)
    return ShardTable(names=table.names, **{name: table.column(name) for name in COLUMNS})


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


@lru_cache(maxsize=64)
def _names(data: bytes) -> tuple[str, ...]:
    # Ranks that hold parts of the same tensors share one tuple, so that it is translated once.
    return tuple(json.loads(data))
