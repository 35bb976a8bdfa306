"""What all sharded leaves share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from dist_checkpointing.errors import Finding, InvalidShardingError

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this is the replica that is written: 0, or a tuple (or list) of zeros."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(part == 0 for part in replica_id)


def invalid_sharding(key: str, problem: str, **details: Any) -> InvalidShardingError:
    """The error for one thing that is wrong with the leaf ``key``."""
    return InvalidShardingError(f"invalid sharding of {key!r}", [Finding(problem, key, **details)])


def require_tensor(key: str, data: object) -> None:
    """Refuse what only looks like a tensor, such as a numpy array."""
    if not isinstance(data, torch.Tensor):
        kind = type(data)
        raise invalid_sharding(
            key,
            "data must be a torch.Tensor",
            expected="torch.Tensor",
            found=f"{kind.__module__}.{kind.__qualname__}",
            remedy="torch.from_numpy(array) makes one of a numpy array.",
        )


class ShardedBase(ABC):
    """Anything in a state dict that is not common state: it has a key, data and a replica id."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise InvalidShardingError if the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same description with ``data=None``."""
