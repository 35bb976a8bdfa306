"""The state of an optimizer, sharded as the parameters of the model are."""

from __future__ import annotations

import copy
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dist_checkpointing.interop.megatron import state_dicts
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

logger: logging.Logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " The state dict must hold the parameters themselves: call state_dict(keep_vars=True), and wrap"
    " what has another form in a checkpoint into a ShardedTensorFactory."
)

Parameter = ShardedTensor | ShardedTensorFactory


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """``{id(parameter): number in the optimizer}``, the first number of each."""
    numbers: dict[int, int] = {}
    for number, parameter in enumerate(optim_params_iter):
        numbers.setdefault(id(_local(parameter)), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: StateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Parameter]:
    """``{number in the optimizer: leaf of the model}`` of parameters that are a leaf's data."""
    numbers = get_optim_param_to_id_map(optim_params_iter)
    leaves, _ = state_dicts.extract_sharded_tensors_and_factories(model_sharded_state_dict)
    values = state_dicts.nested_values(leaves)
    found = {numbers[id(x.data)]: x for x in values if id(x.data) in numbers}
    if not found:
        logger.warning("No leaf of the model is a parameter of the optimizer.%s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: Parameter, optim_param: torch.Tensor, prefix: str
) -> Parameter:
    data, key = _local(optim_param), f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    assert tuple(data.shape) == tuple(model_param.local_shape), (key, data.shape, model_param)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, Parameter],
    exclude_keys: Container[str] = (),
) -> None:
    sharded: dict[Any, dict[str, Parameter]] = {}
    for number, state in optim_state_dict["state"].items():
        kept = {name: value for name, value in state.items() if name not in exclude_keys}
        if kept and number not in id_to_sharded_param_map:
            raise ValueError(f"Param id {number} does not match any model sharded param")
        sharded[number] = {
            name: make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number], value, f"optimizer.state.{name}"
            )
            for name, value in kept.items()
        }
    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict |= {"state": sharded, "param_groups": groups}
