"""How ranks come to one plan for a save, and when they may use the last one again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.location import check_one_destination
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.sharded_tensor import fields_of
from dist_checkpointing.planning import DefaultSavePlanner, LocalPlans, SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import Layout
from dist_checkpointing.planning.coverage import check_agreement, check_coverage, main_rows
from dist_checkpointing.planning.items import Metadata, whole_items
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import Int64s, ShardTable, concatenate, describe
from dist_checkpointing.planning.table_exchange import AgreedCache, Exchanged, exchange_tables
from dist_checkpointing.planning.user_planner import call_hook
from dist_checkpointing.threads import paused_collector

PLANNING: Final = "planning the save"
LATER: Final = -1
_TENSORS, _FLATTENED, _OBJECTS, _OTHERS = "tensors", "flattened", "objects", "others"
_FIRST_SOURCES: Final = {_TENSORS: 0, _FLATTENED: 1 << 29, _OBJECTS: 1 << 30}
"""Number of the first leaf of each kind, where parts of a table are numbered apart."""


@dataclass(frozen=True, slots=True, eq=False)
class AgreedPlan:
    """What the ranks have agreed to save, to the last chunk. It knows no values.

    Attributes:
        plan: What this rank writes.
        index: What the checkpoint will hold.
        dropped: Keys in the state dict that a user's planner left out on purpose.
        others: The ShardedObjects of all ranks that the storage does not take, sorted by key.
    """

    plan: SavePlan
    index: Index
    dropped: tuple[str, ...]
    others: ShardTable


class PlanCache(AgreedCache[AgreedPlan]):
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


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a rank brings besides its table.

    The rest of its plan, if there is any; folder and format, which must be the same on all ranks;
    and the number of the plan that it would use again, or ``LATER``: it has brought no table then.
    """

    rest: SavePlan | None
    place: tuple[str, str]
    number: int | None = None

    @property
    def identity(self) -> int | None:
        """Number that stands for all of it, see ``Comm.exchange``; None if there is a table."""
        return None if self.number is None else number_of((*self.place, self.number))


def number_of(values: object) -> int:
    """A number below 2**62 that stands for values whose ``repr`` does."""
    return xxhash.xxh3_64_intdigest(repr(values).encode()) >> 2


class SavePlanning:
    """How one rank takes part in planning one save.

    In order: what ``bring`` gives is exchanged, then ``complete`` and ``conclude``. All ranks must
    name the same ``place``: folder and format. The ``others`` are leaves that are saved in another
    way, and only checked here. Afterwards the planner answers for the data of the plan.
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
        folder: Path | None = None,
        saved_as: str = "",
    ) -> None:
        self.planner = planner
        self._leaves, self._layout, self._others = leaves, layout, list(others)
        self._rank, self._world_size = comm.rank, comm.world_size
        self.is_coordinator: bool = comm.rank == 0
        self.place = ("" if folder is None else str(folder.absolute()), saved_as)
        self._cache = cache
        self._description: tuple[Any, ...] | None = None
        self._own: SavePlan | None = None

    def bring(self) -> tuple[Mapping[str, ShardTable], PlanFacts]:
        """What this rank says of itself: its tables, or which plan it would use again."""
        number = None
        if self._cache is not None and self.planner.settings is not None:
            rows = plan_inputs(itertools.chain(self._leaves.values(), self._others))
            settings = (type(self.planner), self.planner.settings, self._layout)
            ranks = (self._rank, self._world_size)
            self._description = (*settings, *ranks, len(self._leaves), *rows)
            number = self._cache.number_of(self._description)
        return self._tables() if number is None else ({}, PlanFacts(None, self.place, number))

    def _tables(self) -> tuple[Mapping[str, ShardTable], PlanFacts]:
        self._configure()
        plan = self._own = self.planner.build_local_plan()
        # Most planners bring nothing but the table, and thousands of ranks do so.
        own_data = (plan.storage_data, plan.planner_data)
        bare = type(plan) is SavePlan and own_data == (None, None)
        rest = None if bare else replace(plan, table=plan.table.take(slice(0, 0)))
        other_rows = describe(self._others, self._rank)
        if _assigns(self.planner):
            return exchanged_parts(plan.table, other_rows), PlanFacts(rest, self.place)
        return {_TENSORS: plan.table, _OTHERS: other_rows}, PlanFacts(rest, self.place)

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

    def exchange(self, comm: Comm) -> Exchanged[PlanFacts]:
        """What ``conclude`` needs to know of all ranks. Collective."""
        bring = paused_collector()(self.bring)
        exchanged = exchange_tables(comm, PLANNING, bring, lambda facts: facts.identity)
        return self.complete(comm, exchanged)

    def agree(self, comm: Comm) -> AgreedPlan:
        """All of it. Collective; every rank raises alike."""
        exchanged = self.exchange(comm)
        with comm.agreed(PLANNING), paused_collector():
            return self.conclude(exchanged)

    def complete(self, comm: Comm, exchanged: Exchanged[PlanFacts]) -> Exchanged[PlanFacts]:
        """The tables of all ranks, if some were not brought and the last plan is no use.

        Collective.
        """
        numbers = {facts.number for facts in exchanged.facts}
        if len(numbers) == 1:
            return exchanged
        return exchange_tables(comm, PLANNING, paused_collector()(self._tables))

    def conclude(self, exchanged: Exchanged[PlanFacts]) -> AgreedPlan:
        """The plan that follows from what all ranks have brought. Not collective."""
        check_one_destination([facts.place for facts in exchanged.facts])
        own, planner = self._own, self.planner
        if own is None:
            assert self._cache is not None
            assert self._cache.value is not None
            self._configure()
            return self._cache.value
        other_rows = exchanged.catalog(_OTHERS)
        if len(other_rows):
            check_coverage(other_rows, main_rows(other_rows))
        catalog = exchanged.catalog(_TENSORS, _FLATTENED, _OBJECTS)
        if _assigns(planner):
            check_agreement(catalog)
            written, index = planner.assign(catalog, self._world_size)
            check_coverage(catalog, written)
            table = written.take(written.ranks == self._rank)
            plan = replace(own, table=_with_sources(table, own.table), index=index)
        else:
            # Who brought a plan is who holds its shards, whatever a user's planner put there.
            plans, index = checked_plans(_local_plans(exchanged), planner)
            plan = plans[self._rank]
        plan = planner.finalize_plan(plan).for_index(index)
        agreed = AgreedPlan(plan, index, self._dropped(catalog), other_rows)
        if self._cache is not None and self._description is not None:
            digest = xxhash.xxh3_64_intdigest(b"".join(exchanged.digests))
            self._cache.keep(self._description, agreed, digest >> 2)
        return agreed

    def _dropped(self, catalog: ShardTable) -> tuple[str, ...]:
        build = getattr(self.planner.build_local_plan, "__func__", None)
        if build is DefaultSavePlanner.build_local_plan:
            return ()
        asked = {leaf.key for leaf in self._leaves.values()}
        return tuple(sorted(asked - {catalog.names[k] for k in np.unique(catalog.keys)}))


def _assigns(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether the planner needs no plans of all ranks, but what they hold."""
    own = DefaultSavePlanner.build_global_plan
    return isinstance(planner, DefaultSavePlanner) and type(planner).build_global_plan is own


def exchanged_parts(table: ShardTable, others: ShardTable) -> dict[str, ShardTable]:
    """What a rank sends: its table in parts that are likely to be the same on many ranks, and the
    rows that are only checked.

    Copies of a model are alike even where their parts of a distributed optimizer, or their random
    states, are not. Rows are numbered within the part: which leaf a row is concerns its rank only.
    """
    parts = {_OTHERS: others}
    for kind, rows in _rows_of_kinds(table).items():
        part = table.take(rows)
        # Only the names that occur, so that those of the other parts make no difference.
        is_used = np.zeros(len(table.names), dtype=np.bool_)
        is_used[part.keys] = is_used[part.dtypes] = True
        used = np.flatnonzero(is_used)
        number = np.zeros(len(table.names), dtype=np.int32)
        number[used] = np.arange(len(used), dtype=np.int32)
        parts[kind] = replace(
            part,
            names=tuple(table.names[name] for name in used.tolist()),
            keys=number[part.keys],
            dtypes=number[part.dtypes],
            sources=np.arange(len(rows), dtype=np.int32) + _FIRST_SOURCES[kind],
        )
    return parts


def _rows_of_kinds(table: ShardTable) -> dict[str, Int64s]:
    is_object, is_flat = table.is_object, table.flat[:, 0] >= 0
    kinds = {_TENSORS: ~is_object & ~is_flat, _FLATTENED: is_flat, _OBJECTS: is_object}
    return {
        kind: np.flatnonzero(mask) for kind, mask in kinds.items() if kind == _TENSORS or mask.any()
    }


def _with_sources(table: ShardTable, local: ShardTable) -> ShardTable:
    """Rows of this rank, numbered as in ``exchanged_parts``, with the leaves that they are."""
    sources = table.sources.copy()
    for kind, rows in _rows_of_kinds(local).items():
        # The kind of a row may not be what it was: a planner may have cut a range into boxes.
        numbers = table.sources - _FIRST_SOURCES[kind]
        is_own = (numbers >= 0) & (numbers < len(rows))
        sources[is_own] = local.sources[rows][numbers[is_own]]
    return replace(table, sources=sources)


def _local_plans(exchanged: Exchanged[PlanFacts]) -> LocalPlans:
    """The plans of all ranks, for a planner of the user's own."""
    tables = exchanged.tables(_TENSORS, _FLATTENED, _OBJECTS)
    rests = [facts.rest for facts in exchanged.facts]
    return LocalPlans(
        SavePlan(table) if rest is None else replace(rest, table=table)
        for rest, table in zip(rests, tables, strict=True)
    )


def checked_plans(
    local_plans: LocalPlans, planner: SavePlanner
) -> tuple[Sequence[SavePlan], Index]:
    """What all ranks write of what they announce, and what the checkpoint then holds.

    Raises:
        InvalidShardingError: if ranks contradict each other about a tensor, or what is written is
            not each of its elements exactly once.
    """
    announced = local_plans.catalog
    check_agreement(announced)
    plans, index = planner.build_global_plan(local_plans)
    if len(plans) != len(local_plans):
        finding = Finding(
            "build_global_plan must return a plan for every rank",
            expected=len(local_plans),
            found=len(plans),
        )
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
    return [plan.for_index(index) for plan in plans], index


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
