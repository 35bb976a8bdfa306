"""Wrapper: ranks of a group share the writing of replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from dist_checkpointing.comm import Comm, default_comm, group_comm
from dist_checkpointing.errors import CheckpointingException, RankFailedError
from dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning import BalancedSavePlanner, SavePlanner
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.replica_balancing import check_replicas_have_data, choose_writers
from dist_checkpointing.planning.shard_table import PackedTable, concatenate, describe, pack
from dist_checkpointing.planning.table_exchange import AgreedCache
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    PathOrStr,
    PlannedSaveStrategy,
    SaveShardedStrategy,
    handles_objects,
)

T = TypeVar("T")
GivenGroup = dist.ProcessGroup | Comm | None
"""A process group, the comm of simulated ranks, or None for all ranks."""


class ParallelizationGroup(Generic[T]):
    """A group as a caller gives it, and what it has worked out. A rank outside of it is alone."""

    def __init__(self, given: GivenGroup, *, keeps: bool) -> None:
        self._given = given
        self._keeps = keeps
        self.cache: AgreedCache[T] = AgreedCache(keeps=keeps)
        self._found: tuple[Comm, Comm, list[int]] | None = None
        self._numbers: tuple[Comm, list[int]] | None = None

    @contextmanager
    def comm(self, everybody: Comm) -> Iterator[Comm]:
        """The group, for a body that is collective over it; all of ``everybody`` if none was given.

        Collective over ``everybody`` on first use. Errors name the ranks as they are numbered
        among ``everybody``.
        """
        if self._found is None or self._found[0] is not everybody:
            comm = group_comm(self._given, everybody)
            self._found = everybody, comm, comm.all_gather(everybody.rank)
        _, comm, members = self._found
        try:
            yield comm
        except CheckpointingException as error:
            raise _renumbered(error, members) from error

    def numbers(self, everybody: Comm) -> list[int]:
        """The lowest rank in the group of each rank. Collective over ``everybody``."""
        if self._keeps and self._numbers is not None and self._numbers[0] is everybody:
            return self._numbers[1]
        with everybody.agreed("finding out who shares"), self.comm(everybody):
            assert self._found is not None
            lowest = min(self._found[2])
        numbers = everybody.all_gather(lowest)
        self._numbers = everybody, numbers
        return numbers


def _renumbered(error: CheckpointingException, members: Sequence[int]) -> CheckpointingException:
    """The error of a group with the numbers that its ranks have outside of the group."""
    if error.names_global_ranks or members == [*range(len(members))]:
        return error
    if len(set(members)) < len(members):  # ranks that have no numbers elsewhere
        return error

    def number(rank: int) -> int:
        return members[rank] if rank < len(members) else rank

    findings = [replace(f, ranks=tuple(sorted(map(number, f.ranks)))) for f in error.findings]
    if not isinstance(error, RankFailedError):
        return type(error)(error.message, findings)
    tracebacks = {number(rank): text for rank, text in error.tracebacks.items()}
    return RankFailedError(error.message, findings, tracebacks)


_WRITTEN, _NOT_WRITTEN = 0, 1


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves with another strategy. Each rank of a group writes a part of what is replicated.

    The state dict and its replica ids do not change. A strategy made of a StorageWriter gets a plan
    that is balanced to the chunk (see BalancedSavePlanner). Any other strategy, and one with a
    planner of its own, gets copies of the leaves whose replica ids say who writes. Sharded objects
    are written by their main replicas.

    Args:
        strategy: The strategy that writes.
        parallelization_group: The ranks that share their replicas, this one included. A shard is
            written in the group of its main replica. By default all ranks.
        do_cache_distribution: Whether to keep who writes which replica until the leaves of some
            rank of the group change. Of balanced plans, which every save makes of what all ranks
            bring, only the groups are kept. The same on all ranks.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, save
        >>> from dist_checkpointing.strategies.fully_parallel import (
        ...     FullyParallelSaveStrategyWrapper,
        ... )
        >>> from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", FullyParallelSaveStrategyWrapper(Zarr3SaveShardedStrategy()))
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: GivenGroup = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self._group: ParallelizationGroup[frozenset[tuple[int, int]]] = ParallelizationGroup(
            parallelization_group, keeps=do_cache_distribution
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)

    @property
    def cached_distribution(self) -> frozenset[tuple[int, int]] | None:
        """Each (rank in the group, position of its leaf) that is written, if that is kept."""
        return self._group.cache.value

    def resolved(self) -> SaveShardedStrategy:
        if not isinstance(self.base_strategy, PlannedSaveStrategy):
            return self
        strategy = copy.copy(self.base_strategy)
        strategy.share_replicas = self._shared
        return strategy

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Prepare a save. Collective over the group.

        Raises:
            CheckpointingException: if the wrapped strategy cannot save asynchronously.
        """
        if isinstance(strategy := self.resolved(), PlannedSaveStrategy):
            return strategy.async_save(sharded_state_dict, checkpoint_dir)
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {self.base_strategy}"
            )
        return self.base_strategy.async_save(
            self._marked_nested(sharded_state_dict), checkpoint_dir
        )

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        if isinstance(strategy := self.resolved(), PlannedSaveStrategy):
            strategy.save(sharded_state_dict, checkpoint_dir)
        else:
            self.base_strategy.save(self._marked_nested(sharded_state_dict), checkpoint_dir)

    def _marked_nested(self, state_dict: ShardedStateDict) -> ShardedStateDict:
        leaves, skeleton = flatten(state_dict)
        marked: ShardedStateDict = unflatten(skeleton, self._marked(leaves, default_comm()))
        return marked

    def _shared(
        self, planner: SavePlanner | None, leaves: Leaves, comm: Comm
    ) -> tuple[SavePlanner, Leaves]:
        """See ``PlannedSaveStrategy.share_replicas``."""
        if planner is None:
            planner = BalancedSavePlanner()
        if isinstance(planner, BalancedSavePlanner):
            return planner.within(self._group.numbers(comm)), leaves
        with comm.agreed("sharing out the replicas"):
            return planner, self._marked(leaves, comm)

    def _marked(self, leaves: Leaves, everybody: Comm) -> Leaves:
        """Copies of the leaves with replica ids that say who writes. Collective over the group.

        A tensor whose main replica is in another group is not written here. Objects keep their
        replica ids, and so do all leaves in a group of one rank.
        """

        def describe_own() -> bytes:
            check_replicas_have_data(list(leaves.values()))
            return pack(describe(list(leaves.values()), comm.rank))

        def writers_of(packed: Sequence[bytes]) -> frozenset[tuple[int, int]]:
            tables = [PackedTable(data, rank) for rank, data in enumerate(packed)]
            catalog = concatenate(tables)
            written = catalog.take(choose_writers(catalog, len(packed)))
            return frozenset(zip(written.ranks.tolist(), written.sources.tolist(), strict=True))

        with self._group.comm(everybody) as comm:
            if comm.world_size == 1:
                return leaves
            writers = self._group.cache.work_out(
                comm, "sharing out the replicas", describe_own, writers_of
            )
        marked: dict[Any, ShardedBase] = {}
        for source, (path, leaf) in enumerate(leaves.items()):
            marked[path] = copy.copy(leaf)
            if isinstance(leaf, ShardedTensor):
                is_written = (comm.rank, source) in writers
                marked[path].replica_id = _WRITTEN if is_written else _NOT_WRITTEN
        return marked
