"""Save in parallel: each replica group shares out what its ranks hold alike."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from dist_checkpointing.mapping.nesting import flatten, unflatten
from dist_checkpointing.planning import BalancedSavePlanner, SavePlanner
from dist_checkpointing.planning.balance import choose_writers
from dist_checkpointing.planning.balanced_planner import check_replicas_have_data
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.plan_save import AgreedPlan, PlanCache
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import ShardTable, concatenate
from dist_checkpointing.storage.protocol import StorageWriter
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    PathOrStr,
    PlannedSaveStrategy,
    SaveShardedStrategy,
)
from dist_checkpointing.strategies.fully_parallel.agreed_cache import AgreedCache
from dist_checkpointing.strategies.fully_parallel.group import GivenGroup, ParallelizationGroup
from dist_checkpointing.strategies.selection import handles_objects

_WRITTEN, _NOT_WRITTEN = 0, 1


class Replicas:
    """Which copies of this rank's leaves say that it writes them, in a group that shares them out.

    Args:
        group: the ranks that share; None: those that the caller of ``marked`` names.
        keeps: whether the answer is used again while no rank's leaves change.
    """

    def __init__(self, group: GivenGroup, *, keeps: bool) -> None:
        self.group = ParallelizationGroup(group, keeps=keeps)
        self._cache: AgreedCache[frozenset[tuple[int, int]]] = AgreedCache(keeps=keeps)

    @property
    def writers(self) -> frozenset[tuple[int, int]] | None:
        """What is kept: (rank in the group, position of its leaf) of all that is written."""
        return self._cache.value

    def marked(self, leaves: Leaves, everybody: Comm) -> dict[Any, ShardedBase]:
        """Copies of the leaves with replica ids that say who writes. Collective over the group.

        A tensor whose main replica is in another group is not written here, and objects stay what
        they are. In a group of one rank all leaves do.
        """

        def describe_own(comm: Comm) -> tuple[ShardTable, None]:
            check_replicas_have_data(list(leaves.values()))
            return describe(list(leaves.values()), comm.rank), None

        def share_out(brought: list[tuple[ShardTable, None]]) -> frozenset[tuple[int, int]]:
            catalog = concatenate([table for table, _ in brought])
            written = catalog.take(choose_writers(catalog, len(brought)))
            return frozenset(zip(written.ranks.tolist(), written.sources.tolist(), strict=True))

        with self.group.meeting(everybody) as comm:
            if comm.world_size == 1:
                return dict(leaves)
            writers = self._cache.get(
                comm, "sharing out the replicas", lambda: describe_own(comm), share_out
            )
        marked = {}
        for source, (path, leaf) in enumerate(leaves.items()):
            marked[path] = copy.copy(leaf)
            if isinstance(leaf, ShardedTensor):
                is_ours = (comm.rank, source) in writers
                marked[path].replica_id = _WRITTEN if is_ours else _NOT_WRITTEN
        return marked


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves with another strategy, every replica writing its share.

    The state dict and its replica ids stay what they are. A strategy made of a StorageWriter gets a
    plan that is balanced to the chunk (see BalancedSavePlanner); any other strategy, and one with a
    planner of its own, gets copies of the leaves whose replica ids say who writes. Sharded objects
    are written by their main replicas.

    Args:
        strategy: does the writing.
        parallelization_group: the ranks among which replicas are shared out, this one included. A
            shard stays in the group of its main replica. By default all ranks.
        do_cache_distribution: keep who writes which copy, and share out again only when the leaves
            of some rank of the group have changed, which all of them find out together. (Balanced
            plans are made of what all ranks say in every save; there only who is in which group is
            kept.) The same on all ranks.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: GivenGroup = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self._replicas = Replicas(parallelization_group, keeps=do_cache_distribution)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)

    @property
    def cached_distribution(self) -> frozenset[tuple[int, int]] | None:
        """What is kept: (rank in the group, position of its leaf) of all that is written."""
        return self._replicas.writers

    def resolved(self) -> SaveShardedStrategy:
        if isinstance(self.base_strategy, PlannedSaveStrategy):
            return _PlannedParallelSave(self.base_strategy, self._replicas)
        return self

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Prepare a save. Collective over the group.

        Raises:
            CheckpointingException: if the wrapped strategy cannot save asynchronously.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {self.base_strategy}"
            )
        return self.base_strategy.async_save(self._marked(sharded_state_dict), checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        if isinstance(self.base_strategy, PlannedSaveStrategy):
            self.resolved().save(sharded_state_dict, checkpoint_dir)
        else:
            self.base_strategy.save(self._marked(sharded_state_dict), checkpoint_dir)

    def _marked(self, state_dict: ShardedStateDict) -> ShardedStateDict:
        leaves, skeleton = flatten(state_dict)
        marked: ShardedStateDict = unflatten(
            skeleton, self._replicas.marked(leaves, default_comm())
        )
        return marked


class _PlannedParallelSave(PlannedSaveStrategy):
    """A planned strategy with a plan that shares out the replicas; all else is the strategy's."""

    def __init__(self, base: PlannedSaveStrategy, replicas: Replicas) -> None:
        SaveShardedStrategy.__init__(self, base.backend, base.version)
        self.planner, self.comm, self.options = base.planner, base.comm, base.options
        self._base = base
        self._replicas = replicas

    def __str__(self) -> str:
        return f"FullyParallelSaveStrategyWrapper({self._base})"

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self._base)

    def make_writer(self, checkpoint_dir: Path) -> StorageWriter:
        return self._base.make_writer(checkpoint_dir)

    def plan(
        self,
        leaves: Leaves,
        writer: StorageWriter,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
    ) -> tuple[AgreedPlan, SavePlanner]:
        planner = BalancedSavePlanner() if self.planner is None else self.planner
        if not isinstance(planner, BalancedSavePlanner):
            with comm.agreed("sharing out the replicas"):
                marked = self._replicas.marked(leaves, comm)
            return self._base.plan(marked, writer, comm, cache=cache, others=others)
        balanced = copy.copy(self._base)
        balanced.planner = planner.within(self._replicas.group.numbers(comm))
        return balanced.plan(leaves, writer, comm, cache=cache, others=others)
