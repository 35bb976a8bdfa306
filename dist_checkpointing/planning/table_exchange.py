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
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Ints, PieceColumns
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.sharded_tensor import fields_of
from dist_checkpointing.planning.shard_table import (
    Int32s,
    PackedTable,
    ShardTable,
    concatenate,
    pack,
    pack_column,
    unpack,
    unpack_column,
)

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


def number_of(values: object) -> int:
    """A number below 2**62 that stands for values whose ``repr`` does."""
    return xxhash.xxh3_64_intdigest(repr(values).encode()) >> 2


def plan_inputs(leaves: Iterable[ShardedBase]) -> Iterable[Any]:
    """Everything about the leaves that a plan depends on, as values that cannot change."""
    for leaf in leaves:
        data = leaf.data
        if isinstance(leaf, ShardedTensor):
            row = fields_of(leaf)
            if isinstance(data, torch.Tensor):
                row += (data.dtype, data.shape)
        elif isinstance(leaf, ShardedObject):
            row = (leaf.key, leaf.global_shape, leaf.global_offset, leaf.replica_id)
        else:
            row = (object(),)  # equal to nothing: let the planner say what is wrong with it
        yield (
            tuple(tuple(v) if type(v) is list else v for v in row)
            if list in map(type, row)
            else row
        )


_INLINE_BYTES = 1 << 24
"""What all ranks together may send with their digests, so that few ranks need one step only."""
_RANKS_A_SENDER = 8
"""If fewer ranks than one in so many have something to send, they send in turn; else all at once,
which takes as much room for every rank as for the one with most."""


class PackedPart(NamedTuple):
    """A part of a rank's table on its way: a digest of its kind and bytes, and these if few."""

    kind: str
    digest: bytes
    num_bytes: int
    data: bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedTables(Generic[T]):
    """The tables and facts of all ranks, each distinct part once, by its digest.

    Parts are in the order of the lowest ranks that hold them; ``holders`` ascend. Those of a rank
    that is alone are not packed.
    """

    facts: Sequence[T]
    parts: Sequence[Sequence[PackedPart]]
    data: Mapping[bytes, bytes | ShardTable]
    holders: Mapping[bytes, Int32s]

    def catalog(self, *kinds: str) -> ShardTable:
        """The distinct rows of all ranks, sorted by key, with the ranks that hold each."""
        chosen = dict.fromkeys(
            part.digest for parts in self.parts for part in parts if part.kind in kinds
        )
        tables: list[ShardTable | PackedTable] = []
        for number, digest in enumerate(chosen):
            data = self.data[digest]
            if isinstance(data, bytes):
                tables.append(PackedTable(data, number))
            else:
                tables.append(replace(data, ranks=np.full(len(data), number, dtype=np.int32)))
        return concatenate(tables, [self.holders[digest] for digest in chosen])

    def tables(self, *kinds: str) -> list[ShardTable]:
        """The table of every rank: as many rows as all ranks have together."""
        tables = []
        for rank, parts in enumerate(self.parts):
            data = [self.data[part.digest] for part in parts if part.kind in kinds]
            unpacked = [t if isinstance(t, ShardTable) else unpack(t, rank) for t in data]
            tables.append(unpacked[0] if len(unpacked) == 1 else concatenate(unpacked))
        return tables

    @property
    def digests(self) -> list[bytes]:
        """What stands for the table of each rank."""
        return [b"".join(part.digest for part in parts) for parts in self.parts]


def pack_tables(
    tables: Mapping[str, ShardTable], num_ranks: int
) -> tuple[list[PackedPart], dict[bytes, bytes]]:
    """The tables of one of so many ranks, as it sends them; and their bytes by digest."""
    parts, bytes_of = [], {}
    for kind, table in tables.items():
        data = pack(table)
        digest = xxhash.xxh3_128_digest(kind.encode() + b"\0" + data)
        is_small = len(data) * num_ranks <= _INLINE_BYTES
        parts.append(PackedPart(kind, digest, len(data), data if is_small else None))
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
    local: dict[bytes, bytes] = {}

    def parts_of_rank() -> tuple[list[PackedPart], T]:
        nonlocal local
        tables, facts = produce()
        parts, local = pack_tables(tables, comm.world_size)
        return parts, facts

    if comm.world_size == 1:
        return _of_one_rank(*comm.exchange(step, produce)[0])

    of_ranks = comm.exchange(
        step, parts_of_rank, lambda sent: None if sent[0] else number_of(sent[1])
    )
    distinct: dict[bytes, PackedPart] = {}
    ranks: dict[bytes, list[int]] = {}
    for rank, (parts, _) in enumerate(of_ranks):
        for part in parts:
            distinct.setdefault(part.digest, part)
            ranks.setdefault(part.digest, []).append(rank)
    senders: dict[int, list[PackedPart]] = {}
    for digest, part in distinct.items():
        if part.data is None:
            senders.setdefault(ranks[digest][0], []).append(part)
    sent = _sent(comm, senders, local) if senders else {}
    return ExchangedTables(
        [facts for _, facts in of_ranks],
        [parts for parts, _ in of_ranks],
        {digest: sent.get(digest) or part.data or b"" for digest, part in distinct.items()},
        {digest: np.array(held, dtype=np.int32) for digest, held in ranks.items()},
    )


def _of_one_rank(tables: Mapping[str, ShardTable], facts: T) -> ExchangedTables[T]:
    parts = [PackedPart(kind, kind.encode(), 0, None) for kind in tables]
    data = {kind.encode(): table for kind, table in tables.items()}
    return ExchangedTables([facts], [parts], data, dict.fromkeys(data, np.zeros(1, dtype=np.int32)))


def _sent(
    comm: Comm, senders: Mapping[int, Sequence[PackedPart]], local: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """What these ranks have to send to all, by digest. Collective."""
    mine = b"".join(local[part.digest] for part in senders.get(comm.rank, ()))
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
            yield from _keys_of(block)

    def index(self, keys: Collection[str] | None) -> Index:
        """The index of the tensors and objects with these keys, as far as they exist; None: all."""
        if self.whole is not None:
            return self.whole
        if keys is None:
            wanted: Sequence[int] = range(len(self.blocks))
            objects = self.objects
        else:
            blocks = {bisect.bisect_left(self.last_keys, key) for key in keys}
            wanted = sorted(blocks - {len(self.blocks)})
            objects = {key: self.objects[key] for key in keys if key in self.objects}
        parts = [_index_of(self.blocks[number], keys) for number in wanted]
        return replace(_joined(parts), objects=objects, codec=self.codec)


def _pack(index: Index, pieces: PieceColumns, rows: list[int]) -> bytes:
    keys = [index.keys_column[row] for row in rows]
    names = {name: i for i, name in enumerate(dict.fromkeys(index.dtype_column[r] for r in rows))}
    some = PieceColumns.of({key: pieces[key] for key in keys if key in pieces})
    dtypes = [names[index.dtype_column[row]] for row in rows]
    ndim = [len(index.global_shape_column[row]) for row in rows]
    tables = (
        np.array([dtypes, ndim, index.has_grid[rows]], dtype=np.int64).T,
        index.global_shapes[rows],
        index.chunk_shapes[rows],
        np.diff(some.starts).reshape(-1, 1),
        some.offsets,
        some.shapes,
        some.flat,
    )
    packed = [(len(table), [*map(pack_column, table.T)]) for table in tables]
    return zlib.compress(pickle.dumps((keys, [*names], packed)), _LEVEL)


def _keys_of(block: bytes) -> Sequence[str]:
    keys: Sequence[str] = pickle.loads(zlib.decompress(block))[0]  # noqa: S301 - from rank 0
    return keys


def _index_of(block: bytes, wanted: Collection[str] | None) -> Index:
    """The tensors of a block with these keys; None: all."""
    keys, names, packed = pickle.loads(zlib.decompress(block))  # noqa: S301 - from rank 0
    kinds, shapes, chunks, counts, offsets, boxes, flat = (
        np.array([unpack_column(column, 0, rows) for column in columns], dtype=np.int64)
        .reshape(len(columns), rows)
        .T
        for rows, columns in packed
    )
    chosen = [i for i, key in enumerate(keys) if wanted is None or key in wanted]
    dtypes, ndim, has_grid = kinds.T
    axes = ndim.tolist()
    in_pieces = np.flatnonzero(has_grid == 0)
    is_chosen = np.isin(in_pieces, chosen)
    rows = np.repeat(is_chosen, counts[:, 0])
    in_pieces = in_pieces[is_chosen]
    return Index(
        [keys[i] for i in chosen],
        [names[dtypes[i]] for i in chosen],
        [tuple(shapes[i, : axes[i]].tolist()) for i in chosen],
        [tuple(chunks[i, : axes[i]].tolist()) if has_grid[i] else None for i in chosen],
        PieceColumns(
            [keys[i] for i in in_pieces.tolist()],
            np.concatenate([[0], np.cumsum(counts[is_chosen])]),
            ndim[in_pieces],
            offsets[rows],
            boxes[rows],
            flat[rows],
        ),
    )


def _joined(parts: Sequence[Index]) -> Index:
    chained = itertools.chain.from_iterable
    return Index(
        [*chained(part.keys_column for part in parts)],
        [*chained(part.dtype_column for part in parts)],
        [*chained(part.global_shape_column for part in parts)],
        [*chained(part.chunk_shape_column for part in parts)],
        PieceColumns.joined([PieceColumns.of(part.pieces) for part in parts]),
    )
