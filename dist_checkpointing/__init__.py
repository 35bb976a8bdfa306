"""Distributed checkpoints: saved by any set of ranks, loaded by any other."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing import interop as interop
    from dist_checkpointing.checkpoint.checkpoint import Checkpoint
    from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
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
    from dist_checkpointing.filesystem.object_store import ObjectPath, ObjectStoreOptions
    from dist_checkpointing.format.commit import check_is_distributed_checkpoint
    from dist_checkpointing.manager.checkpoint_manager import CheckpointManager
    from dist_checkpointing.manager.retention import Retention
    from dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from dist_checkpointing.planning.recipe import Recipe
    from dist_checkpointing.planning.replica_check import ReplicaCheck
    from dist_checkpointing.planning.save_plan import PlanCache
    from dist_checkpointing.serialization.async_save import AsyncSaver, SaveHandle, async_save
    from dist_checkpointing.serialization.fingerprint_of_state import fingerprint
    from dist_checkpointing.serialization.load import load
    from dist_checkpointing.serialization.load_metadata import (
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_sharded_metadata,
        load_tensors_metadata,
        remove_sharded_tensors,
    )
    from dist_checkpointing.serialization.save import save
    from dist_checkpointing.storage.staging import StagingBuffers
    from dist_checkpointing.validation.strictness import StrictHandling

__version__ = "0.1.0"

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointingException",
    "CorruptCheckpointError",
    "InvalidShardingError",
    "LocalNonpersistentObject",
    "ObjectPath",
    "ObjectStoreOptions",
    "PlanCache",
    "RankFailedError",
    "Recipe",
    "ReplicaCheck",
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
    "fingerprint",
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

# Imported on first use: looking into a checkpoint needs no torch.
_NAMES_BY_MODULE = {
    "checkpoint.checkpoint": ("Checkpoint",),
    "checkpoint.verify_checkpoint": ("verify_checkpoint",),
    "errors": (
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CheckpointingException",
        "CorruptCheckpointError",
        "InvalidShardingError",
        "RankFailedError",
        "StateMismatchError",
        "StrategyNotFoundError",
        "UnsupportedFormatError",
    ),
    "filesystem.object_store": ("ObjectPath", "ObjectStoreOptions"),
    "format.commit": ("check_is_distributed_checkpoint",),
    "manager.checkpoint_manager": ("CheckpointManager",),
    "manager.retention": ("Retention",),
    "mapping": (
        "LocalNonpersistentObject",
        "ShardedObject",
        "ShardedTensor",
        "ShardedTensorFactory",
    ),
    "planning.save_plan": ("PlanCache",),
    "planning.recipe": ("Recipe",),
    "planning.replica_check": ("ReplicaCheck",),
    "serialization.async_save": ("AsyncSaver", "SaveHandle", "async_save"),
    "serialization.fingerprint_of_state": ("fingerprint",),
    "serialization.load": ("load",),
    "serialization.load_metadata": (
        "load_common_state_dict",
        "load_content_metadata",
        "load_plain_tensors",
        "load_sharded_metadata",
        "load_tensors_metadata",
        "remove_sharded_tensors",
    ),
    "serialization.save": ("save",),
    "storage.staging": ("StagingBuffers",),
    "validation.strictness": ("StrictHandling",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


if not typing.TYPE_CHECKING:
    # Hidden from type checkers, which then report a name that does not exist.
    def __getattr__(name: str) -> typing.Any:
        if name == "interop":
            return importlib.import_module(f"{__name__}.interop")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "interop"})
