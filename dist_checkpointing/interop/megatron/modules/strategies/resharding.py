"""Flattened tensors that are loaded in another form: the readers do that, and nothing is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_checkpointing.mapping import ShardedTensor, StateDict
from dist_checkpointing.strategies.torch_dist.metadata import flattened_size


@dataclass
class TensorReformulationMetadata:
    """Shape of a flattened tensor, and shape in which torch_dist stores it."""

    ckpt_orig_global_shape: tuple[int, ...]
    ckpt_reform_global_shape: tuple[int, ...]


def is_nd_flattened_tensor(sh_ten: Any) -> bool:
    """Whether it is a flattened shard."""
    return isinstance(sh_ten, ShardedTensor) and sh_ten.flattened_range is not None


def nd_flattened_tensor_reformulated_global_shape(sh_ten: ShardedTensor) -> tuple[int, ...]:
    """Shape in which torch_dist stores the tensor of a flattened shard."""
    return flattened_size(sh_ten.global_shape, sh_ten.box.shape)


def apply_nd_flattened_tensors_reformulation(
    sharded_state_dict: StateDict, reformulation_metadata: Mapping[str, Any]
) -> tuple[StateDict, StateDict]:
    """The state dict as it is."""
    del reformulation_metadata
    return sharded_state_dict, {}


def restore_nd_flattened_tensors_formulation(
    state_dict: StateDict, formulation_restore_metadata: StateDict
) -> StateDict:
    """The state dict as it is."""
    del formulation_restore_metadata
    return state_dict
