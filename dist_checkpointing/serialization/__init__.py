"""Save, load, save in the background, and the small readers."""

from dist_checkpointing.format.commit import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
)
from dist_checkpointing.serialization.async_save import (
    AsyncSaver as AsyncSaver,
    SaveHandle as SaveHandle,
    async_save as async_save,
)
from dist_checkpointing.serialization.load import load as load
from dist_checkpointing.serialization.load_metadata import (
    get_default_load_sharded_strategy as get_default_load_sharded_strategy,
    get_default_save_common_strategy as get_default_save_common_strategy,
    get_default_save_sharded_strategy as get_default_save_sharded_strategy,
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_sharded_metadata as load_sharded_metadata,
    load_tensors_metadata as load_tensors_metadata,
    preview_removal as preview_removal,
    remove_sharded_tensors as remove_sharded_tensors,
)
from dist_checkpointing.serialization.recipes import preview_recipe as preview_recipe
from dist_checkpointing.serialization.save import save as save
