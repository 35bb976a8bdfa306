"""Wrappers with which ranks share the work on replicas, and who does what in Megatron's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_checkpointing.interop.megatron.modules import exchange_utils as exchange
from dist_checkpointing.interop.megatron.modules.utils import _sharded_tensor_shard_id
from dist_checkpointing.mapping import StateDict
from dist_checkpointing.strategies import fully_parallel as ours
from dist_checkpointing.strategies.base import PathOrStr

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "_sharded_tensor_shard_id",
]


class FullyParallelSaveStrategyWrapper(ours.FullyParallelSaveStrategyWrapper):
    """See the wrapper of the same name in this library."""

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy, parallelization_group, do_cache_distribution)
        self._view = _View(parallelization_group, keeps=do_cache_distribution, is_load=False)

    @property
    def cached_distribution(self) -> Any:
        """Who writes what, as the first direct call of ``save`` found it, if that is kept."""
        return self._view.distribution

    def save(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> None:
        self._view.note(sharded_state_dict)
        super().save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper(ours.FullyParallelLoadStrategyWrapper):
    """See the wrapper of the same name in this library."""

    cached_global_metadata: Any = None

    def __init__(
        self,
        strategy: Any,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: Any = "broadcast",
    ) -> None:
        super().__init__(strategy, parallelization_group, do_cache_distribution, exchange_algo)
        self._view = _View(parallelization_group, keeps=do_cache_distribution, is_load=True)

    @property
    def cached_distribution(self) -> Any:
        """Who reads what, as the first direct call of ``load`` found it, if that is kept."""
        return self._view.distribution

    def load(self, sharded_state_dict: StateDict, checkpoint_dir: PathOrStr) -> StateDict:
        self._view.note(sharded_state_dict)
        return super().load(sharded_state_dict, checkpoint_dir)


@dataclass
class _View:
    """Which rank gets which shard, in the form in which Megatron keeps it."""

    group: Any
    keeps: bool
    is_load: bool
    distribution: exchange.ShardDistribution | None = None

    def note(self, state_dict: StateDict) -> None:
        if self.keeps and self.distribution is None:
            self.distribution = exchange.determine_main_replica_uniform_distribution(
                state_dict, self.group, self.is_load
            )
