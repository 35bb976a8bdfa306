"""What a save gives to those that write: the caller's own values, or copies of them."""

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
from dist_checkpointing.mapping.nesting import flatten, path_text
from dist_checkpointing.planning import SavePlanner
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.storage.staging import StagingBuffers, detached_copy


@dataclass(frozen=True, slots=True, eq=False)
class Values:
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


def tensors_by_name(leaves: Leaves, common: CommonStateDict) -> dict[str, list[torch.Tensor]]:
    """All tensors, by key, or by path where they are common state."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for leaf in leaves.values():
        if isinstance(leaf.data, torch.Tensor):
            tensors.setdefault(leaf.key, []).append(leaf.data)
    values, _ = flatten(common)
    for path, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault(path_text(path), []).append(value)
    return tensors


def copied_objects(leaves: Leaves) -> dict[Any, ShardedBase]:
    """Leaves of their own, with copies of the objects that will be written."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
        result[path] = copied
    return result


def copied_leaves(leaves: Leaves, buffers: StagingBuffers) -> dict[Any, ShardedBase]:
    """Copies of all tensors and objects, for a strategy that alone knows what it writes."""
    tensors = {
        path: leaf.data for path, leaf in leaves.items() if isinstance(leaf.data, torch.Tensor)
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    copies = buffers.fill(sizes, tensors.values())
    copied = dict(zip(tensors, copies, strict=True))
    result = copied_objects(leaves)
    for path, leaf in result.items():
        if isinstance(leaf, ShardedTensor):
            leaf.data = copied.get(path)
    return result
