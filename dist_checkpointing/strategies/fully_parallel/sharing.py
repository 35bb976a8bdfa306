"""Who reads what for whom, and how it travels: pure functions of what the ranks of a group want."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dist_checkpointing.format.geometry import row_bytes
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.replica_balancing import share_out
from dist_checkpointing.planning.shard_table import Int64s

_ALIGNMENT_BYTES = 16
"""Tensors of any dtype may begin at such a position in a message."""

Rows = npt.NDArray[np.void]
_HEAD = struct.Struct("<QQ")
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("num_bytes", "<i8"), ("itemsize", "<i8")])


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """What one rank wants to have in memory, row by row.

    A row is the digest of what it is, its size and that of an element; rows with one digest have
    the same bytes in memory. Passing on may take ``buffer_bytes`` on this rank. With fewer bytes
    than ``min_shared_bytes`` that several ranks want, each reads for itself.
    """

    rows: Rows
    buffer_bytes: int
    min_shared_bytes: int

    def pack(self) -> bytes:
        return _HEAD.pack(self.buffer_bytes, self.min_shared_bytes) + self.rows.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Wants:
        return cls(np.frombuffer(data, _ROW, offset=_HEAD.size), *_HEAD.unpack_from(data))


def _rows(identities: Iterable[Any], num_elements: Any, itemsizes: Any) -> Rows:
    digests = b"".join(map(xxhash.xxh3_128_digest, identities))
    rows = np.empty(len(itemsizes), dtype=_ROW)
    rows["high"], rows["low"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T
    rows["num_bytes"] = np.multiply(num_elements, itemsizes)
    rows["itemsize"] = itemsizes
    return rows


def rows_of_table(table: ReadTable, acquire: Callable[[int], torch.Tensor]) -> Rows:
    """What the tensors of a table are: the same part of the same chunk, in memory of one dtype."""
    dtypes = [acquire(row).dtype for row in range(len(table))]
    numbers = {dtype: _number(str(dtype)) for dtype in set(dtypes)}
    column = np.array([numbers[dtype] for dtype in dtypes], dtype=np.int64)
    keys = np.array([_number(name) for name in table.names], dtype=np.int64)
    ndims = np.maximum(table.ndim, table.window_ndim)
    scalars = [keys[table.keys], ndims, table.pieces, table.storage_starts, column]
    axes = (table.chunk_offsets, table.storage_shapes, table.storage_boxes, table.lengths)
    identities = row_bytes(scalars, axes, ndims)
    return _rows(identities, table.num_elements, [dtype.itemsize for dtype in dtypes])


def _number(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


def rows_of_shards(shards: Sequence[ShardedTensor]) -> Rows:
    """What shards are: the same part of the same tensor, in memory of one dtype."""
    parts = [(s.key, str(s.dtype), s.box, s.flat_range) for s in shards]
    num_elements = [b.num_elements if flat is None else flat[1] - flat[0] for *_, b, flat in parts]
    identities = (repr(part).encode() for part in parts)
    return _rows(identities, num_elements, [shard.dtype.itemsize for shard in shards])


@dataclass(frozen=True, slots=True)
class ElementRun:
    """A run of elements on its way: from ``first`` up to ``last``, from byte ``start`` of a
    message.

    The row is -1 where this rank does not want them.
    """

    row: int
    first: int
    last: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to all others at a time."""

    source: int
    runs: tuple[ElementRun, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """How one rank shares the reads of its group.

    It reads its own rows, ascending, and copies them to other rows that want the same. Messages are
    in the order in which they travel, and the same on all ranks but for the rows.
    """

    own: Int64s
    copies: tuple[tuple[int, int], ...]
    messages: Sequence[Message]


def _numbered(high: Any, low: Any) -> tuple[Int64s, Int64s]:
    """Number of the unit of each row, and the first row of each unit; equal rows are one unit."""
    order = np.lexsort((low, high))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    firsts = order[begins]  # Sorting is stable.
    by_appearance = np.argsort(firsts)
    units = np.empty(len(order), dtype=np.int64)
    units[order] = np.argsort(by_appearance)[np.cumsum(begins) - 1]
    return units, firsts[by_appearance]


def share_reads(wants: Sequence[Wants], rank: int) -> Sharing | None:
    """How ranks that want these rows share the reads; None if it is not worth it."""
    rows = np.concatenate([want.rows for want in wants])
    ranks = np.repeat(np.arange(len(wants)), [len(want.rows) for want in wants])
    units, firsts = _numbered(rows["high"], rows["low"])
    # A rank that wants something twice counts once.
    wanted, wanting = np.divmod(np.unique(units * len(wants) + ranks), len(wants))
    starts = np.searchsorted(wanted, np.arange(len(firsts) + 1))
    is_shared = np.diff(starts) > 1
    sizes = rows["num_bytes"][firsts]
    least = max(want.min_shared_bytes for want in wants)
    if not is_shared.any() or sizes[is_shared].sum() < least:
        return None
    loads = np.zeros(len(wants), dtype=np.int64)
    readers = wanting[share_out(wanting, starts, np.arange(len(firsts)), sizes, loads)]
    mine = units[ranks == rank]
    _, first_rows = np.unique(mine, return_index=True)
    row_of = np.full(len(firsts), -1, dtype=np.int64)
    row_of[mine[first_rows]] = first_rows
    copies = np.flatnonzero(row_of[mine] != np.arange(len(mine)))
    traveling = np.flatnonzero(is_shared)
    columns = (readers, row_of, sizes, rows["itemsize"][firsts])
    most_bytes = max(1, min(want.buffer_bytes for want in wants))
    return Sharing(
        own=np.sort(row_of[(readers == rank) & (row_of >= 0)]),
        copies=tuple(zip(row_of[mine[copies]].tolist(), copies.tolist(), strict=True)),
        messages=list(
            _messages(zip(*(c[traveling].tolist() for c in columns), strict=True), most_bytes)
        ),
    )


def _messages(units: Iterable[tuple[int, int, int, int]], most_bytes: int) -> Iterator[Message]:
    """Small units together, large ones in several messages.

    A unit is its reader, the row of this rank, its bytes and those of an element.
    """
    waiting: dict[int, list[ElementRun]] = {}
    for reader, row, size, itemsize in units:
        step = max(1, most_bytes // itemsize)
        runs = waiting.setdefault(reader, [])
        for first in range(0, size // itemsize, step):
            last = min(first + step, size // itemsize)
            num_bytes = (last - first) * itemsize
            start = _aligned(runs[-1].start + runs[-1].num_bytes) if runs else 0
            if runs and start + num_bytes > most_bytes:
                yield _message(reader, runs)
                runs.clear()
                start = 0
            runs.append(ElementRun(row, first, last, start, num_bytes))
    for reader, runs in sorted(waiting.items()):
        yield _message(reader, runs)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _message(source: int, runs: Sequence[ElementRun]) -> Message:
    return Message(source, tuple(runs), runs[-1].start + runs[-1].num_bytes)
