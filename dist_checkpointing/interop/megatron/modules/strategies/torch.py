"""The strategies of torch_dist, with the attributes that Megatron's training sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dist_checkpointing.interop.megatron.import_hook import forwarding
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies import torch_dist as ours

__getattr__ = forwarding(
    __name__,
    without_effect=("register_default_torch_strategies",),
    left_out=("MCoreLoadPlanner", "MCoreSavePlanner"),
)


class TorchDistSaveShardedStrategy(ours.TorchDistSaveShardedStrategy):
    """Saves torch_dist; see the strategy of the same name in this library.

    Args:
        backend: Must be "torch_dist".
        version: Must be 1.
        keep_only_main_replica: Has no effect: nobody reads the others.
        thread_count: Number of threads that write.
        cached_metadata: Use the plan of the last save while nothing but values changes.
        separation_hint: Tensors whose keys begin with this get data files of their own.
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
        """What ``save`` keeps from one call to the next."""
        return self._plan_cache if self.use_cached_ckpt_structure else None


class TorchDistLoadShardedStrategy(ours.TorchDistLoadShardedStrategy):
    """Loads torch_dist; see the strategy of the same name in this library."""

    cached_global_metadata: Metadata | None = None


WITH_ATTRIBUTES = {
    ours.TorchDistSaveShardedStrategy: TorchDistSaveShardedStrategy,
    ours.TorchDistLoadShardedStrategy: TorchDistLoadShardedStrategy,
}


# Files that Megatron wrote name these two, and torch's own reader looks for them.


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: dict[str, dict[str, Any]] | None = None


def get_reformulation_metadata(sharded_state_dict: Any, checkpoint_dir: Any) -> dict[str, Any]:
    """Nothing: the readers load flattened tensors in any form."""
    del sharded_state_dict, checkpoint_dir
    return {}
