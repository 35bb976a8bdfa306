"""Wrappers with which ranks share the work on replicas, and who does what in Megatron's terms."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dist_checkpointing.interop.megatron.modules import dict_utils
from dist_checkpointing.interop.megatron.modules import exchange_utils as exchange
from dist_checkpointing.interop.megatron.modules.utils import _sharded_tensor_shard_id
from dist_checkpointing.mapping import ShardedTensor, StateDict
from dist_checkpointing.strategies import fully_parallel as ours
from dist_checkpointing.strategies.base import PathOrStr
from dist_checkpointing.strategies.planned_strategies import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
)


class FullyParallelSaveStrategyWrapper(ours.FullyParallelSaveStrategyWrapper):
    """See the wrapper of the same name in this library.

    Attributes:
        cached_distribution: Who writes what, as the first direct ``save`` found it, if it is kept.
    """

    cached_distribution: Any = None

    def __init__(
        self, strategy: Any, parallelization_group: Any = None, do_cache_distribution: bool = False
    ) -> None:
        super().__init__(strategy, parallelization_group, do_cache_distribution)
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution

    def save(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> None:
        _distribute(self, sharded_state_dict, is_load=False)
        super().save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper(ours.FullyParallelLoadStrategyWrapper):
    """See the wrapper of the same name in this library.

    Attributes:
        cached_distribution: Who reads what, as the first direct ``load`` found it, if it is kept.
    """

    cached_distribution: Any = None
    cached_global_metadata: Any = None

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: Any = "broadcast",
    ) -> None:
        super().__init__(strategy, parallelization_group, do_cache_distribution, exchange_algo)
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution

    def load(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> StateDict:
        _distribute(self, sharded_state_dict, is_load=True)
        return super().load(sharded_state_dict, checkpoint_dir)


def _distribute(wrapper: Any, state_dict: StateDict, *, is_load: bool) -> None:
    if not wrapper.do_cache_distribution:
        return
    group = wrapper.parallelization_group
    if wrapper.cached_distribution is None:
        found = exchange.determine_main_replica_uniform_distribution(state_dict, group, is_load)
        wrapper.cached_distribution = found
    # A strategy of somebody else goes by replica ids.
    if not isinstance(wrapper.base_strategy, PlannedSaveStrategy | PlannedLoadStrategy):
        found = wrapper.cached_distribution
        distribute_main_replicas_with_precomputed_distribution(state_dict, group, found)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: StateDict,
    parallelization_group: Any,
    precomputed_distribution: exchange.ShardDistribution | None,
) -> None:
    """Set the replica ids of tensors, in place: 0 on the rank that gets the shard, else 1."""
    if precomputed_distribution is None:
        return
    rank_of = precomputed_distribution.main_rank_for_shard
    for leaf in dict_utils.nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor):
            rank = rank_of.get(_sharded_tensor_shard_id(leaf))
            leaf.replica_id = int(rank != dist.get_rank(parallelization_group))
