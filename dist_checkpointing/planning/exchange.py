"""How ranks tell each other what they hold: tables that are the same on many ranks travel once.

Data-parallel ranks hold the same shards, so thousands of ranks have a few distinct tables. First
all ranks gather digests; then each distinct table is sent once, by the lowest rank that holds it.

With ``R`` ranks and ``D`` bytes of distinct packed tables, a rank takes ``O(R + D)`` memory and
time, whatever the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.planning.packing import PackedTable, pack, unpack
from dist_checkpointing.planning.shard_table import Int32s, ShardTable, concatenate

T = TypeVar("T")
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
