"""How tables and the index travel between ranks: equal ones once, packed, only the rows asked for;
and the cache of what ranks have agreed.

Data-parallel ranks hold the same shards, so thousands of ranks have a few distinct tables. First
all ranks gather digests; then each distinct table is sent once, by the lowest rank that holds it.

With ``R`` ranks and ``D`` bytes of distinct packed tables, a rank takes ``O(R + D)`` memory and
time, whatever the number of replicas.

Rank 0 reads the index file and sends few bytes for each tensor and piece. They are blocks of keys,
so that a rank's memory and time grow with what it wants and not with what the checkpoint holds.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Int64s, Ints, PieceColumns
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.shard_table import (
    Int32s,
    PackedTable,
    ShardTable,
    column_end,
    concatenate,
    pack,
    pack_column,
    unpack,
    unpack_column,
)

T = TypeVar("T")


class AgreedCache(Generic[T]):
    """A value that ranks made together, used again while each of them brings what it brought then.

    What a rank brings is compared in full, not by a hash. One difference on one rank makes all
    ranks work the value out again, and so do ranks that remember different values. Without
    ``keeps``, the same on all ranks, it is worked out every time.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._kept: tuple[object, int, T] | None = None

    @property
    def value(self) -> T | None:
        """The last value; None if there was none."""
        return None if self._kept is None else self._kept[2]

    def number_of(self, own: object) -> int | None:
        """The number of the value if this rank brings the same again; None for a new value.

        Ranks whose numbers are equal hold the same value.
        """
        return self._kept[1] if self._kept is not None and self._kept[0] == own else None

    def keep(self, own: object, value: T, number: int) -> None:
        """Remember a value; the number, below 2**62, stands for what all ranks brought for it."""
        self._kept = own, number, value

    def work_out(
        self,
        comm: Comm,
        step: str,
        describe: Callable[[], bytes],
        make: Callable[[Sequence[bytes]], T],
    ) -> T:
        """The value that ``make`` makes of what all ranks bring, in rank order. Collective.

        ``describe`` gives all that the value depends on besides the ranks.
        """
        with comm.agreed(step):
            data = describe()
            own = data, comm.rank, comm.world_size
        if self._keeps and comm.all_same(self.number_of(own)):
            assert self._kept is not None
            return self._kept[2]
        brought = comm.all_gather(data)
        with comm.agreed(step):
            value = make(brought)
        if self._keeps:
            digest = xxhash.xxh3_64()
            for data in brought:
                digest.update(data)
            self.keep(own, value, digest.intdigest() >> 2)
        return value


U = TypeVar("U")


_INLINE_BYTES = 1 << 24


"""What all ranks together may send with their digests, so that few ranks need one step only."""


_RANKS_A_SENDER = 8


"""If fewer ranks than one in so many have something to send, they send in turn; else all at once,
which takes as much room for every rank as for the one with most."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part of a rank's table on its way: a digest of its kind and bytes, and these if few."""

    kind: str
    digest: bytes
    num_bytes: int
    data: bytes | None

    @classmethod
    def of(cls, kind: str, data: bytes, world_size: int) -> PackedPart:
        digest = xxhash.xxh3_128_digest(kind.encode() + b"\0" + data)
        is_small = len(data) * world_size <= _INLINE_BYTES
        return cls(kind, digest, len(data), data if is_small else None)


@dataclass(frozen=True, slots=True)
class Brought(Generic[T]):
    """What one rank tells all others: parts of its table, and anything else."""

    parts: tuple[PackedPart, ...]
    facts: T


@dataclass(frozen=True, slots=True, eq=False)
class Exchanged(Generic[T]):
    """What all ranks have brought, each distinct part once, by its digest.

    Parts are in the order of the lowest ranks that hold them; ``holders`` ascend.
    """

    brought: Sequence[Brought[T]]
    data: Mapping[bytes, bytes]
    holders: Mapping[bytes, Int32s]

    @property
    def facts(self) -> list[T]:
        """What each rank has brought besides its table."""
        return [own.facts for own in self.brought]

    def with_facts(self, facts: Sequence[U]) -> Exchanged[U]:
        """The same tables with other facts of each rank."""
        brought = [
            Brought(own.parts, of_rank) for own, of_rank in zip(self.brought, facts, strict=True)
        ]
        return Exchanged(brought, self.data, self.holders)

    def catalog(self, *kinds: str) -> ShardTable:
        """The distinct rows of all ranks, sorted by key, with the ranks that hold each."""
        chosen = dict.fromkeys(
            part.digest for own in self.brought for part in own.parts if part.kind in kinds
        )
        tables = [PackedTable(self.data[digest], i) for i, digest in enumerate(chosen)]
        return concatenate(tables, [self.holders[digest] for digest in chosen])

    def tables(self, *kinds: str) -> list[ShardTable]:
        """The table of every rank: as many rows as all ranks have together."""
        tables = []
        for rank, own in enumerate(self.brought):
            parts = [part.digest for part in own.parts if part.kind in kinds]
            unpacked = [unpack(self.data[digest], rank) for digest in parts]
            tables.append(unpacked[0] if len(unpacked) == 1 else concatenate(unpacked))
        return tables

    @property
    def digests(self) -> list[bytes]:
        """What stands for the table of each rank."""
        return [b"".join(part.digest for part in own.parts) for own in self.brought]


def pack_tables(
    tables: Mapping[str, ShardTable], facts: T, num_ranks: int
) -> tuple[Brought[T], dict[bytes, bytes]]:
    """What one of so many ranks brings, and the bytes of its parts by their digests."""
    parts, bytes_of = [], {}
    for kind, table in tables.items():
        data = pack(table)
        parts.append(PackedPart.of(kind, data, num_ranks))
        bytes_of[parts[-1].digest] = data
    return Brought(tuple(parts), facts), bytes_of


def exchange_tables(
    comm: Comm,
    step: str,
    produce: Callable[[], tuple[Mapping[str, ShardTable], T]],
    number_of: Callable[[T], int | None] | None = None,
) -> Exchanged[T]:
    """The tables of all ranks. Collective; every rank raises alike if it fails on any.

    ``produce`` gives this rank's tables, by kind, and facts; ``number_of`` the number that stands
    for facts of a rank without tables, see ``Comm.exchange``.
    """
    own: dict[bytes, bytes] = {}

    def bring() -> Brought[T]:
        brought, data = pack_tables(*produce(), comm.world_size)
        own.update(data)
        return brought

    def number(own: Brought[T]) -> int | None:
        return None if number_of is None or own.parts else number_of(own.facts)

    brought = comm.exchange(step, bring, number)
    found: dict[bytes, PackedPart] = {}
    ranks: dict[bytes, list[int]] = {}
    for rank, theirs in enumerate(brought):
        for part in theirs.parts:
            found.setdefault(part.digest, part)
            ranks.setdefault(part.digest, []).append(rank)
    senders: dict[int, list[PackedPart]] = {}
    for digest, part in found.items():
        if part.data is None:
            senders.setdefault(ranks[digest][0], []).append(part)
    sent = _sent(comm, senders, own)
    return Exchanged(
        brought,
        {digest: sent.get(digest) or part.data or b"" for digest, part in found.items()},
        {digest: np.array(held, dtype=np.int32) for digest, held in ranks.items()},
    )


def _sent(
    comm: Comm, senders: Mapping[int, Sequence[PackedPart]], own: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """What these ranks have to send to all, by digest. Collective."""
    if not senders:
        return {}
    mine = b"".join(own[part.digest] for part in senders.get(comm.rank, ()))
    streams: dict[int, bytes] = {}
    if len(senders) * _RANKS_A_SENDER > comm.world_size:
        streams = dict(enumerate(comm.all_gather(mine)))
    else:
        for sender in sorted(senders):
            size = sum(part.num_bytes for part in senders[sender])
            tensor = torch.empty(size, dtype=torch.uint8)
            if sender == comm.rank:
                tensor.numpy()[:] = np.frombuffer(mine, np.uint8)
            tensor = tensor.to(comm.tensor_device)
            comm.broadcast_tensor(tensor, sender)
            streams[sender] = tensor.cpu().numpy().tobytes()
    data = {}
    for sender, parts in senders.items():
        begin = 0
        for part in parts:
            data[part.digest] = streams[sender][begin : begin + part.num_bytes]
            begin += part.num_bytes
    return data


_HEAD = struct.Struct("<QQQQQ")


_KEYS_A_BLOCK = 256


_LEVEL = 1


@dataclass(frozen=True, slots=True, eq=False)
class SharedIndex:
    """An index as rank 0 sends it to all ranks: blocks of tensors sorted by key, packed.

    Or the index as a whole.
    """

    last_keys: Sequence[str]
    blocks: Sequence[bytes]
    objects: Mapping[str, Ints]
    codec: str | None
    whole: Index | None = None

    @classmethod
    def of(cls, index: Index, num_ranks: int) -> SharedIndex:
        """An index for so many ranks. One that knows more than its columns is sent as it is."""
        if num_ranks == 1 or type(index) is not Index:
            return cls((), (), {}, None, index)
        rows = sorted(range(len(index)), key=index.keys_column.__getitem__)
        parts = [rows[i : i + _KEYS_A_BLOCK] for i in range(0, len(rows), _KEYS_A_BLOCK)]
        pieces = PieceColumns.of(index.pieces)
        return cls(
            [index.keys_column[part[-1]] for part in parts],
            [_pack(index, pieces, part) for part in parts],
            index.objects,
            index.codec,
        )

    def keys(self) -> Iterator[str]:
        if self.whole is not None:
            yield from self.whole
        for block in self.blocks:
            yield from _Block(block).keys

    def index(self, keys: Collection[str] | None) -> Index:
        """The index of the tensors and objects with these keys, as far as they exist; None: all."""
        if self.whole is not None:
            return self.whole
        if keys is None:
            wanted: Sequence[int] = range(len(self.blocks))
            objects = self.objects
        else:
            places = {bisect.bisect_left(self.last_keys, key) for key in keys}
            wanted = sorted(places - {len(self.blocks)})
            objects = {key: self.objects[key] for key in keys if key in self.objects}
        parts = [_Block(self.blocks[number]).index(keys) for number in wanted]
        return replace(_joined(parts), objects=objects, codec=self.codec)


def _pack(index: Index, pieces: PieceColumns, rows: list[int]) -> bytes:
    keys = [index.keys_column[row] for row in rows]
    names = {name: i for i, name in enumerate(dict.fromkeys(index.dtype_column[r] for r in rows))}
    in_pieces = [key for key in keys if key in pieces]
    own = PieceColumns.of({key: pieces[key] for key in in_pieces})
    has_grid = index.has_grid[rows]
    columns = [
        np.array([names[index.dtype_column[row]] for row in rows], dtype=np.int64),
        np.array([len(index.global_shape_column[row]) for row in rows], dtype=np.int64),
        has_grid.astype(np.int64),
        *index.global_shapes[rows].T,
        *index.chunk_shapes[rows].T,
    ]
    counts = np.diff(own.starts)
    of_pieces = [*own.offsets.T, *own.shapes.T, *own.flat.T]
    text = json.dumps([keys, [*names]]).encode()
    width = index.global_shapes.shape[1]
    sizes = (len(rows), width, len(own.flat), own.offsets.shape[1], len(text))
    packed = [*map(pack_column, [*columns, counts, *of_pieces])]
    return zlib.compress(b"".join([_HEAD.pack(*sizes), text, *packed]), _LEVEL)


class _Block:
    """Some tensors of an index, as ``_pack`` packs them."""

    def __init__(self, packed: bytes) -> None:
        self._data = zlib.decompress(packed)
        sizes = _HEAD.unpack_from(self._data)
        self._rows, self._width, self._pieces, self._piece_width, text_size = sizes
        self._at = _HEAD.size + text_size
        self.keys, self._dtypes = json.loads(self._data[_HEAD.size : self._at])

    def index(self, wanted: Collection[str] | None) -> Index:
        """The tensors with these keys; None: all."""
        chosen = [i for i, key in enumerate(self.keys) if wanted is None or key in wanted]
        dtypes, ndim, has_grid = (self._next(self._rows) for _ in range(3))
        shapes, chunks = (self._table(self._rows, self._width) for _ in range(2))
        in_pieces = np.flatnonzero(has_grid == 0)
        counts = self._next(len(in_pieces))
        offsets, boxes = (self._table(self._pieces, self._piece_width) for _ in range(2))
        flat = self._table(self._pieces, 2)
        is_chosen = np.zeros(self._rows, dtype=np.bool_)
        is_chosen[chosen] = True
        own = is_chosen[in_pieces]
        rows = np.repeat(own, counts)
        axes = ndim.tolist()
        return Index(
            [self.keys[i] for i in chosen],
            [self._dtypes[dtypes[i]] for i in chosen],
            [tuple(shapes[i, : axes[i]].tolist()) for i in chosen],
            [tuple(chunks[i, : axes[i]].tolist()) if has_grid[i] else None for i in chosen],
            PieceColumns(
                [self.keys[i] for i in in_pieces[own].tolist()],
                np.concatenate([[0], np.cumsum(counts[own])]),
                ndim[in_pieces][own],
                offsets[rows],
                boxes[rows],
                flat[rows],
            ),
        )

    def _next(self, rows: int) -> Int64s:
        column = unpack_column(self._data, self._at, rows)
        self._at = column_end(self._data, self._at, rows)
        return column

    def _table(self, rows: int, width: int) -> Int64s:
        table = np.empty((rows, width), dtype=np.int64)
        for axis in range(width):
            table[:, axis] = self._next(rows)
        return table


def _joined(parts: Sequence[Index]) -> Index:
    chained = itertools.chain.from_iterable
    return Index(
        [*chained(part.keys_column for part in parts)],
        [*chained(part.dtype_column for part in parts)],
        [*chained(part.global_shape_column for part in parts)],
        [*chained(part.chunk_shape_column for part in parts)],
        PieceColumns.joined([PieceColumns.of(part.pieces) for part in parts]),
    )
