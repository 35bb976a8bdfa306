"""The four kinds of leaves of a sharded state dict: each says what it is a part of."""

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.mapping.nested_dicts import flatten as flatten, unflatten as unflatten
from dist_checkpointing.mapping.objects_and_factories import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedStateful,
    ShardedTensorFactory,
    StateDict,
    StoredState,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from dist_checkpointing.mapping.sharded_tensor import ShardedTensor
from dist_checkpointing.mapping.tensor_memory import (
    DTYPES as DTYPES,
    DType as DType,
    as_numpy as as_numpy,
    as_tensor as as_tensor,
)

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
