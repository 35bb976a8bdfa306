"""Which holder of a replica writes it, or reads it for the others: equal bytes for each rank.

The order in which parts are assigned, and the rule by which a rank is chosen, are those of
``distribute_shards_to_ranks``; for a catalog the same is done on arrays.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.planning.chunking import Layout, RowBlockLayout, index_of
from dist_checkpointing.planning.items import SavePlan
from dist_checkpointing.planning.planners import DefaultSavePlanner
from dist_checkpointing.planning.shard_table import Int32s, Int64s, Integers, ShardTable, counted

ShardId = TypeVar("ShardId", bound=Hashable)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[ShardId, Sequence[int]],
    shard_to_size: Mapping[ShardId, int],
    num_ranks: int,
    cross_parallelization_group_loads: AbstractSet[ShardId],
) -> dict[ShardId, int]:
    """One of its ranks for every shard, so that all ranks get about the same number of bytes.

    Shards that belong to another group come last; of the others those that fewer ranks hold come
    first, then larger ones, then smaller ids. Each goes to its rank with the fewest bytes so far,
    or the lowest of these.

    Args:
        shard_to_ranks: the ranks that hold a shard, at least one.
        shard_to_size: bytes of a shard.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: shards that belong to another group.

    Returns:
        Shard -> rank, in the order in which they were assigned.

    Example:
        >>> from dist_checkpointing.planning import distribute_shards_to_ranks
        >>> distribute_shards_to_ranks({"a": [0, 1], "b": [0, 1]}, {"a": 8, "b": 4}, 2, set())
        {'a': 0, 'b': 1}
    """

    def order(shard: ShardId) -> Any:
        ranks = len(shard_to_ranks[shard])
        return shard in cross_parallelization_group_loads, ranks, -shard_to_size[shard], shard

    shards = sorted(shard_to_ranks, key=order)
    sets = [tuple(shard_to_ranks[shard]) for shard in shards]
    sizes = (shard_to_size[shard] for shard in shards)
    return dict(zip(shards, _assigned(sets, enumerate(sizes), [0] * num_ranks), strict=True))


def _assigned(
    sets: Sequence[tuple[int, ...]], units: Iterable[tuple[int, int]], loads: list[int]
) -> Iterator[int]:
    """A rank for each unit (position of its ranks in ``sets``, size) in turn; updates ``loads``.

    The heap of a set of ranks may say too little of some, whose load grew through another set. As
    loads only grow, the top is the least loaded rank once what it says of that one is true.
    """
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    of_set = [heaps.setdefault(ranks, []) for ranks in sets]
    for number, size in units:
        heap = of_set[number]
        if not heap:
            heap += [(loads[rank], rank) for rank in sets[number]]
            heapq.heapify(heap)
        load, rank = heap[0]
        while load != loads[rank]:
            heapq.heapreplace(heap, (loads[rank], rank))
            load, rank = heap[0]
        loads[rank] += size
        yield rank


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """The distinct parts of tensors that have one main replica, and the rows that hold each.

    A part is a box (or a flattened range of one) of a tensor. Parts are in order of key, place,
    flattened range and shape. There is a row for each rank, or set of ranks, that holds a part;
    those of one part are together, from ``starts`` on, the lowest rank first.
    """

    rows: Int64s
    starts: Int64s
    main_rows: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class HolderSets:
    """The distinct sets of ranks that hold a part. There are few, however many ranks and parts.

    The ranks of a set are together and ascend, from ``starts`` on.
    """

    ranks: Int32s
    starts: Int64s
    of_part: Int64s

    @classmethod
    def of(cls, table: ShardTable, replicas: Replicas, groups: Int64s) -> HolderSets:
        """Who holds each part, of the ranks that are in the group of its main replica."""
        numbers, holders = table.ranks[replicas.rows], table.rank_sets
        home = groups[table.take(replicas.main_rows).of_ranks().ranks]
        known: dict[tuple[bytes, int], int] = {}
        packed, bounds = numbers.tobytes(), (replicas.starts * numbers.itemsize).tolist()
        parts = zip(itertools.pairwise(bounds), home.tolist(), strict=True)
        keys = ((packed[begin:end], number) for (begin, end), number in parts)
        of_part = np.fromiter((known.setdefault(key, len(known)) for key in keys), np.int64)
        sets = []
        for own, of_home in known:
            held = [holders[number] for number in np.frombuffer(own, numbers.dtype).tolist()]
            ranks = np.sort(np.concatenate(held))
            sets.append(ranks[groups[ranks] == of_home])
        ranks = np.concatenate([np.empty(0, dtype=np.int32), *sets])
        return cls(ranks, _starts(np.array([*map(len, sets)], dtype=np.int64)), of_part)


def rows_of_ranks(table: ShardTable, replicas: Replicas, parts: Int64s, ranks: Int32s) -> Int64s:
    """The rows by which some ranks hold some parts; ``parts`` and ``ranks`` are of one length."""
    # Every rank stands in a few sets, and one of them is that of the row.
    holders = table.rank_sets
    sets, _ = counted(np.array([*map(len, holders)], dtype=np.int64))
    members = np.concatenate([np.empty(0, dtype=np.int32), *holders])
    order = np.argsort(members, kind="stable")
    members, sets = members[order], sets[order]
    first, last = (np.searchsorted(members, ranks, side) for side in ("left", "right"))
    origins, place = counted(last - first)
    of_row, _ = counted(np.diff(replicas.starts))
    held = of_row * len(holders) + table.ranks[replicas.rows]
    asked = parts[origins] * len(holders) + sets[first[origins] + place]
    found = np.minimum(np.searchsorted(held, asked), len(held) - 1)
    is_held = held[found] == asked
    rows = np.full(len(parts), -1, dtype=np.int64)
    rows[origins[is_held]] = replicas.rows[found[is_held]]
    return rows


def _starts(counts: Int64s) -> Int64s:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def find_replicas(catalog: ShardTable) -> Replicas:
    """Who holds what of all tensors, in a table that is sorted by key, and then by rank.

    Parts without exactly one main replica (which the check of the shards is about) are left out.
    """
    rows = np.flatnonzero((catalog.num_elements > 0) & ~catalog.is_object)
    own = catalog.take(rows)
    order, begins = own.by_part()
    part = np.cumsum(begins) - 1
    main = own.main[order]
    num_holders = np.array([*map(len, own.rank_sets)], dtype=np.int64)[own.ranks[order]]
    mains = np.bincount(part[main], num_holders[main], minlength=int(begins.sum()))
    main_rows = np.zeros(len(mains), dtype=np.int64)
    main_rows[part[main]] = rows[order[main]]
    # A rank that holds a part twice holds it once for this purpose.
    kept = begins | np.concatenate([[True], np.diff(own.ranks[order]) != 0])[: len(order)]
    kept &= (mains == 1)[part]
    counts = np.bincount(part[kept], minlength=len(mains))[mains == 1]
    return Replicas(rows[order[kept]], _starts(counts), main_rows[mains == 1])


def share_out(
    ranks: Integers, starts: Int64s, parts: Int64s, sizes: Int64s, loads: Int64s
) -> Int32s:
    """One holder for each unit of data, as ``distribute_shards_to_ranks`` would choose it.

    ``ranks`` are the holders of all parts (or sets of parts): those of one part ascend, from
    ``starts`` on. Each unit is (a piece of) one of the ``parts`` and has so many bytes; ``loads``
    are the bytes that each rank of the world has already, and are updated.

    Returns the rank of each unit.
    """
    counts = np.diff(starts)[parts]
    chosen = ranks[starts[parts]].astype(np.int32)
    alone = counts == 1
    np.add.at(loads, chosen[alone], sizes[alone])
    given: list[int] = loads.tolist()
    for count in np.unique(counts[~alone]).tolist():
        units = np.flatnonzero(counts == count)
        units = units[np.argsort(-sizes[units], kind="stable")]
        used, number = np.unique(parts[units], return_inverse=True)
        members = ranks[starts[used][:, None] + np.arange(count)].tolist()
        unit_sizes = zip(number.tolist(), sizes[units].tolist(), strict=True)
        winners = _assigned([*map(tuple, members)], unit_sizes, given)
        chosen[units] = np.fromiter(winners, dtype=np.int32, count=len(units))
    loads[:] = given
    return chosen


_WELL_BALANCED = 1.05
_MIN_CHUNK_BYTES = 2**18
_CHUNKS_A_RANK = 32
"""With chunks of a thirty-second of what a rank writes, ranks differ by no more than that."""


class BalancedSavePlanner(DefaultSavePlanner):
    """Writes every shard once, on whichever holder of a replica has the least to write so far.

    The replica ids stay what they are: who writes is only in the plan. A shard that is stored as
    several chunks may be written by several ranks, and where shards are too large for ranks to
    have alike, they are stored in smaller chunks (down to 256 KiB) than otherwise.

    Example:
        >>> from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
        >>> strategy = TensorStoreSaveShardedStrategy(planner=BalancedSavePlanner())
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt", strategy)
    """

    groups: tuple[int, ...] = ()

    @property
    def settings(self) -> Hashable | None:
        return self.groups if type(self) is BalancedSavePlanner else None

    def within(self, groups: Sequence[int]) -> Self:
        """The same planner, by which a shard stays in the group of its main replica; ``groups`` has
        the number of the group of every rank.
        """
        planner = copy.copy(self)
        planner.groups = tuple(groups)
        return planner

    def build_local_plan(self) -> SavePlan:
        check_replicas_have_data(self._leaves)
        return super().build_local_plan()

    def assign(self, catalog: ShardTable, num_ranks: int) -> tuple[ShardTable, Index]:
        shared = find_replicas(catalog)
        groups = np.array(self.groups or (0,) * num_ranks, dtype=np.int64)
        sets = HolderSets.of(catalog, shared, groups)
        # The main replicas that no other rank could write in place of its own.
        firsts = shared.rows[shared.starts[:-1]]
        is_fixed = catalog.main & (catalog.num_elements > 0)
        is_fixed[shared.main_rows] = False
        fixed = catalog.take(is_fixed).of_ranks()
        both = np.concatenate([firsts, np.flatnonzero(is_fixed)])
        whole = catalog.take(both[np.argsort(catalog.keys[both], kind="stable")])

        def assigned(layout: Layout) -> tuple[ShardTable, Index, Int64s]:
            """What is written and by whom in this layout, and the bytes of each rank."""
            index = index_of(layout, catalog, whole)
            cut, parts = layout.cut(catalog.take(firsts), index)
            order = np.argsort(parts, kind="stable")
            cut, parts = cut.take(order), parts[order]
            loads = np.zeros(num_ranks, dtype=np.int64)
            np.add.at(loads, fixed.ranks, fixed.num_bytes)
            writers = share_out(sets.ranks, sets.starts, sets.of_part[parts], cut.num_bytes, loads)
            rows = rows_of_ranks(catalog, shared, parts, writers)
            main, sources = catalog.main[rows], catalog.sources[rows]
            cut = replace(cut, ranks=writers, sources=sources, main=main, holders=None)
            return cut.joined(fixed), index, loads

        written, index, loads = assigned(self.layout)
        mean = loads.sum() / num_ranks
        finer = _finer(self.layout, mean)
        is_balanced = loads.max() <= _WELL_BALANCED * mean
        if finer is not None and not is_balanced and (np.diff(sets.starts) > 1).any():
            other, other_index, other_loads = assigned(finer)
            if other_loads.max() < loads.max():
                written, index = other, other_index
        return written.take(np.argsort(written.keys, kind="stable")), index


def _finer(layout: Layout, mean_bytes: float) -> RowBlockLayout | None:
    """A layout with which ranks can write equally much; None if it would be no finer."""
    if not isinstance(layout, RowBlockLayout):
        return None
    most = max(_MIN_CHUNK_BYTES, int(mean_bytes) // _CHUNKS_A_RANK)
    return replace(layout, max_chunk_bytes=most) if most < layout.max_chunk_bytes else None


def check_replicas_have_data(leaves: Sequence[ShardedBase]) -> None:
    """Any holder of a replica may become the one that writes it.

    Raises:
        InvalidShardingError: with every tensor that has no data.
    """
    problem = "data is None, but every replica needs its data where any holder may write it"
    remedy = "Give it its data, or leave this replica out of the state dict."
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    findings = [Finding(problem, own.key, remedy=remedy) for own in tensors if own.data is None]
    InvalidShardingError.raise_if(findings, "there is nothing to save for some shards")
