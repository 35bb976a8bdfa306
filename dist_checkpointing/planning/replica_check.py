"""Whether the copies that ranks hold of the same part of a global tensor are equal."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, ranks_text
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.dtypes import from_name
from dist_checkpointing.format.geometry import PieceColumns, Window
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor, tensor_memory
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.resharding import plan_load
from dist_checkpointing.planning.shard_table import Bools, Int32s, Int64s, ShardTable, describe
from dist_checkpointing.planning.table_exchange import AgreedCache, exchange_tables, plan_inputs

logger: logging.Logger = logging.getLogger(__name__)

SAMPLES: Final = 16
"""Saves after which ``ReplicaCheck.SAMPLE`` has compared everything."""
_WHOLE_BYTES: Final = 1 << 20
"""A smaller copy is compared as a whole, in one of the saves."""
_BLOCK_BYTES: Final = 1 << 24
_CACHE_NAME: Final = "replicas"
_MAX_RANKS: Final = 16
_STEP: Final = "comparing replicas"

OnReplicaMismatch = Literal["raise", "warn"]


class ReplicaCheck(Enum):
    """How much of the replicas of tensors a save compares before it writes.

    Attributes:
        OFF: Nothing.
        SAMPLE: Another sixteenth at each save, so that sixteen saves look at everything.
        ALL: Everything.

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

    ``parts`` has one row a part, sorted by key, with the lowest rank that holds it. ``rows`` are
    those of the catalog of all ranks, part by part, from ``begins`` on; ``local`` is the part that
    each row of this rank is. But for ``local`` it is the same on all ranks. With ``D`` distinct
    rows of all ranks it takes ``O(D)`` memory, whatever the number of replicas.

    ``cut``, ``[boxes, 2]``, has the boxes that a part without main replica shares with one that is
    cut in another way, and written: these two parts. ``reads`` says where each box lies in the
    memory of the one (``dest``) and of the other (``storage``). See ``with_boxes``.
    """

    parts: ShardTable
    rows: Int64s
    begins: Int64s
    catalog: ShardTable
    local: Int64s
    cut: Int64s
    reads: ReadTable

    @property
    def has_main(self) -> Bools:
        """``[parts]``, whether a main replica is among the copies of a part."""
        mains = self.catalog.main[self.rows]
        return np.logical_or.reduceat(mains, self.begins[:-1]) if len(mains) else mains

    @property
    def has_copies(self) -> Bools:
        """``[parts]``, whether several ranks hold a part, or one of them twice."""
        held = np.array([*map(len, self.catalog.rank_sets)], dtype=np.int64)
        sizes = held[self.catalog.ranks[self.rows]]
        return np.add.reduceat(sizes, self.begins[:-1]) > 1 if len(self.parts) else sizes > 1

    def holders(self, part: int) -> Int32s:
        """All ranks that hold a part, ascending; of a box, numbered on from the parts, one each."""
        if part >= len(self.parts):
            return np.unique(self.parts.ranks[self.cut[part - len(self.parts)]])
        return self.catalog.ranks_of(self.rows[self.begins[part] : self.begins[part + 1]])


def copies_of(catalog: ShardTable, rank: int) -> Copies:
    """Find the copies in what all ranks hold, for one of them.

    The catalog is that of exchanged tables, in which each rank numbered its rows from 0.
    """
    rows, is_new = catalog.by_part()
    begins = np.append(np.flatnonzero(is_new), len(rows))
    part_of_row = np.empty(len(rows), dtype=np.int64)
    part_of_row[rows] = np.cumsum(is_new) - 1
    holders = catalog.rank_sets
    is_local = np.array([rank in held for held in holders], dtype=np.bool_)[catalog.ranks]
    local = np.empty(int(is_local.sum()), dtype=np.int64)
    local[catalog.sources[is_local]] = part_of_row[is_local]
    parts = catalog.take(rows[is_new])
    if len(parts):
        first = np.array([held[0] for held in holders], dtype=np.int32)[catalog.ranks[rows]]
        parts = replace(parts, ranks=np.minimum.reduceat(first, begins[:-1]), holders=None)
    no_boxes = np.empty((0, 2), dtype=np.int64)
    return Copies(parts, rows, begins, catalog, local, no_boxes, ReadTable.of(()))


def with_boxes(copies: Copies) -> Copies:
    """The same with what the parts have in common that are cut in different ways."""
    parts = copies.parts
    is_other = ~parts.is_object & (parts.num_elements > 0) & (parts.ndim > 0)
    is_main = is_other & copies.has_main
    is_other &= ~is_main & np.isin(parts.keys, parts.keys[is_main])
    if not is_other.any():
        return copies
    others = np.flatnonzero(is_other)
    mains = np.flatnonzero(is_main & np.isin(parts.keys, parts.keys[others]))
    written = parts.take(mains)
    firsts, starts = written.starts, np.append(written.starts, len(written))
    names, ndim = [*map(written.key, firsts)], written.ndim[firsts].astype(np.int64)
    boxes = written.offsets, written.shapes, written.flat
    index = Index(
        names,
        [*map(written.dtype, firsts)],
        [*map(written.global_shape, firsts)],
        [None] * len(names),
        PieceColumns(names, starts, ndim, *boxes),
    )
    reads, _ = plan_load(index, [_template(parts, part) for part in others.tolist()])
    first = starts[index.rows_of(reads.names)][reads.keys]
    cut = np.stack([others[reads.sources], mains[first + reads.pieces]], axis=1)
    dtypes = parts.dtypes[cut]  # if they differ, the plan is refused
    is_same = dtypes[:, 0] == dtypes[:, 1]
    return replace(copies, cut=cut[is_same], reads=reads.take(is_same))


def _template(parts: ShardTable, part: int) -> ShardedTensor:
    box, flat, dtype = parts.box(part), parts.flat_range(part), from_name(parts.dtype(part))
    places = box.shape, parts.global_shape(part), box.offset, None
    flattened = None if flat is None else slice(*flat)
    return ShardedTensor(parts.key(part), None, dtype.torch, *places, flattened_range=flattened)


class _Cache(AgreedCache[Copies]):
    """What a process keeps for its ranks between saves."""

    num_samples = 0


def compare_replicas(
    leaves: Iterable[ShardedBase], check: ReplicaCheck, on_mismatch: OnReplicaMismatch, comm: Comm
) -> None:
    """Compare the copies that all ranks hold of the same parts. Collective.

    Each rank digests its copies of parts that are held more than once. Of each part the lowest rank
    sends its digest, 16 bytes, and the others compare.

    Raises:
        InvalidShardingError: naming each part whose copies differ, and which ranks agree.
    """
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor) and leaf.data is not None]
    cache: _Cache = comm.kept.setdefault(_CACHE_NAME, _Cache())
    inputs = comm.rank, comm.world_size, *plan_inputs(shards)
    copies, sample = cache.value, None
    if not comm.all_same(cache.hash_if_cached(inputs)) or copies is None:
        tables = exchange_tables(
            comm, "describing the shards", lambda: ({"tensors": describe(shards, comm.rank)}, None)
        )
        with comm.agreed("looking for replicas"):
            copies = with_boxes(copies_of(tables.catalog("tensors"), comm.rank))
            cache.keep(inputs, copies, tables.digests)
    if check is ReplicaCheck.SAMPLE:
        number = comm.broadcast(cache.num_samples)
        sample, cache.num_samples = number % SAMPLES, number + 1
    held: dict[int, set[bytes]] = {}

    def digests_of_rank() -> dict[int, bytes]:
        """Of the parts of which this rank is the lowest holder."""
        of_parts = [*_digests(shards, copies, comm.rank, sample)]
        for part, digest in of_parts:
            held.setdefault(part, set()).add(digest)
        ranks = copies.parts.ranks
        holders = np.concatenate([ranks, ranks[copies.cut].min(axis=1)])
        return {part: digest for part, digest in of_parts if holders[part] == comm.rank}

    of_ranks = comm.exchange(_STEP, digests_of_rank)
    lowest = {part: digest for digests in of_ranks for part, digest in digests.items()}
    differing = {part: found for part, found in held.items() if found != {lowest[part]}}
    if comm.all_same(None if differing else 0):
        return
    of_all = comm.all_gather(differing)
    parts = sorted({part for of_rank in of_all for part in of_rank})
    findings = [_finding(copies, part, lowest[part], of_all) for part in parts]
    error = InvalidShardingError("replicas hold different values", findings)
    if on_mismatch == "raise":
        raise error
    if comm.rank == 0:
        logger.warning("%s", error)


def _digests(
    shards: Iterable[ShardedTensor], copies: Copies, rank: int, sample: int | None
) -> Iterator[tuple[int, bytes]]:
    """The number of each part or box of which this rank holds a copy, and the digest of that."""
    has_copies, boxes_of = copies.has_copies.tolist(), dict[int, list[tuple[int, Window]]]()
    for box, side in np.argwhere(copies.parts.ranks[copies.cut] == rank).tolist():
        window = (copies.reads.storage if side else copies.reads.dest)(box)
        boxes_of.setdefault(int(copies.cut[box, side]), []).append((box, window))
    for shard, part in zip(shards, copies.local.tolist(), strict=True):
        if not has_copies[part] and part not in boxes_of:
            continue
        assert shard.data is not None
        values = shard.data.detach().reshape(-1)
        compared = [(part, values)] if has_copies[part] else []
        for box, place in boxes_of.get(part, ()):
            array = values[place.start : place.start + place.array_size].view(place.shape)
            compared.append((len(has_copies) + box, array[place.box.slices()].reshape(-1)))
        for number, own in compared:
            if len(sampled := _sampled(own, number, sample)):
                yield number, digest_of_values(sampled)


def _sampled(values: torch.Tensor, part: int, sample: int | None) -> torch.Tensor:
    """The values that are compared; all if there is no sample."""
    if sample is None:
        return values
    if values.nbytes < _WHOLE_BYTES:
        return values if part % SAMPLES == sample else values[:0]
    return values[len(values) * sample // SAMPLES : len(values) * (sample + 1) // SAMPLES]


def digest_of_values(values: torch.Tensor) -> bytes:
    """128 bits that stand for 1-D values on any device."""
    digest = xxhash.xxh3_128()
    # Of a tensor on a GPU no more than a block is in memory at a time.
    step = len(values) if values.is_cpu else _BLOCK_BYTES // values.itemsize
    for start in range(0, len(values), step):
        block = values[start : start + step].cpu().contiguous()
        digest.update(bytes_of(tensor_memory.as_numpy(block)))
    return digest.digest()


def _finding(
    copies: Copies, part: int, lowest: bytes, differing: Sequence[Mapping[int, set[bytes]]]
) -> Finding:
    """What to say of a part whose copies differ; the same on all ranks."""
    agreeing: dict[bytes, list[int]] = {}
    mixed: list[int] = []
    for rank in copies.holders(part).tolist():
        digests = differing[rank].get(part, {lowest})
        same = mixed if len(digests) > 1 else agreeing.setdefault(next(iter(digests)), [])
        same.append(rank)
    groups = sorted(agreeing.values(), key=lambda ranks: (-len(ranks), ranks))
    found = [f"other values on {ranks_text(ranks, _MAX_RANKS)}" for ranks in groups[1:]]
    if mixed:
        found.append(f"copies that differ on {ranks_text(mixed, _MAX_RANKS)}")
    number, how = part, ""
    if part >= len(copies.parts):
        number, how = int(copies.cut[part - len(copies.parts), 0]), ", sharded differently,"
    flat = copies.parts.flat_range(number)
    where = str(copies.parts.box(number)) + ("" if flat is None else f", {flat[0]}:{flat[1]}")
    return Finding(
        f"the copies of {where}{how} are not the same",
        copies.parts.key(number),
        expected=f"as on {ranks_text(groups[0], _MAX_RANKS)}" if groups else None,
        found="; ".join(found),
        ranks=tuple(rank for ranks in (*groups[1:], mixed) for rank in ranks)[:_MAX_RANKS],
        remedy="Load the last checkpoint on all ranks, and look at the machine of these ranks.",
    )
