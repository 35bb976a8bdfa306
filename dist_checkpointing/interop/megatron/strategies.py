"""Strategies with the names and attributes that Megatron's training and its files use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dist_checkpointing.interop.megatron import shard_exchange, state_dicts
from dist_checkpointing.interop.megatron.state_dicts import _sharded_tensor_shard_id
from dist_checkpointing.mapping import ShardedTensor, StateDict
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies import base, fully_parallel, torch_dist
from dist_checkpointing.strategies.base import PathOrStr, PlannedLoadStrategy, PlannedSaveStrategy

_results_queue = None  # Megatron's training imports it


class TorchDistSaveShardedStrategy(torch_dist.TorchDistSaveShardedStrategy):
    """Saves torch_dist, with the parameters of Megatron's strategy. Nobody reads other than main
    replicas, so ``keep_only_main_replica`` has no effect.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        del keep_only_main_replica
        options = StorageOptions(threads=thread_count)
        super().__init__(backend, version, separation_hint=separation_hint, options=options)
        self.use_cached_ckpt_structure = cached_metadata
        self.cached_global_metadata: Metadata | None = None
        self._plan_cache = PlanCache()

    @property
    def plan_cache(self) -> PlanCache | None:
        return self._plan_cache if self.use_cached_ckpt_structure else None


class TorchDistLoadShardedStrategy(torch_dist.TorchDistLoadShardedStrategy):
    cached_global_metadata: Metadata | None = None


WITH_ATTRIBUTES: Mapping[type, Callable[[], Any]] = {
    torch_dist.TorchDistSaveShardedStrategy: TorchDistSaveShardedStrategy,
    torch_dist.TorchDistLoadShardedStrategy: TorchDistLoadShardedStrategy,
}


def get_default_strategy(action: base.StrategyAction, backend: str, version: int) -> Any:
    """A strategy; for torch_dist one with the attributes that Megatron's training sets."""
    found = base.get_default_strategy(action, backend, version)
    return WITH_ATTRIBUTES.get(type(found), lambda: found)()


# Files that Megatron wrote name these two, and torch's own reader looks for them.


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: dict[str, dict[str, Any]] | None = None


# The work that ranks share.


class _FullyParallel:
    """What both wrappers have. ``cached_distribution`` is who writes or reads what, as the first
    direct call found it, if it is kept.
    """

    cached_distribution: Any = None

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        *more: Any,
        **options: Any,
    ) -> None:
        given: tuple[Any, ...] = (strategy, parallelization_group, do_cache_distribution, *more)
        super().__init__(*given, **options)
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution


class FullyParallelSaveStrategyWrapper(
    _FullyParallel, fully_parallel.FullyParallelSaveStrategyWrapper
):
    def save(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> None:
        _distribute(self, sharded_state_dict, is_load=False)
        super().save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper(
    _FullyParallel, fully_parallel.FullyParallelLoadStrategyWrapper
):
    cached_global_metadata: Any = None

    def load(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> StateDict:
        _distribute(self, sharded_state_dict, is_load=True)
        return super().load(sharded_state_dict, checkpoint_dir)


def _distribute(wrapper: Any, state_dict: StateDict, *, is_load: bool) -> None:
    if not wrapper.do_cache_distribution:
        return
    group = wrapper.parallelization_group
    if wrapper.cached_distribution is None:
        determine = shard_exchange.determine_main_replica_uniform_distribution
        wrapper.cached_distribution = determine(state_dict, group, is_load)
    # A strategy of somebody else goes by replica ids.
    if not isinstance(wrapper.base_strategy, PlannedSaveStrategy | PlannedLoadStrategy):
        distribute_main_replicas_with_precomputed_distribution(
            state_dict, group, wrapper.cached_distribution
        )


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: StateDict,
    parallelization_group: Any,
    precomputed_distribution: shard_exchange.ShardDistribution | None,
) -> None:
    """Set the replica ids of tensors, in place: 0 on the rank that gets the shard, else 1."""
    if precomputed_distribution is None:
        return
    rank_of = precomputed_distribution.main_rank_for_shard
    for leaf in state_dicts.nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor):
            rank = rank_of.get(_sharded_tensor_shard_id(leaf))
            leaf.replica_id = int(rank != dist.get_rank(parallelization_group))
