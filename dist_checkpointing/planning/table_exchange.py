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
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Ints, PieceColumns, Pieces
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.sharded_tensor import fields_of
from dist_checkpointing.planning.shard_table import (
    PackedTable,
    ShardTable,
    concatenate,
    pack,
    pack_columns,
    unpack_columns,
)
from dist_checkpointing.threads import paused_collector

T = TypeVar("T")


class AgreedCache(Generic[T]):
    """A value that ranks made together, used again while each of them sends what it sent then.

    What a rank sends is compared in full, not by a hash. One difference on one rank makes all
    ranks work the value out again, and so do ranks that remember different values. Without
    ``keeps``, the same on all ranks, it is worked out every time.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._inputs: object = None
        self._hash: int | None = None
        self.value: T | None = None
        """The last value; None if there was none."""

    def hash_if_cached(self, inputs: object) -> int | None:
        """The hash of the value if this rank sends the same again; None for a new value.

        Ranks whose hashes are equal hold the same value.
        """
        return self._hash if self._inputs == inputs else None

    def keep(self, inputs: object, value: T, of_ranks: Sequence[bytes]) -> None:
        """Remember a value; ``of_ranks`` stands for what each rank has sent for it."""
        digest = xxhash.xxh3_64()
        for data in of_ranks:
            digest.update(data)
        self._inputs, self._hash, self.value = inputs, digest.intdigest() >> 2, value

    def work_out(
        self,
        comm: Comm,
        step: str,
        describe: Callable[[], bytes],
        make: Callable[[Sequence[bytes]], T],
    ) -> T:
        """The value that ``make`` makes of what all ranks send, in rank order. Collective.

        ``describe`` gives all that the value depends on besides the ranks.
        """
        with comm.agreed(step):
            data = describe()
            inputs = data, comm.rank, comm.world_size
        if self._keeps and comm.all_same(self.hash_if_cached(inputs)):
            return cast("T", self.value)
        of_ranks = comm.all_gather(data)
        with comm.agreed(step):
            value = make(of_ranks)
        if self._keeps:
            self.keep(inputs, value, of_ranks)
        return value


def plan_inputs(leaves: Iterable[ShardedBase]) -> Iterable[Any]:
    """Everything about the leaves that a plan depends on, as values that cannot change."""
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            row = fields_of(leaf)
        elif isinstance(leaf, ShardedObject):
            row = (leaf.key, leaf.global_shape, leaf.global_offset, leaf.replica_id)
        else:
            row = (object(),)  # equal to nothing: let the planner say what is wrong with it
        if list in map(type, row):
            row = tuple(tuple(value) if type(value) is list else value for value in row)
        yield row


_INLINE_BYTES = 1 << 24
"""What all ranks together may send with their digests, so that few ranks need one step only."""
_RANKS_A_SENDER = 8
"""If fewer ranks than one in so many have something to send, they send in turn; else all at once,
which takes as much room for every rank as for the one with most."""


class PackedPart(NamedTuple):
    """A part of a rank's table as it is sent: digest of its kind and bytes, and these if few."""

    digest: bytes
    num_bytes: int
    data: bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedTables(Generic[T]):
    """The facts and tables of all ranks, each distinct part once.

    Attributes:
        facts: Of each rank.
        parts: Digest of each part of a rank's table, by its kind.
        data: The parts by digest; those of a rank that is alone are not packed.
    """

    facts: Sequence[T]
    parts: Sequence[Mapping[str, bytes]]
    data: Mapping[bytes, bytes | ShardTable]

    def catalog(self, *kinds: str) -> ShardTable:
        """The distinct rows of all ranks, sorted by key, with the ranks that hold each."""
        holders: dict[bytes, list[int]] = {}
        for rank, digests in enumerate(self.parts):
            for kind in kinds:
                if kind in digests:
                    holders.setdefault(digests[kind], []).append(rank)
        tables = [self._table(digest, number) for number, digest in enumerate(holders)]
        return concatenate(tables, [np.array(held, dtype=np.int32) for held in holders.values()])

    def tables(self, *kinds: str) -> list[ShardTable]:
        """The table of every rank: as many rows as all ranks have together."""
        tables = []
        for rank, digests in enumerate(self.parts):
            parts = [self._table(digests[kind], rank) for kind in kinds if kind in digests]
            table = parts[0] if len(parts) == 1 else concatenate(parts)
            tables.append(table.unpacked() if isinstance(table, PackedTable) else table)
        return tables

    def _table(self, digest: bytes, rank: int) -> PackedTable | ShardTable:
        data = self.data[digest]
        if isinstance(data, bytes):
            return PackedTable(data, rank)
        return replace(data, ranks=np.full(len(data), rank, dtype=np.int32))

    @property
    def digests(self) -> list[bytes]:
        """What stands for the table of each rank."""
        return [b"".join(digests.values()) for digests in self.parts]


def pack_tables(
    tables: Mapping[str, ShardTable], num_ranks: int
) -> tuple[dict[str, PackedPart], dict[bytes, bytes]]:
    """The tables of one of so many ranks, as it sends them; and their bytes by digest."""
    parts, bytes_of = {}, {}
    for kind, table in tables.items():
        data = pack(table)
        digest = xxhash.xxh3_128_digest(kind.encode() + b"\0" + data)
        is_small = len(data) * num_ranks <= _INLINE_BYTES
        parts[kind] = PackedPart(digest, len(data), data if is_small else None)
        bytes_of[digest] = data
    return parts, bytes_of


def exchange_tables(
    comm: Comm,
    step: str,
    produce: Callable[[], tuple[Mapping[str, ShardTable], T]],
    number_of: Callable[[T], int | None] = lambda _: None,
) -> ExchangedTables[T]:
    """The tables of all ranks. Collective; every rank raises alike if it fails on any.

    ``produce`` gives this rank's tables, by kind, and facts; ``number_of`` the number that stands
    for facts of a rank without tables, see ``Comm.exchange``.
    """
    produce = paused_collector()(produce)
    if comm.world_size == 1:
        tables, facts = comm.exchange(step, produce)[0]
        digests = {kind: kind.encode() for kind in tables}
        data_of = dict(zip(digests.values(), tables.values(), strict=True))
        return ExchangedTables([facts], [digests], data_of)
    local: dict[bytes, bytes] = {}

    def parts_of_rank() -> tuple[dict[str, PackedPart], T]:
        tables, facts = produce()
        parts, bytes_of = pack_tables(tables, comm.world_size)
        local.update(bytes_of)
        return parts, facts

    of_ranks = comm.exchange(
        step, parts_of_rank, lambda sent: None if sent[0] else number_of(sent[1])
    )
    data: dict[bytes, bytes] = {}
    senders: dict[int, list[PackedPart]] = {}
    for rank, (sent, _) in enumerate(of_ranks):
        for part in sent.values():
            if part.digest not in data:
                data[part.digest] = part.data or b""
                if part.data is None:
                    senders.setdefault(rank, []).append(part)
    if senders:
        _receive(comm, senders, local, data)
    parts = [{kind: part.digest for kind, part in sent.items()} for sent, _ in of_ranks]
    return ExchangedTables([facts for _, facts in of_ranks], parts, data)


def _receive(
    comm: Comm,
    senders: Mapping[int, Sequence[PackedPart]],
    local: Mapping[bytes, bytes],
    data: dict[bytes, bytes],
) -> None:
    """Put what these ranks have to send to all into ``data``, by digest. Collective."""
    mine = b"".join(local[part.digest] for part in senders.get(comm.rank, ()))
    at_once = comm.all_gather(mine) if len(senders) * _RANKS_A_SENDER > comm.world_size else None
    for sender, parts in senders.items():
        if at_once is not None:
            stream = at_once[sender]
        else:
            tensor = torch.empty(sum(part.num_bytes for part in parts), dtype=torch.uint8)
            if sender == comm.rank:
                tensor.numpy()[:] = np.frombuffer(mine, np.uint8)
            tensor = tensor.to(comm.tensor_device)
            comm.broadcast_tensor(tensor, sender)
            stream = tensor.cpu().numpy().tobytes()
        begin = 0
        for part in parts:
            data[part.digest] = stream[begin : begin + part.num_bytes]
            begin += part.num_bytes


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
        shapes, chunks = index.global_shape_column, index.chunk_shape_column
        columns = index.keys_column, index.dtype_column, shapes, chunks
        rows = sorted(zip(*columns, strict=True), key=itemgetter(0))
        parts = [rows[i : i + _KEYS_A_BLOCK] for i in range(0, len(rows), _KEYS_A_BLOCK)]
        blocks = [_pack(part, index.pieces) for part in parts]
        return cls([part[-1][0] for part in parts], blocks, index.objects, index.codec)

    def keys(self) -> Iterator[str]:
        if self.whole is not None:
            yield from self.whole
        for block in self.blocks:
            yield from (row[0] for row in _unpack(block)[0])

    def index(self, keys: Collection[str] | None) -> Index:
        """The index of the tensors and objects with these keys, as far as they exist; None: all."""
        if self.whole is not None:
            return self.whole
        blocks, objects = self.blocks, self.objects
        if keys is not None:
            numbers = {bisect.bisect_left(self.last_keys, key) for key in keys}
            blocks = [blocks[number] for number in sorted(numbers - {len(blocks)})]
            objects = {key: objects[key] for key in keys if key in objects}
        rows: list[tuple[Any, ...]] = []
        pieces: list[PieceColumns] = []
        for block in blocks:
            of_block, some = _unpack(block)
            if keys is not None:
                of_block = (row for row in of_block if row[0] in keys)
                some = PieceColumns.of({key: some[key] for key in some if key in keys})
            rows += of_block
            pieces.append(some)
        columns = [*map(list, zip(*rows, strict=True))] or [[], [], [], []]
        names, dtypes, shapes, chunks = columns
        return Index(
            names, dtypes, shapes, chunks, PieceColumns.joined(pieces), objects, self.codec
        )


def _pack(rows: Sequence[tuple[Any, ...]], pieces: Mapping[str, Pieces]) -> bytes:
    """The columns of some tensors, and the pieces of those that are stored so."""
    columns = [*zip(*rows, strict=True)]
    some = PieceColumns.of({key: pieces[key] for key in columns[0] if key in pieces})
    tables = (
        np.stack([np.diff(some.starts), some.ndim], axis=1),
        some.offsets,
        some.shapes,
        some.flat,
    )
    packed = [(len(table), pack_columns(table.T)) for table in tables]
    return zlib.compress(pickle.dumps((columns, some.keys_column, packed)), _LEVEL)


def _unpack(block: bytes) -> tuple[Iterable[tuple[Any, ...]], PieceColumns]:
    columns, keys, packed = pickle.loads(zlib.decompress(block))  # noqa: S301 - from rank 0
    head, *tables = (unpack_columns(columns, rows).T for rows, columns in packed)
    starts = np.concatenate([[0], np.cumsum(head[:, 0])])
    return zip(*columns, strict=True), PieceColumns(keys, starts, head[:, 1], *tables)
