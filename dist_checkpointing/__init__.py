"""Distributed checkpoints: saved by any set of ranks, loaded by any other."""

import importlib
import typing

from dist_checkpointing import interop as interop

if typing.TYPE_CHECKING:
    from dist_checkpointing.checkpoint.checkpoint import Checkpoint as Checkpoint
    from dist_checkpointing.checkpoint.verify_checkpoint import (
        verify_checkpoint as verify_checkpoint,
    )
    from dist_checkpointing.errors import (
        CheckpointExistsError as CheckpointExistsError,
        CheckpointingException as CheckpointingException,
        CheckpointNotFoundError as CheckpointNotFoundError,
        CorruptCheckpointError as CorruptCheckpointError,
        InvalidShardingError as InvalidShardingError,
        RankFailedError as RankFailedError,
        StateMismatchError as StateMismatchError,
        StrategyNotFoundError as StrategyNotFoundError,
        UnsupportedFormatError as UnsupportedFormatError,
    )
    from dist_checkpointing.filesystem.object_store import (
        ObjectPath as ObjectPath,
        ObjectStoreOptions as ObjectStoreOptions,
    )
    from dist_checkpointing.format.commit import (
        check_is_distributed_checkpoint as check_is_distributed_checkpoint,
    )
    from dist_checkpointing.manager.checkpoint_manager import CheckpointManager as CheckpointManager
    from dist_checkpointing.manager.places import Place as Place
    from dist_checkpointing.manager.retention import Retention as Retention
    from dist_checkpointing.mapping import (
        LocalNonpersistentObject as LocalNonpersistentObject,
        ShardedObject as ShardedObject,
        ShardedTensor as ShardedTensor,
        ShardedTensorFactory as ShardedTensorFactory,
    )
    from dist_checkpointing.planning.recipe import Recipe as Recipe
    from dist_checkpointing.planning.replica_check import ReplicaCheck as ReplicaCheck
    from dist_checkpointing.planning.save_plan import PlanCache as PlanCache
    from dist_checkpointing.serialization.async_save import (
        AsyncSaver as AsyncSaver,
        SaveHandle as SaveHandle,
        async_save as async_save,
    )
    from dist_checkpointing.serialization.fingerprint_of_state import fingerprint as fingerprint
    from dist_checkpointing.serialization.load import load as load
    from dist_checkpointing.serialization.load_metadata import (
        load_common_state_dict as load_common_state_dict,
        load_content_metadata as load_content_metadata,
        load_plain_tensors as load_plain_tensors,
        load_sharded_metadata as load_sharded_metadata,
        load_tensors_metadata as load_tensors_metadata,
        remove_sharded_tensors as remove_sharded_tensors,
    )
    from dist_checkpointing.serialization.save import save as save
    from dist_checkpointing.storage.staging import StagingBuffers as StagingBuffers
    from dist_checkpointing.validation.load_errors import StrictHandling as StrictHandling

__version__ = "0.1.0"

# Imported on first use: looking into a checkpoint needs no torch.
_NAMES_BY_MODULE = {
    "checkpoint.checkpoint": "Checkpoint",
    "checkpoint.verify_checkpoint": "verify_checkpoint",
    "errors": (
        "CheckpointExistsError CheckpointNotFoundError CheckpointingException "
        "CorruptCheckpointError InvalidShardingError RankFailedError StateMismatchError "
        "StrategyNotFoundError UnsupportedFormatError"
    ),
    "filesystem.object_store": "ObjectPath ObjectStoreOptions",
    "format.commit": "check_is_distributed_checkpoint",
    "manager.checkpoint_manager": "CheckpointManager",
    "manager.places": "Place",
    "manager.retention": "Retention",
    "mapping": "LocalNonpersistentObject ShardedObject ShardedTensor ShardedTensorFactory",
    "planning.save_plan": "PlanCache",
    "planning.recipe": "Recipe",
    "planning.replica_check": "ReplicaCheck",
    "serialization.async_save": "AsyncSaver SaveHandle async_save",
    "serialization.fingerprint_of_state": "fingerprint",
    "serialization.load": "load",
    "serialization.load_metadata": (
        "load_common_state_dict load_content_metadata load_plain_tensors load_sharded_metadata "
        "load_tensors_metadata remove_sharded_tensors"
    ),
    "serialization.save": "save",
    "storage.staging": "StagingBuffers",
    "validation.load_errors": "StrictHandling",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - type checkers see the imports above

if not typing.TYPE_CHECKING:
    # Hidden from type checkers, which then report a name that does not exist.
    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
