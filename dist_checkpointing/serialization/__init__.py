"""Save, load, save behind a training, and the small readers."""

from dist_checkpointing.format.commit import check_is_distributed_checkpoint
from dist_checkpointing.serialization.async_save import AsyncSaver, SaveHandle, async_save
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.load_metadata import (
    get_default_load_sharded_strategy,
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    preview_removal,
    remove_sharded_tensors,
)
from dist_checkpointing.serialization.load_recipe import preview_recipe
from dist_checkpointing.serialization.save import save

__all__ = [
    "AsyncSaver",
    "SaveHandle",
    "async_save",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "preview_recipe",
    "preview_removal",
    "remove_sharded_tensors",
    "save",
]
