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
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Ints, PieceColumns, Pieces
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.sharded_tensor import fields_of
from dist_checkpointing.planning.shard_table import (
    Int32s,
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

    def keep(self, inputs: object, value: T, of_ranks: bytes) -> None:
        """Remember a value; ``of_ranks`` stands for what all ranks have sent for it."""
        self._hash = xxhash.xxh3_64_intdigest(of_ranks) >> 2
        self._inputs, self.value = inputs, value

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
            self.keep(inputs, value, b"".join(of_ranks))
        return value


def plan_inputs(leaves: Iterable[ShardedBase]) -> Iterable[Any]:
    """Everything about the leaves that a plan depends on, as values that cannot change."""
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            row = fields_of(leaf)
        else:
            assert isinstance(leaf, ShardedObject)
            row = (leaf.key, leaf.global_shape, leaf.global_offset, leaf.replica_id)
        if list in map(type, row):
            row = tuple(tuple(value) if type(value) is list else value for value in row)
        yield row


KINDS: Final = ("tensors", "flattened", "objects", "others")
"""The kinds of tables; a rank sends at most one of each."""
_HEAD: Final = np.dtype([("digests", "V16", 1 + len(KINDS)), ("sizes", "<i8", 1 + len(KINDS))])
"""A message begins with the digests and sizes of its parts, which are the facts and a table of each
kind, of size 0 if there is none. The facts follow, and those tables that are small."""
_INLINE_BYTES: Final = 1 << 24
"""What all ranks together may send of a kind in messages, so that few ranks need one step only."""
_RANKS_A_SENDER: Final = 8
"""If fewer ranks than one in so many have something to send, they send in turn; else all at once,
which takes as much room for every rank as for the one with most."""
_FACTS: Final = "facts"
_ALONE: Final = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """What some ranks, which ascend, hold alike; a table is packed unless a rank is alone."""

    value: T
    ranks: Int32s

    def table(self, rank: int) -> Any:
        """The value as a table of a rank, or of a set of ranks with this number."""
        value: Any = self.value
        if isinstance(value, bytes):
            return PackedTable(value, rank)
        return replace(value, ranks=np.full(len(value), rank, dtype=np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedTables(Generic[T]):
    """The facts and tables of all ranks, each distinct one once.

    Attributes:
        facts: The distinct facts, in order of the lowest ranks that have them.
        held: The distinct tables by their kind, in the same order.
        digests: What stands for all tables.
    """

    facts: Sequence[Held[T]]
    held: Mapping[str, Sequence[Held[Any]]]
    digests: bytes

    def facts_of_ranks(self) -> list[T]:
        of_ranks = {rank: own.value for own in self.facts for rank in own.ranks.tolist()}
        return [of_ranks[rank] for rank in range(len(of_ranks))]

    def tables_of_ranks(self, kind: str) -> list[ShardTable]:
        """The table of every rank: as many rows as all ranks have together."""
        held = self.held.get(kind, ())
        of_ranks = {rank: own.table(rank) for own in held for rank in own.ranks.tolist()}
        tables = (of_ranks[rank] for rank in range(len(of_ranks)))
        return [table.unpacked() if isinstance(table, PackedTable) else table for table in tables]

    def catalog(self, *kinds: str) -> ShardTable:
        """The distinct rows of all ranks, sorted by key, with the ranks that hold each."""
        held = [own for kind in kinds for own in self.held.get(kind, ())]
        held.sort(key=lambda own: int(own.ranks[0]))
        if all(len(own.ranks) == 1 for own in held):
            return concatenate([own.table(int(own.ranks[0])) for own in held])
        tables = [own.table(number) for number, own in enumerate(held)]
        return concatenate(tables, [own.ranks for own in held])


def packed_message(
    tables: Mapping[str, ShardTable], facts: object, num_ranks: int
) -> tuple[bytes, dict[bytes, bytes]]:
    """The message of one of so many ranks, and what it may have to send later, by digest."""
    parts = [pickle.dumps(facts)]
    parts += [pack(tables[kind]) if kind in tables else b"" for kind in KINDS]
    digests = [xxhash.xxh3_128_digest(part, slot) for slot, part in enumerate(parts)]
    head = b"".join([*digests, np.array([*map(len, parts)], dtype="<i8").tobytes()])
    late = {
        digest: part
        for digest, part in zip(digests[1:], parts[1:], strict=True)
        if len(part) * num_ranks > _INLINE_BYTES
    }
    now = zip(digests, parts, strict=True)
    return head + b"".join(part for digest, part in now if digest not in late), late


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
        alone = {kind: [Held(table, _ALONE)] for kind, table in tables.items()}
        return ExchangedTables([Held(facts, _ALONE)], alone, b"")
    local: dict[bytes, bytes] = {}
    number: int | None = None

    def message_of_rank() -> bytes:
        nonlocal number
        tables, facts = produce()
        number = None if tables else number_of(facts)
        message, late = packed_message(tables, facts, comm.world_size)
        local.update(late)
        return message

    messages = comm.exchange_bytes(step, message_of_rank, lambda: number)
    heads = np.frombuffer(b"".join([message[: _HEAD.itemsize] for message in messages]), _HEAD)
    digests, sizes = heads["digests"], heads["sizes"]
    parts = [(slot, *part) for slot in range(len(sizes.T)) for part in _distinct(digests.T[slot])]
    is_late = sizes * len(messages) > _INLINE_BYTES
    is_late[:, 0] = False
    senders: dict[int, list[tuple[bytes, int]]] = {}
    for slot, first, digest, _ in parts if is_late.any() else ():
        if is_late[first, slot]:
            senders.setdefault(first, []).append((digest, int(sizes[first, slot])))
    late = _received(comm, senders, local) if senders else {}
    begins = _HEAD.itemsize + np.where(is_late, 0, sizes).cumsum(axis=1) - sizes
    held: dict[str, list[Held[Any]]] = {}
    with paused_collector():
        for slot, first, digest, ranks in parts:
            begin, size = int(begins[first, slot]), int(sizes[first, slot])
            data = late.get(digest) or messages[first][begin : begin + size]
            if slot == 0:
                held.setdefault(_FACTS, []).append(Held(pickle.loads(data), ranks))  # noqa: S301
            elif data:
                held.setdefault(KINDS[slot - 1], []).append(Held(data, ranks))
    return ExchangedTables(held.pop(_FACTS), held, digests[:, 1:].tobytes())


def _distinct(digests: Any) -> Iterator[tuple[int, bytes, Int32s]]:
    """The lowest rank with each distinct digest, in order; the digest; all ranks that have it."""
    _, firsts, numbers = np.unique(digests, return_index=True, return_inverse=True)
    ranks = np.argsort(numbers, kind="stable").astype(np.int32)
    ranks_of = np.split(ranks, np.bincount(numbers).cumsum()[:-1])
    for number in np.argsort(firsts).tolist():
        yield int(firsts[number]), digests[firsts[number]].tobytes(), ranks_of[number]


def _received(
    comm: Comm, senders: Mapping[int, Sequence[tuple[bytes, int]]], local: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """What these ranks have to send to all, given as digests and sizes; by digest. Collective."""
    mine = b"".join(local[digest] for digest, _ in senders.get(comm.rank, ()))
    at_once = comm.all_gather(mine) if len(senders) * _RANKS_A_SENDER > comm.world_size else None
    received = {}
    for sender, parts in senders.items():
        if at_once is not None:
            stream = at_once[sender]
        else:
            tensor = torch.empty(sum(size for _, size in parts), dtype=torch.uint8)
            if sender == comm.rank:
                tensor.numpy()[:] = np.frombuffer(mine, np.uint8)
            tensor = tensor.to(comm.tensor_device)
            comm.broadcast_tensor(tensor, sender)
            stream = tensor.cpu().numpy().tobytes()
        begin = 0
        for digest, size in parts:
            received[digest] = stream[begin : begin + size]
            begin += size
    return received


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
        joined = PieceColumns.joined(pieces)
        return Index(names, dtypes, shapes, chunks, joined, objects, self.codec)


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
