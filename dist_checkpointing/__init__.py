"""Distributed checkpoints: saved by any set of ranks, loaded by any other."""

import importlib
import typing

from dist_checkpointing.async_save import async_save
from dist_checkpointing.async_saver import AsyncSaver
from dist_checkpointing.commit import check_is_distributed_checkpoint
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidShardingError,
    RankFailedError,
    StateMismatchError,
    StrategyNotFoundError,
    UnsupportedFormatError,
)
from dist_checkpointing.manager import CheckpointManager
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_checkpointing.planned_save import PlanCache
from dist_checkpointing.retention import Retention
from dist_checkpointing.save_handle import SaveHandle
from dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from dist_checkpointing.staging import StagingBuffers
from dist_checkpointing.validation import StrictHandling
from dist_checkpointing.verify import verify_checkpoint

__all__ = [
    "AsyncSaver",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingException",
    "CorruptCheckpointError",
    "InvalidShardingError",
    "LocalNonpersistentObject",
    "PlanCache",
    "RankFailedError",
    "Retention",
    "SaveHandle",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StagingBuffers",
    "StateMismatchError",
    "StrategyNotFoundError",
    "StrictHandling",
    "UnsupportedFormatError",
    "async_save",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "verify_checkpoint",
]


def __getattr__(name: str) -> typing.Any:
    # On first use: it imports torch.distributed.checkpoint, which not everybody needs.
    if name == "interop":
        return importlib.import_module(f"{__name__}.interop")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
