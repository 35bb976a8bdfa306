"""The four kinds of leaves of a sharded state dict: each says what it is a part of."""

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.mapping.base import (
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from dist_checkpointing.mapping.factory import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from dist_checkpointing.mapping.objects import LocalNonpersistentObject, ShardedObject
from dist_checkpointing.mapping.stateful import ShardedStateful, StoredState
from dist_checkpointing.mapping.tensor import ShardedTensor

__all__ = [
    "CheckpointingException",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedStateful",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "StoredState",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
