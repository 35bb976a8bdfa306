"""How the ranks of a save come to know what each of them writes, before any file is touched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Unpack

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.filesystem.location import check_one_destination
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful, ShardedTensor
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.planning.coverage import check_coverage, main_rows
from dist_checkpointing.planning.replica_check import ReplicaCheck, ReplicaComparison, ReplicaFacts
from dist_checkpointing.planning.save_plan import (
    LATER,
    PLANNING,
    PlanFacts,
    SavePlanning,
    number_of,
)
from dist_checkpointing.planning.shard_table import ShardTable, describe
from dist_checkpointing.planning.table_exchange import Exchanged, exchange_tables
from dist_checkpointing.serialization.save_base import require_sharing, take_base
from dist_checkpointing.serialization.save_checks import Decided
from dist_checkpointing.serialization.save_options import JobOptions, SaveHooks
from dist_checkpointing.serialization.save_steps import SaveJob
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.threads import paused_collector
from dist_checkpointing.validation.common_state_agreement import CommonDigests, compare_common_state

logger: logging.Logger = logging.getLogger(__name__)

_BY_STRATEGY, _BY_COMMON = "shards", "objects"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What a rank says of a save, besides its tables.

    Attributes:
        common: Number that stands for its common state; None if that is not compared.
        plan: What planning must know.
        replicas: Digests of its replicas, if it brings tables and knows which have copies.
    """

    common: int | None
    plan: PlanFacts
    replicas: ReplicaFacts | None = None

    @property
    def identity(self) -> int | None:
        """Number that stands for all of it, see ``Comm.exchange``; None if there is a table."""
        identity = self.plan.identity
        return None if identity is None else number_of((self.common, identity))


class JobPlanning:
    """How one rank takes part in planning a save: ``bring``, exchange, ``conclude``.

    Args:
        job: not planned yet.
        options: see ``save``.
    """

    def __init__(self, job: SaveJob, options: JobOptions) -> None:
        self._job, self._options = job, options
        self._validates = options.get("validate_access_integrity", True)
        self._digests: CommonDigests | None = None
        self._planning: SavePlanning | None = None
        self._replicas: ReplicaComparison | None = None

    def bring(self, comm: Comm) -> tuple[Mapping[str, ShardTable], JobFacts]:
        """What this rank tells the others. Not collective."""
        common = None
        if self._validates and comm.world_size > 1:
            common = self._common_digests().number
        tables: Mapping[str, ShardTable] = {}
        strategy = self._job.strategy
        facts = PlanFacts(None, (self._job.place, f"{strategy.backend} {strategy.version}"))
        if not isinstance(strategy, PlannedSaveStrategy):
            tables = {_BY_COMMON: describe(list(self._job.own.by_common.values()), comm.rank)}
            if self._validates:
                own = describe(list(self._job.own.by_strategy.values()), comm.rank)
                tables = {_BY_STRATEGY: own, **tables}
        elif strategy.share_replicas is None:
            self._planning = self._make_planning(comm)
            tables, facts = self._planning.bring()
        else:
            # What it brings depends on what the ranks have that share replicas.
            facts = replace(facts, number=LATER)
        self._replicas = ReplicaComparison(
            [
                leaf
                for leaf in self._job.own.by_strategy.values()
                if isinstance(leaf, ShardedTensor)
            ],
            self._options.get("replicas", ReplicaCheck.OFF),
            self._options.get("on_replica_mismatch", "raise"),
            comm,
        )
        # Without tables a number is exchanged, and the digests follow by themselves.
        digests = self._replicas.facts() if facts.identity is None else None
        return tables, JobFacts(common, facts, digests)

    def conclude(self, exchanged: Exchanged[JobFacts], comm: Comm) -> SaveJob:
        """The job with what follows from what all ranks have brought. Collective.

        An error of this rank in deciding is kept for ``claim``, which tells it to all ranks.

        Raises:
            CheckpointingException: what any rank finds wrong that must be talked about.
        """
        if len({facts.common for facts in exchanged.facts}) > 1:
            compare_common_state(self._common_digests, comm)
        brought = exchanged.with_facts([facts.plan for facts in exchanged.facts])
        if self._job.writer is not None:
            if self._planning is None:
                self._planning = self._make_planning(comm)
                brought = self._planning.exchange(comm)
            else:
                brought = self._planning.complete(comm, brought)
        self._job.take(Outcome.of(PLANNING, lambda: self._decided(brought)))
        if self._replicas is not None:
            self._replicas.compare([facts.replicas for facts in exchanged.facts])
        return self._job

    @paused_collector()
    def _decided(self, brought: Exchanged[PlanFacts]) -> Decided:
        if self._planning is None:
            check_one_destination([facts.place for facts in brought.facts])
            for kind in (_BY_STRATEGY, _BY_COMMON) if self._validates else (_BY_COMMON,):
                catalog = brought.catalog(kind)
                check_coverage(catalog, main_rows(catalog))
            return Decided(catalog)
        agreed = self._planning.conclude(brought)
        if agreed.dropped and self._planning.is_coordinator:
            logger.info("left out by the planner: %s", ", ".join(agreed.dropped))
        return Decided(agreed.others, agreed.plan, agreed.index, self._planning.planner)

    def _common_digests(self) -> CommonDigests:
        if self._digests is None:
            preprocess = self._options.get("preprocess_common_before_consistancy_check")
            self._digests = CommonDigests(self._job.own.common, preprocess)
        return self._digests

    def _make_planning(self, comm: Comm) -> SavePlanning:
        assert isinstance(self._job.strategy, PlannedSaveStrategy)
        assert self._job.writer is not None
        planning = self._job.strategy.planning(
            self._job.own.by_strategy,
            self._job.writer,
            comm,
            cache=self._options.get("plan_cache"),
            others=self._job.own.by_common.values(),
        )
        planning.place = (self._job.place, planning.place[1])
        return planning


def prepare(
    state: ShardedStateDict | ShardedStateful,
    folder: str | PathLike[str],
    comm: Comm,
    meter: Meter,
    hooks: SaveHooks,
    require: Callable[[SaveJob], None] | None = None,
    **options: Unpack[JobOptions],
) -> SaveJob:
    """Prepare, plan and check. Collective; touches no file. ``claim`` must follow.

    Args:
        state: see ``save``.
        folder: see ``SaveJob``.
        comm: the ranks that save together.
        meter: see ``SaveJob``.
        hooks: see ``SaveJob``.
        require: refuses a job that cannot be done in the way it is wanted.
        options: see ``SaveJob``.

    Raises:
        CheckpointingException: see ``save``.
    """
    plannings: list[JobPlanning] = []
    base = options.get("base")

    @paused_collector()
    def bring() -> tuple[Mapping[str, ShardTable], JobFacts]:
        job = SaveJob(as_given, folder, comm.rank, meter, hooks, **options)
        if require is not None:
            require(job)
        if base is not None:
            require_sharing(job.strategy, job.writer, hooks.disks)
        plannings.append(JobPlanning(job, options))
        return plannings[0].bring(comm)

    with meter.phase("planning"):
        as_given = as_state_dict(state, comm)
        exchanged = exchange_tables(comm, PLANNING, bring, lambda facts: facts.identity)
        job = plannings[0].conclude(exchanged, comm)
        if base is not None:
            take_base(base, job, comm)
    return job
