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

from dist_checkpointing.planning.shard_table import COLUMNS, Int64s, ShardTable

_HEAD = struct.Struct("<QQQ")
_COLUMNS = ("keys", "dtypes", "ndim", "main", "sources")
_WIDE_COLUMNS = ("global_shapes", "offsets", "shapes", "flat")
_CODES = "bhiq"
_ITEMSIZES = {ord(code): np.dtype(code).itemsize for code in _CODES}
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


class PackedTable:
    """A table whose columns are unpacked when they are asked for.

    Args:
        data: as it was packed.
        rank: that it belongs to, or the number of the set of ranks that hold it.
    """

    def __init__(self, data: bytes, rank: int) -> None:
        self._raw = raw = zlib.decompress(data)
        self._rank = rank
        self._rows, self.max_ndim, names_size = _HEAD.unpack_from(raw)
        self.names = _names(raw[_HEAD.size : _HEAD.size + names_size])
        self._begins = [_HEAD.size + names_size]
        for _ in range(len(_COLUMNS) + 3 * self.max_ndim + 2):
            begin = self._begins[-1]
            self._begins.append(begin + 1 + self._rows * _ITEMSIZES[raw[begin]])

    def __len__(self) -> int:
        return int(self._rows)

    def column(self, name: str) -> Any:
        """One of the columns of a ShardTable."""
        if name == "ranks":
            return np.full(self._rows, self._rank, dtype=np.int32)
        if name in _COLUMNS:
            column = self._numbers(_COLUMNS.index(name))
            return column.astype(np.bool_ if name == "main" else np.int32)
        first = len(_COLUMNS) + self.max_ndim * _WIDE_COLUMNS.index(name)
        width = 2 if name == "flat" else self.max_ndim
        columns = np.empty((self._rows, width), dtype=np.int64)
        for axis in range(width):
            columns[:, axis] = self._numbers(first + axis)
        return columns

    def _numbers(self, number: int) -> Int64s:
        begin = self._begins[number]
        steps = np.frombuffer(self._raw, chr(self._raw[begin]), self._rows, begin + 1)
        return np.cumsum(steps, dtype=np.int64)


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
