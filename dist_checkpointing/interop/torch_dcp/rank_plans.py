"""What DCPWriter sends inside of the plans and results of DCP: the plan of each rank, laid out."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning import DefaultSavePlanner, LocalPlans, SavePlan
from dist_checkpointing.planning.layout import Layout
from dist_checkpointing.planning.plan_save import checked_plans
from dist_checkpointing.planning.shard_table import TableRows
from dist_checkpointing.storage.driver import Written
from dist_checkpointing.storage.protocol import StorageWriter


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What the coordinator tells a rank, inside of DCP's plan.

    Attributes:
        plan: the rank's part of the save, cut up as it is stored. ``sources`` are positions among
            the items of DCP's plan.
        rank: this rank.
        world_size: number of ranks.
        writes: the (backend, version) that this was made for.
        save_plan_id: the same for all rank_plans of one plan.
    """

    plan: SavePlan
    rank: int
    world_size: int
    writes: tuple[str, int]
    save_plan_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the coordinator, as the last of its results.

    Attributes:
        save_plan_id: of its rank_plan.
        written: what the rank has written.
        contents: the bytes of what is not a tensor.
    """

    save_plan_id: str
    written: Written
    contents: Mapping[str, bytes]


def is_usable(plan: dcp.SavePlan) -> bool:
    return bool(getattr(plan, "usable", True))


def full_plans(plans: Sequence[dcp.SavePlan]) -> list[list[dcp.SavePlan]]:
    """The plans with all items: more than one possibility if DCP's plan cache leaves them open.

    With plan caching the coordinator is given nothing for ranks whose part of the global plan has
    not changed. The layout of a tensor follows from the parts on all ranks, so these are looked up
    where the planner has them.

    Raises:
        CheckpointingException: if they are not found there.
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
    """What each rank stores of what DCP wants it to write, and what the checkpoint then holds.

    Raises:
        InvalidShardingError: if it is not every element exactly once, or cannot be stored.
    """
    planner = DefaultSavePlanner()
    planner.configure_planner({}, is_coordinator=True, rank=0, layout=layout)
    announced = LocalPlans(_announced(plan, rank) for rank, plan in enumerate(plans))
    own_plans, index = checked_plans(announced, planner)
    return [planner.finalize_plan(plan) for plan in own_plans], index


def make_rank_plans(
    plans: Sequence[SavePlan], writer: StorageWriter, writes: tuple[str, int]
) -> list[RankPlan]:
    """The rank_plan of every rank, once the storage has seen all plans."""
    # Nothing of ours comes between DCP's local and global plans, so here the coordinator's writer
    # prepares the local plans of all ranks.
    final = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    save_plan_id = uuid.uuid4().hex
    return [
        RankPlan(plan, rank, len(plans), writes, save_plan_id) for rank, plan in enumerate(final)
    ]


def _announced(plan: dcp.SavePlan, rank: int) -> SavePlan:
    rows = TableRows()
    for position, item in enumerate(plan.items):
        data = item.tensor_data
        if data is None:
            continue
        rows.add(
            key=item.index.fqn,
            dtype=dtypes.from_torch(data.properties.dtype, key=item.index.fqn).name,
            global_shape=tuple(data.size),
            offset=tuple(data.chunk.offsets),
            shape=tuple(data.chunk.sizes),
            flat=None,
            main=True,  # DCP has chosen among replicas
            source=position,
        )
    return SavePlan(rows.table(rank))


def check_complete(
    metadata: dcp_metadata.Metadata,
    reports: Sequence[Report],
    index: Index,
    values: Collection[str],
) -> None:
    """Refuse to commit if what was written is not what DCP thinks: its plan cache can be old.

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
