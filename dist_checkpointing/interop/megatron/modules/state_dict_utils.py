"""A sharded state dict sorted out as Megatron does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_checkpointing.interop.megatron.modules.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
)
from dist_checkpointing.interop.megatron.modules.utils import (
    extract_nonpersistent,
    extract_sharded_base,
)
from dist_checkpointing.interop.megatron.modules.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], CommonStateDict] | None
    ) = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """The sharded and the common part of what is saved; factories are applied in place."""
    apply_factories(sharded_state_dict)
    sharded, common = extract_sharded_base(extract_nonpersistent(sharded_state_dict)[1])
    sharded = filter_out_empty_flatten_tensor(sharded)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check or (lambda state: state)
        _, metadata = determine_global_metadata(sharded)
        validate_sharding_integrity(metadata, preprocess(dict(common)))
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, Any, Any]:
    """A template with its factories applied, its local values, and the factories without data."""
    copied = filter_out_empty_flatten_tensor(
        extract_matching_values(sharded_state_dict, lambda _: True)[0]
    )
    factories, _ = extract_matching_values(
        copied, lambda x: isinstance(x, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(copied)
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    local, sharded = extract_nonpersistent(copied)
    return sharded, dict_list_map_inplace(lambda x: x.unwrap(), local), factories


def filter_out_empty_flatten_tensor(sharded_state_dict: Any) -> Any:
    """The nest without the tensors whose flattened range is empty."""

    def is_empty(x: object) -> bool:
        flat = x.flat_range if isinstance(x, ShardedTensor) else None
        return flat is not None and flat[0] == flat[1]

    return extract_matching_values(sharded_state_dict, is_empty)[1]
