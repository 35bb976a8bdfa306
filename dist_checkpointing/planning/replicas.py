"""Which ranks hold copies of the same part of a global tensor, and whether the copies are equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Literal

import numpy as np
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format import dtypes
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning.agreed_cache import AgreedCache
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.exchange import exchange_tables
from dist_checkpointing.planning.plan_save import described
from dist_checkpointing.planning.shard_table import (
    Bools,
    Int32s,
    Int64s,
    ShardTable,
    concatenate,
)

logger: logging.Logger = logging.getLogger(__name__)

SAMPLES: Final = 16
"""Saves after which ``ReplicaCheck.SAMPLE`` has looked at everything."""
_WHOLE_BYTES: Final = 1 << 20
"""A smaller copy is looked at as a whole, in one of the saves."""
_PIECE_BYTES: Final = 1 << 24
_KEPT_AS: Final = "replicas"
_DIGEST: Final = np.dtype([("part", "<i4"), ("digest", "V16")])
_MOST_NAMED: Final = 16

OnReplicaMismatch = Literal["raise", "warn"]


class ReplicaCheck(Enum):
    """How much of the replicas a save compares before it writes.

    Attributes:
        OFF: nothing.
        SAMPLE: another sixteenth at each save, so that sixteen saves look at everything.
        ALL: everything.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ReplicaCheck, ShardedTensor, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", replicas=ReplicaCheck.ALL)
    """

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The distinct parts that ranks hold: those with the same key, dtype, box and flattened range.

    It is the same on all ranks, but for ``own``. With ``D`` distinct rows of all ranks it takes
    ``O(D)`` memory, whatever the number of replicas.

    Attributes:
        parts: One row a part, sorted by key, with the lowest rank that holds it.
        rows: Rows of the catalog, part by part.
        begins: ``[parts + 1]``, where the rows of each part begin.
        catalog: The shards of all ranks.
        own: ``[rows of this rank]``, the part that each is.
    """

    parts: ShardTable
    rows: Int64s
    begins: Int64s
    catalog: ShardTable
    own: Int64s

    @property
    def has_copies(self) -> Bools:
        """``[parts]``, whether several ranks hold a part, or one of them twice."""
        sizes = np.ones(len(self.rows), dtype=np.int64)
        if self.catalog.holders is not None:
            held = np.array([len(ranks) for ranks in self.catalog.holders], dtype=np.int64)
            sizes = held[self.catalog.ranks[self.rows]]
        return np.add.reduceat(sizes, self.begins[:-1]) > 1 if len(self.parts) else sizes > 1

    @property
    def num_apart(self) -> int:
        """Number of parts of replicas that no main replica is cut like."""
        if not len(self.parts):
            return 0
        is_main = np.logical_or.reduceat(self.catalog.main[self.rows], self.begins[:-1])
        return int((~is_main).sum())

    def holders(self, part: int) -> Int32s:
        """All ranks that hold a part, ascending."""
        return self.catalog.ranks_of(self.rows[self.begins[part] : self.begins[part + 1]])


def copies_of(catalog: ShardTable, own: ShardTable) -> Copies:
    """Find the copies.

    Args:
        catalog: The shards of all ranks, sorted by key.
        own: Those of this rank.
    """
    marked = [
        replace(table, ranks=np.full(len(table), rank, np.int32), sources=_numbers(table))
        for rank, table in enumerate((catalog, own))
    ]
    both = concatenate([replace(table, holders=None) for table in marked])
    columns = [both.keys, both.dtypes, *both.offsets.T, *both.shapes.T, *both.flat.T]
    order = np.lexsort([both.ranks, *columns[::-1]])
    both = both.take(order)
    is_new = np.ones(len(both), dtype=np.bool_)
    is_new[1:] = False
    for column in (both.keys, both.dtypes, *both.offsets.T, *both.shapes.T, *both.flat.T):
        is_new[1:] |= column[1:] != column[:-1]
    number = np.cumsum(is_new) - 1
    is_own = both.ranks == 1
    own_parts = np.empty(len(own), dtype=np.int64)
    own_parts[both.sources[is_own]] = number[is_own]
    rows = both.sources[~is_own].astype(np.int64)
    begins = np.searchsorted(number[~is_own], np.arange(int(is_new.sum()) + 1))
    parts = both.take(is_new)
    if len(parts):
        first = _first_ranks(catalog)[rows]
        parts = replace(parts, ranks=np.minimum.reduceat(first, begins[:-1]))
    return Copies(parts, rows, begins, catalog, own_parts)


def _numbers(table: ShardTable) -> Int32s:
    return np.arange(len(table), dtype=np.int32)


def _first_ranks(catalog: ShardTable) -> Int32s:
    """The lowest rank that holds each row."""
    if catalog.holders is None:
        return catalog.ranks
    return np.array([held[0] for held in catalog.holders], dtype=np.int32)[catalog.ranks]


class _Kept:
    """What a process keeps for its ranks between saves."""

    def __init__(self) -> None:
        self.copies: AgreedCache[Copies] = AgreedCache()
        self.num_samples = 0


def compare_replicas(
    shards: Sequence[ShardedTensor], check: ReplicaCheck, on_mismatch: OnReplicaMismatch, comm: Comm
) -> None:
    """Compare the copies that ranks hold of the same parts. Collective.

    Each rank digests its copies of parts that several ranks hold. Of each part the lowest rank
    tells its digest, 16 bytes, and the others compare. Copies that are cut differently are not
    compared with each other; their number is logged.

    Args:
        shards: Of this rank.
        check: How much is compared.
        on_mismatch: What happens if copies differ: all ranks raise, or rank 0 logs it.
        comm: Ranks that save together.

    Raises:
        InvalidShardingError: naming each part whose copies differ, and which ranks agree.
    """
    if check is ReplicaCheck.OFF or comm.world_size == 1:
        return
    held = [shard for shard in shards if shard.data is not None]
    kept: _Kept = comm.kept.setdefault(_KEPT_AS, _Kept())
    copies = _copies(held, kept.copies, comm)
    sample = None
    if check is ReplicaCheck.SAMPLE:
        sample = comm.broadcast(kept.num_samples) % SAMPLES
        kept.num_samples += 1
    own: list[tuple[int, bytes]] = []

    def tell() -> bytes:
        wanted = copies.has_copies.tolist()
        speakers = copies.parts.ranks.tolist()
        for shard, part in zip(held, copies.own.tolist(), strict=True):
            if wanted[part]:
                digest = _digest(shard, part, sample)
                if digest is not None:
                    own.append((part, digest))
        spoken = {part: digest for part, digest in own if speakers[part] == comm.rank}
        return _packed(spoken.items())

    told = dict(_unpacked(b"".join(comm.exchange("comparing replicas", tell))))
    others = [(part, digest) for part, digest in own if told[part] != digest]
    different = [dict(_unpacked(data)) for data in comm.all_gather(_packed(others))]
    if comm.rank == 0 and copies.num_apart:
        logger.info("%d parts of replicas are cut differently: not compared", copies.num_apart)
    if not any(different):
        return
    message = "replicas hold different values"
    error = InvalidShardingError(message, [*_mismatches(copies, told, different)])
    if on_mismatch == "raise":
        raise error
    if comm.rank == 0:
        logger.warning("%s", error)


def _copies(shards: Sequence[ShardedTensor], cache: AgreedCache[Copies], comm: Comm) -> Copies:
    """The copies of the ranks; those of the last save, while nothing but values has changed."""
    with comm.agreed("describing the shards"):
        description = (comm.rank, comm.world_size, *described(shards))
    if comm.all_same(cache.number_of(description)):
        assert cache.value is not None
        return cache.value
    own: list[ShardTable] = []

    def describe_own() -> tuple[dict[str, ShardTable], None]:
        own.append(describe(shards, comm.rank))
        return {"shards": own[0]}, None

    exchanged = exchange_tables(comm, "describing the shards", describe_own)
    with comm.agreed("looking for replicas"):
        copies = copies_of(exchanged.catalog("shards"), own[0])
        number = xxhash.xxh3_64_intdigest(b"".join(exchanged.digests)) >> 2
        cache.keep(description, copies, number)
    return copies


def _digest(shard: ShardedTensor, part: int, sample: int | None) -> bytes | None:
    """128 bits that stand for the values of a copy, or of a sample; None if that is empty."""
    assert shard.data is not None
    values = shard.data.detach().reshape(-1)
    begin, end = 0, len(values)
    if sample is not None and values.nbytes < _WHOLE_BYTES:
        end = end if part % SAMPLES == sample else 0
    elif sample is not None:
        begin, end = len(values) * sample // SAMPLES, len(values) * (sample + 1) // SAMPLES
    if begin == end:
        return None
    digest = xxhash.xxh3_128()
    # Of a tensor on a GPU no more than a piece is in memory at a time.
    step = end if values.is_cpu else _PIECE_BYTES // values.itemsize
    for start in range(begin, end, step):
        piece = values[start : min(end, start + step)]
        digest.update(memoryview(dtypes.as_numpy(piece.cpu().contiguous()).view(np.uint8)))  # type: ignore[arg-type]
    return digest.digest()


def _packed(rows: Any) -> bytes:
    return np.array([*rows], dtype=_DIGEST).tobytes()


def _unpacked(data: bytes) -> Iterator[tuple[int, bytes]]:
    rows = np.frombuffer(data, dtype=_DIGEST)
    return zip(rows["part"].tolist(), map(bytes, rows["digest"]), strict=True)


def _mismatches(
    copies: Copies, told: dict[int, bytes], different: Sequence[dict[int, bytes]]
) -> Iterator[Finding]:
    """What to say of each part whose copies differ; the same on all ranks."""
    parts = copies.parts
    for part in sorted({part for of_rank in different for part in of_rank}):
        agreeing: dict[bytes, list[int]] = {}
        for rank in copies.holders(part).tolist():
            agreeing.setdefault(different[rank].get(part, told[part]), []).append(rank)
        most, *rest = sorted(agreeing.values(), key=lambda ranks: (-len(ranks), ranks))
        box, flat = parts.box(part), parts.flat_range(part)
        where = f"{box.offset} .. {box.stop}" + ("" if flat is None else f", {flat[0]}:{flat[1]}")
        yield Finding(
            f"the copies of {where} are not the same",
            parts.key(part),
            expected=f"as on {_named(most)}",
            found="; ".join(f"other values on {_named(ranks)}" for ranks in rest),
            ranks=tuple(rank for ranks in rest for rank in ranks)[:_MOST_NAMED],
            remedy="Load the last checkpoint on all ranks, and look at the machine of these ranks.",
        )


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
