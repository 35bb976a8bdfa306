"""The four kinds of leaves of a sharded state dict: each says what it is a part of."""

import logging

from dist_checkpointing.errors import CheckpointingException as CheckpointingException
from dist_checkpointing.mapping.nested_dicts import flatten as flatten, unflatten as unflatten
from dist_checkpointing.mapping.objects_and_factories import (
    CommonStateDict as CommonStateDict,
    FactoryBuildFn as FactoryBuildFn,
    FactoryMergeFn as FactoryMergeFn,
    LocalNonpersistentObject as LocalNonpersistentObject,
    ReplicaId as ReplicaId,
    ShardedBase as ShardedBase,
    ShardedObject as ShardedObject,
    ShardedStateDict as ShardedStateDict,
    ShardedStateful as ShardedStateful,
    ShardedTensorFactory as ShardedTensorFactory,
    StateDict as StateDict,
    StoredState as StoredState,
    apply_factories as apply_factories,
    apply_factory_merges as apply_factory_merges,
    is_main_replica as is_main_replica,
)
from dist_checkpointing.mapping.sharded_tensor import ShardedTensor as ShardedTensor
from dist_checkpointing.mapping.tensor_memory import (
    DTYPES as DTYPES,
    DType as DType,
    as_numpy as as_numpy,
    as_tensor as as_tensor,
)

logger: logging.Logger = logging.getLogger(__name__)
