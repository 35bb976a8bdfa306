"""A sharded state dict sorted out as Megatron does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_checkpointing.interop.megatron.modules import dict_utils, utils, validation
from dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)


def save_preprocess(
    sharded_state_dict: StateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
) -> tuple[StateDict, StateDict]:
    """The sharded and the common part of what is saved; factories are applied in place."""
    apply_factories(sharded_state_dict)
    sharded, common = utils.extract_sharded_base(utils.extract_nonpersistent(sharded_state_dict)[1])
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check or (lambda state: state)
        _, metadata = validation.determine_global_metadata(sharded)
        validation.validate_sharding_integrity(metadata, preprocess(dict(common)))
    return sharded, common


def load_preprocess(
    sharded_state_dict: StateDict,
) -> tuple[StateDict, Any, Any]:
    """A template with its factories applied, its local values, and the factories without data."""
    copied = filter_out_empty_flatten_tensor(
        dict_utils.extract_matching_values(sharded_state_dict, lambda _: True)[0]
    )
    factories, _ = dict_utils.extract_matching_values(
        copied, lambda x: isinstance(x, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    dict_utils.dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    local, sharded = utils.extract_nonpersistent(copied)
    return sharded, dict_utils.dict_list_map_inplace(lambda x: x.unwrap(), local), factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """The nest without the tensors whose flattened range is empty."""

    def is_empty(x: object) -> bool:
        flat = x.flat_range if isinstance(x, ShardedTensor) else None
        return flat is not None and flat[0] == flat[1]

    return dict_utils.extract_matching_values(sharded_state_dict, is_empty)[1]
