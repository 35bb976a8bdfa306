"""What one rank saves: the caller's own values, or copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from dist_checkpointing.mapping.nested_dicts import flatten, path_text
from dist_checkpointing.mapping.state_dict_parts import Partition, partition
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.storage.staging import StagingBuffers, detached_copy, stage_plan
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.selection import handles_objects


@dataclass(frozen=True, slots=True, eq=False)
class RankValues:
    """What this rank gives to those that write: the caller's own values, or copies.

    Attributes:
        common: The common state, written on rank 0.
        objects: Nest of the ShardedObjects that the common strategy writes; None if it has none.
        leaves: Nest of what a strategy without a StorageWriter writes.
        planner: Planner that answers for the data of the plan's items.
    """

    common: CommonStateDict
    objects: ShardedStateDict | None
    leaves: ShardedStateDict
    planner: SavePlanner | None


class RankState:
    """What one rank saves: the caller's own state until ``capture`` has copied it.

    Args:
        parts: The state dict, taken apart.
        common: Common state.
        strategy: Writes the sharded state.
        rank: The rank; only rank 0 writes the common state.

    Attributes:
        common: Common state.
        by_strategy: Leaves that the strategy writes.
        by_common: Leaves that the common strategy writes.
        planner: Answers for the data of the plan, once there is one.
    """

    def __init__(
        self, parts: Partition, common: CommonStateDict, strategy: SaveShardedStrategy, rank: int
    ) -> None:
        self._parts, self.common = parts, common
        self._writes_common = rank == 0
        self._is_planned = isinstance(strategy, PlannedSaveStrategy)
        self.by_strategy: Leaves = parts.tensors
        self.by_common: Leaves = parts.objects
        if handles_objects(strategy):
            self.by_strategy, self.by_common = {**parts.tensors, **parts.objects}, {}
        self.planner: SavePlanner | None = None
        self._copies: RankValues | None = None

    def values(self) -> RankValues:
        """What is written: of the caller's own state, or the copies."""
        if self._copies is not None:
            return self._copies
        return self._nested(self.common, self.by_common, self.by_strategy, self.planner)

    def _nested(
        self, common: CommonStateDict, objects: Leaves, leaves: Leaves, planner: SavePlanner | None
    ) -> RankValues:
        nested = self._parts.nested
        return RankValues(
            common,
            nested(objects) if objects else None,
            {} if self._is_planned else nested(leaves),
            planner,
        )

    def capture(self, plan: SavePlan | None, buffers: StagingBuffers) -> None:
        """Copy what this rank will write, by its plan if it has one; let go of the rest."""
        common = detached_copy(self.common) if self._writes_common else {}
        objects = _copied_objects(self.by_common)
        leaves: Leaves = {}
        planner: SavePlanner | None = None
        if plan is None:
            leaves = _copied_leaves(self.by_strategy, buffers)
        else:
            assert self.planner is not None
            planner = stage_plan(plan, self.planner, buffers)
        self._copies = self._nested(common, objects, leaves, planner)
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of the caller's state."""
        self._parts, self.common = partition({}), {}
        self.by_strategy, self.by_common, self.planner = {}, {}, None

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The caller's tensors that ``capture`` may copy, by key, or by path in common state."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for leaf in self.by_strategy.values():
            if isinstance(leaf.data, torch.Tensor):
                tensors.setdefault(leaf.key, []).append(leaf.data)
        values, _ = flatten(self.common if self._writes_common else {})
        for path, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(path_text(path), []).append(value)
        return tensors


def _copied_objects(leaves: Leaves) -> dict[Any, ShardedBase]:
    """Leaves of their own, with copies of the objects that will be written."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
        result[path] = copied
    return result


def _copied_leaves(leaves: Leaves, buffers: StagingBuffers) -> dict[Any, ShardedBase]:
    """Copies of all tensors and objects, for a strategy that alone knows what it writes."""
    tensors = {
        path: leaf.data for path, leaf in leaves.items() if isinstance(leaf.data, torch.Tensor)
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    copies = buffers.fill(sizes, tensors.values())
    copied = dict(zip(tensors, copies, strict=True))
    result = _copied_objects(leaves)
    for path, leaf in result.items():
        if isinstance(leaf, ShardedTensor):
            leaf.data = copied.get(path)
    return result
