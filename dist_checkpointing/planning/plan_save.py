"""How ranks come to one plan for a save, and when they may use the last one again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem.paths import check_one_destination
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.planning import LocalPlans, SavePlan, SavePlanner
from dist_checkpointing.planning.agreed_cache import AgreedCache
from dist_checkpointing.planning.coverage import check_agreement, check_coverage
from dist_checkpointing.planning.layout import Layout
from dist_checkpointing.planning.packing import pack, unpack_all
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe


@dataclass(frozen=True, slots=True, eq=False)
class AgreedPlan:
    """What the ranks have agreed to save, to the last chunk. It knows no values.

    Attributes:
        plan: what this rank writes.
        index: what the checkpoint will hold.
        dropped: keys in the state dict that a user's planner left out on purpose.
        others: the ShardedObjects of all ranks that the storage does not take, sorted by key.
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


def plan_save(
    leaves: Leaves,
    planner: SavePlanner,
    layout: Layout,
    comm: Comm,
    *,
    cache: PlanCache | None = None,
    others: Iterable[ShardedBase] = (),
    folder: Path | None = None,
    saved_as: str = "",
) -> AgreedPlan:
    """Describe, exchange, check and plan: all of a save that needs no storage. Collective.

    Args:
        leaves: of this rank, for the storage.
        planner: decides what is written, and then answers for the data of the plan's items.
        layout: how the storage wants tensors cut up.
        comm: the ranks that save together.
        cache: the last plan, to be used again if nothing has changed.
        others: leaves of this rank that are saved in another way, and only checked here.
        folder: of the checkpoint, which all ranks must name alike.
        saved_as: the format in words, which must be the same on all ranks.

    Raises:
        CheckpointingException: on every rank, if they name different folders or formats.
        InvalidShardingError: on every rank, if the shards of all ranks do not make up each global
            tensor exactly once.
    """
    others = list(others)
    description, number = None, None
    if cache is not None and planner.settings is not None:
        description = (type(planner), planner.settings, layout, comm.rank, comm.world_size)
        with paused_collector():
            rows = _described(itertools.chain(leaves.values(), others))
            description = (*description, len(leaves), *rows)
        number = cache.number_of(description)
    place = ("" if folder is None else str(folder.absolute()), saved_as)
    # Ranks that name different folders bring different numbers, and then exchange the names.
    named = None
    if number is not None:
        named = number ^ (xxhash.xxh3_64_intdigest("\0".join(place).encode()) >> 2)
    if comm.all_same(named):
        assert cache is not None
        assert cache.value is not None
        with comm.agreed("planning the save"), paused_collector():
            planner.configure_planner(
                leaves, is_coordinator=comm.rank == 0, rank=comm.rank, layout=layout
            )
        return cache.value

    @paused_collector()
    def local_plan() -> tuple[SavePlan | None, bytes, bytes, tuple[str, str]]:
        planner.configure_planner(
            leaves, is_coordinator=comm.rank == 0, rank=comm.rank, layout=layout
        )
        plan = planner.build_local_plan()
        # Most planners bring nothing but the table, and thousands of ranks do so.
        own_data = (plan.storage_data, plan.planner_data)
        bare = type(plan) is SavePlan and own_data == (None, None)
        rest = None if bare else replace(plan, table=plan.table.take(slice(0, 0)))
        return rest, pack(plan.table), pack(describe(others, comm.rank)), place

    exchanged = comm.exchange("planning the save", local_plan)
    with comm.agreed("planning the save"), paused_collector():
        # Who brought a plan is who holds its shards, whatever a user's planner put there.
        plans_of_ranks, packed, packed_others, places = zip(*exchanged, strict=True)
        check_one_destination(places)
        local_plans = LocalPlans(
            SavePlan(table) if plan is None else replace(plan, table=table)
            for plan, table in zip(plans_of_ranks, unpack_all(packed), strict=True)
        )
        catalog = concatenate(unpack_all(packed_others))
        check_coverage(catalog, catalog.take(catalog.main & (catalog.num_elements > 0)))
        plans, index = checked_plans(local_plans, planner)
        plan = planner.finalize_plan(plans[comm.rank])
        announced = local_plans.catalog
        asked = {leaf.key for leaf in leaves.values()}
        dropped = tuple(sorted(asked - {announced.names[k] for k in np.unique(announced.keys)}))
        agreed = AgreedPlan(plan, index, dropped, catalog)
        if cache is not None and description is not None:
            cache.keep(description, agreed, (*packed, *packed_others))
    return agreed


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
    check_coverage(announced, concatenate([plan.table for plan in plans]))
    return plans, index


_FIELDS = attrgetter(
    "key",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
    "flattened_range",
)


def _described(leaves: Iterable[ShardedBase]) -> Iterable[Any]:
    """Everything about the leaves that a plan depends on, as values that nobody can change."""
    for leaf in leaves:
        data = leaf.data
        if isinstance(leaf, ShardedTensor):
            row = _FIELDS(leaf)
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
