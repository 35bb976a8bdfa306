"""What DCPWriter sends in the plans and results of DCP: the plan of each rank, and its report."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import DefaultSavePlanner, LocalPlans, SavePlan
from dist_checkpointing.planning.chunking import Layout
from dist_checkpointing.planning.save_plan import checked_plans
from dist_checkpointing.planning.shard_table import ShardRow, table_of_rows
from dist_checkpointing.storage.driver import Written
from dist_checkpointing.storage.interface import StorageWriter


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What the coordinator sends to a rank, inside of DCP's plan.

    Attributes:
        plan: What the rank writes, cut as it is stored. ``sources`` are positions of items in DCP's
            plan.
        rank: The rank.
        world_size: Number of ranks.
        writes: (backend, version) of the strategy that it was made for.
        save_plan_id: Id that the plans of all ranks in one save share.
    """

    plan: SavePlan
    rank: int
    world_size: int
    writes: tuple[str, int]
    save_plan_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank sends to the coordinator, as the last of its results.

    Attributes:
        save_plan_id: ``save_plan_id`` of its RankPlan.
        written: What the rank has written.
        contents: The bytes of each value that is not a tensor, by name.
    """

    save_plan_id: str
    written: Written
    contents: Mapping[str, bytes]


def is_usable(plan: dcp.SavePlan) -> bool:
    return bool(getattr(plan, "usable", True))


def full_plans(plans: Sequence[dcp.SavePlan]) -> list[list[dcp.SavePlan]]:
    """The plans of all ranks with all items; several lists if DCP's plan cache allows several.

    With plan caching, the coordinator gets no items from ranks whose plan has not changed. But the
    layout of a tensor depends on its parts on all ranks, so the plans are looked up in the cache of
    the planner.

    Raises:
        CheckpointingException: if they are not there.
    """
    if all(map(is_usable, plans)):
        return [list(plans)]
    cache: Mapping[str, list[dcp.SavePlan]] = getattr(dcp.SavePlanner, "_cached_global_plan", {})
    found = [
        list(cached)
        for cached in cache.values()
        if len(cached) == len(plans)
        and all(new is old or not is_usable(new) for new, old in zip(plans, cached, strict=True))
    ]
    if not found or (len(found) > 1 and any(map(is_usable, plans))):
        finding = Finding(
            "the planner left out the plans of some ranks",
            ranks=tuple(rank for rank, plan in enumerate(plans) if not is_usable(plan)),
            remedy="Switch enable_plan_caching off.",
        )
        raise CheckpointingException("cached plans cannot be found", [finding])
    return found


def lay_out(plans: Sequence[dcp.SavePlan], layout: Layout) -> tuple[list[SavePlan], Index]:
    """What each rank stores for DCP's plans, and the index of the checkpoint.

    Raises:
        InvalidShardingError: if an element is written more than once or never, or cannot be stored.
    """
    planner = DefaultSavePlanner()
    planner.configure_planner({}, is_coordinator=True, rank=0, layout=layout)
    announced = LocalPlans(_announced(plan, rank) for rank, plan in enumerate(plans))
    own_plans, index = checked_plans(announced, planner)
    return [planner.finalize_plan(plan) for plan in own_plans], index


def make_rank_plans(
    plans: Sequence[SavePlan], writer: StorageWriter, writes: tuple[str, int]
) -> list[RankPlan]:
    """The RankPlan of every rank, after the storage has seen all plans."""
    # Between its local and global plans, DCP calls nothing of this library. So the writer of the
    # coordinator prepares the local plans of all ranks.
    final = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    save_plan_id = uuid.uuid4().hex
    return [
        RankPlan(plan, rank, len(plans), writes, save_plan_id) for rank, plan in enumerate(final)
    ]


def _announced(plan: dcp.SavePlan, rank: int) -> SavePlan:
    rows = []
    for position, item in enumerate(plan.items):
        data = item.tensor_data
        if data is None:
            continue
        dtype = tensor_memory.from_torch(data.properties.dtype, key=item.index.fqn).name
        place = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        # All are main replicas: DCP has chosen among them.
        rows.append(ShardRow(item.index.fqn, dtype, *place, None, main=True, source=position))
    return SavePlan(table_of_rows(rank, rows))


def check_complete(
    metadata: dcp_metadata.Metadata,
    reports: Sequence[Report],
    index: Index,
    values: Collection[str],
) -> None:
    """Refuse to commit something else than DCP's plans say, whose cache may be out of date.

    Raises:
        CheckpointingException: with every name that is missing or has another shape.
    """
    findings = []
    if len({report.save_plan_id for report in reports}) > 1:
        findings.append(Finding("the ranks wrote plans of different saves"))
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, dcp_metadata.BytesStorageMetadata):
            if name not in values:
                findings.append(Finding("was not written by any rank", name))
        elif name not in index:
            findings.append(Finding("was not written by any rank", name))
        elif index[name].global_shape != tuple(stored.size):
            expected, found = tuple(stored.size), index[name].global_shape
            findings.append(Finding("another shape was written", name, expected, found))
    if findings:
        remedy = "Switch enable_plan_caching off, or save again."
        raise CheckpointingException(
            "DCP's cached plans are not those of this state dict",
            [replace(finding, remedy=remedy) for finding in findings],
        )
