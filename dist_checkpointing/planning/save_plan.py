"""How ranks come to one plan for a save, and when they may use the last one again."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.location import check_one_destination
from dist_checkpointing.format.geometry import renumbered
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, SavePlanner, table_exchange
from dist_checkpointing.planning.chunking import Layout, whole_items
from dist_checkpointing.planning.coverage import check_agreement, check_coverage
from dist_checkpointing.planning.items import Metadata
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import Int32s, ShardTable, concatenate, describe
from dist_checkpointing.planning.user_planner import adapted, call_hook, overrides
from dist_checkpointing.threads import paused_collector

PLANNING: Final = "planning the save"
*_KINDS, _OTHERS = table_exchange.KINDS
_MOST_LEAVES: Final = 1 << 29
"""Of one kind on one rank: the leaves of each kind are numbered apart."""
logger: logging.Logger = logging.getLogger(__name__)


class PlanCache(table_exchange.AgreedCache[tuple[SavePlan, Index, ShardTable]]):
    """The plan of the last save, used again as long as nothing about it has changed on any rank.

    A program that saves the same kind of state many times owns one, and passes it to every save.
    What counts is what the plan was made of: keys, shapes, dtypes, offsets, replica ids and order
    of all sharded leaves, the layout, the planner and the ranks. One difference on one rank makes
    all ranks plan again. Values do not count, and neither they nor the planner, which knows the
    leaves, are kept.

    Example:
        >>> import torch
        >>> from dist_checkpointing import PlanCache, ShardedTensor, save
        >>> cache = PlanCache()
        >>> for step in range(2):
        ...     state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), step))}
        ...     save(state, f"step-{step}", plan_cache=cache)
    """


class RankFacts(NamedTuple):
    """What a rank tells all others of a save, besides its tables.

    Attributes:
        destination: Folder and format, which must be the same on all ranks.
        rest: What its plan has besides the table, if there is anything.
        plan_number: Number of the plan that it would use again, if it sends no tables.
        common: Number that stands for its common state; None if that is not compared.
    """

    destination: tuple[str, str]
    rest: SavePlan | None = None
    plan_number: int | None = None
    common: int | None = None

    def number(self) -> int | None:
        """Number that stands for all of it, see ``Comm.exchange``; None if there is a table."""
        if self.plan_number is None:
            return None
        values = (*self.destination, self.plan_number, self.common)
        return xxhash.xxh3_64_intdigest(repr(values).encode()) >> 2


class SavePlanning:
    """How one rank takes part in planning one save.

    In order: what ``facts_of_rank`` gives is exchanged, then ``exchange`` and
    ``plan_from_tables``. All ranks must name the same ``destination``: folder and format. The
    ``others`` are leaves that are saved in another way, and only checked here. Afterwards the
    planner answers for the data of the plan.
    """

    def __init__(
        self,
        leaves: Leaves,
        planner: SavePlanner,
        layout: Layout,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
        destination: tuple[str, str] = ("", ""),
    ) -> None:
        self.planner: SavePlanner = adapted(planner, SavePlanner)
        self.destination = destination
        self._leaves, self._layout, self._others = leaves, layout, list(others)
        self._rank, self._world_size, self._cache = comm.rank, comm.world_size, cache
        # It needs no plans of all ranks, but what they hold.
        self._assigner: DefaultSavePlanner | None = None
        if isinstance(planner, DefaultSavePlanner) and not overrides(
            planner, DefaultSavePlanner, "build_global_plan"
        ):
            self._assigner = planner
        self._inputs: tuple[Any, ...] | None = None
        self._local_plan: SavePlan | None = None
        self._leaf_numbers: dict[int, Int32s] = {}

    def facts_of_rank(self) -> tuple[Mapping[str, ShardTable], RankFacts]:
        """What this rank sends: its tables, or which plan it would use again."""
        if self._cache is not None and self.planner.settings is not None:
            rows = table_exchange.plan_inputs(itertools.chain(self._leaves.values(), self._others))
            settings = (type(self.planner), self.planner.settings, self._layout)
            self._inputs = (*settings, self._rank, self._world_size, len(self._leaves), *rows)
            number = self._cache.hash_if_cached(self._inputs)
            if number is not None:
                return {}, RankFacts(self.destination, plan_number=number)
        return self._tables()

    def _tables(self) -> tuple[Mapping[str, ShardTable], RankFacts]:
        self._configure()
        plan = self._local_plan = self.planner.build_local_plan()
        # Most planners have nothing but the table, and thousands of ranks send it.
        is_bare = type(plan) is SavePlan and plan.storage_data is plan.planner_data is None
        rest = None if is_bare else replace(plan, table=plan.table.take(slice(0, 0)))
        parts = {_KINDS[0]: plan.table}
        if self._assigner is not None and self._world_size > 1:
            parts, self._leaf_numbers = exchanged_parts(plan.table)
        if self._others:
            parts[_OTHERS] = describe(self._others, self._rank)
        return parts, RankFacts(self.destination, rest)

    def _configure(self) -> None:
        """Call ``configure_planner``, whatever of the protocol it takes."""
        planner = self.planner
        planner.layout = self._layout
        call_hook(
            planner.configure_planner,
            self._leaves,
            is_coordinator=self._rank == 0,
            rank=self._rank,
            layout=self._layout,
            remove_redundancy=getattr(planner, "remove_redundancy", True),
            save_to_minimum_rank=getattr(planner, "save_to_minimum_rank", False),
        )

    def agree(self, comm: Comm) -> tuple[SavePlan, Index]:
        """What this rank writes, and what the checkpoint will hold. Collective."""
        exchanged = self.exchange(comm)
        with comm.agreed(PLANNING):
            plan, index, _ = self.plan_from_tables(exchanged)
        return plan, index

    def exchange(
        self, comm: Comm, exchanged: table_exchange.ExchangedTables[RankFacts] | None = None
    ) -> table_exchange.ExchangedTables[RankFacts]:
        """What ``plan_from_tables`` needs to know of all ranks. Collective.

        It is all there if every rank has sent its tables, or would use the same plan again.
        """
        if exchanged is None:
            exchanged = table_exchange.exchange_tables(
                comm, PLANNING, self.facts_of_rank, RankFacts.number
            )
        if len({own.value.plan_number for own in exchanged.facts}) == 1:
            return exchanged
        return table_exchange.exchange_tables(comm, PLANNING, self._tables)

    @paused_collector()
    def plan_from_tables(
        self, exchanged: table_exchange.ExchangedTables[RankFacts]
    ) -> tuple[SavePlan, Index, ShardTable]:
        """What this rank writes, to the last chunk; what the checkpoint will hold; and the
        ``others`` of all ranks, sorted by key. Not collective.
        """
        if len({own.value.destination for own in exchanged.facts}) > 1:
            check_one_destination([facts.destination for facts in exchanged.facts_of_ranks()])
        local, planner, cache = self._local_plan, self.planner, self._cache
        if local is None:
            assert cache is not None
            assert cache.value is not None
            self._configure()
            return cache.value
        others = exchanged.catalog(_OTHERS)
        if len(others):
            check_coverage(others)
        if self._assigner is not None:
            catalog = exchanged.catalog(*_KINDS)
            check_agreement(catalog)
            written, index = self._assigner.assign(catalog, self._world_size)
            check_coverage(catalog, written)
            table = written.take(written.ranks == self._rank)
            if self._leaf_numbers:
                table = _with_leaves(table, self._leaf_numbers)
            plan = replace(local, table=table, index=index)
        else:
            # Who sent a plan is who holds its shards, whatever a user's planner put there.
            tables = exchanged.tables_of_ranks(_KINDS[0])
            local_plans = [
                # Ranks must not share what a planner may change.
                replace(copy.deepcopy(facts.rest) or SavePlan(), table=table)
                for facts, table in zip(exchanged.facts_of_ranks(), tables, strict=True)
            ]
            plans, index, catalog = checked_plans(local_plans, planner)
            plan = plans[self._rank]
        plan = planner.finalize_plan(plan).for_index(index)
        if self._rank == 0 and overrides(planner, DefaultSavePlanner, "build_local_plan"):
            kept = {catalog.names[number] for number in np.unique(catalog.keys)}
            if dropped := {leaf.key for leaf in self._leaves.values()} - kept:
                logger.info("left out by the planner: %s", ", ".join(sorted(dropped)))
        if cache is not None and self._inputs is not None:
            cache.keep(self._inputs, (plan, index, others), exchanged.digests)
        return plan, index, others


def exchanged_parts(table: ShardTable) -> tuple[dict[str, ShardTable], dict[int, Int32s]]:
    """The table of a rank in parts that are likely to be the same on many ranks.

    Copies of a model are alike even where their parts of a distributed optimizer, or their random
    states, are not. Rows are numbered within the part: which leaf a row is concerns its rank only.

    Returns:
        The parts by kind, and the leaf of each row of a part by the number of its first row.
    """
    kinds = np.where(table.is_object, 2, table.flat[:, 0] >= 0)
    parts, leaves = {}, {}
    for number in sorted({0, *kinds.tolist()}):
        part, first = table.take(kinds == number), number * _MOST_LEAVES
        # Only the names that occur, so that those of the other parts make no difference.
        used, (keys, dtypes) = renumbered(len(table.names), part.keys, part.dtypes)
        parts[_KINDS[number]] = replace(
            part,
            names=tuple(table.names[name] for name in used),
            keys=keys.astype(np.int32),
            dtypes=dtypes.astype(np.int32),
            sources=np.arange(first, first + len(part), dtype=np.int32),
        )
        leaves[first] = part.sources
    return parts, leaves


def _with_leaves(table: ShardTable, leaves: Mapping[int, Int32s]) -> ShardTable:
    """Rows of this rank, numbered as in ``exchanged_parts``, with the leaves that they are."""
    sources = table.sources.copy()
    for first, of_part in leaves.items():
        numbers = table.sources - first
        is_of_part = (numbers >= 0) & (numbers < len(of_part))
        sources[is_of_part] = of_part[numbers[is_of_part]]
    return replace(table, sources=sources)


def checked_plans(
    local_plans: Sequence[SavePlan], planner: SavePlanner
) -> tuple[Sequence[SavePlan], Index, ShardTable]:
    """What all ranks write of what they announce; what the checkpoint then holds; and what they
    announce in one table, sorted by key.

    Raises:
        InvalidShardingError: if ranks contradict each other about a tensor, or what is written is
            not each of its elements exactly once.
    """
    announced = concatenate([plan.table for plan in local_plans])
    check_agreement(announced)
    plans, index = planner.build_global_plan(local_plans)
    if len(plans) != len(local_plans):
        problem = "build_global_plan must return a plan for every rank"
        finding = Finding(problem, None, len(local_plans), len(plans))
        raise CheckpointingException("the plan of a planner cannot be used", [finding])
    # Items of the user's own do not say whose they are.
    tables = [
        replace(plan.table, ranks=np.full(len(plan.table), rank, dtype=np.int32))
        for rank, plan in enumerate(plans)
    ]
    written = concatenate(tables)
    check_coverage(announced, written)
    if isinstance(index, Metadata) or not isinstance(index, Index):
        planner.layout = whole_items(planner.layout)
        index = Metadata.laid_out(index, planner.layout, announced, written)
    return [plan.for_index(index) for plan in plans], index, announced
