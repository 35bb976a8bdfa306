"""What Megatron's code sees as ``megatron.core.dist_checkpointing``: one file for each module.

Names, parameters and results are Megatron's; the work is done by the rest of this library.
"""

from dist_checkpointing.interop.megatron.modules.core import check_is_distributed_checkpoint
from dist_checkpointing.interop.megatron.modules.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
