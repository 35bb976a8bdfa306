"""What a strategy is: the abstract classes that every backend derives from, and the registry."""

from __future__ import annotations

import importlib
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Self, TypeVar

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.async_calls import AsyncCallsQueue, AsyncRequest
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)

if typing.TYPE_CHECKING:
    from dist_checkpointing.strategies.planned_strategies import (
        PlannedLoadStrategy,
        PlannedSaveStrategy,
    )

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "PathOrStr",
    "PlannedLoadStrategy",
    "PlannedSaveStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "default_strategies",
    "get_default_strategy",
    "register_default_strategy",
]

PathOrStr = str | PathLike[str]
"""A folder, or the URL of a prefix in an object store."""
M = TypeVar("M", bound=Callable[..., Any])


def left_out(method: M) -> M:
    """Mark a method that raises here, and that a strategy needs only for some checkpoints."""
    method.is_left_out = True  # type: ignore[attr-defined]
    return method


def require_method(strategy: object, name: str, need: str) -> None:
    """Refuse a strategy that lacks a method, before anything is written; ``need`` is a verb."""
    if not has_method(strategy, name):
        raise lacks(strategy, name, need)


def has_method(strategy: object, name: str) -> bool:
    """Whether the class of a strategy has the method, other than one that is only marked."""
    method = getattr(type(strategy), name, None)
    return callable(method) and not getattr(method, "is_left_out", False)


def lacks(strategy: object, name: str, need: str) -> CheckpointingException:
    """The error for a method or an attribute that a strategy lacks."""
    finding = Finding(
        f"it has no {name}, which {need}",
        found=f"{type(strategy).__module__}.{type(strategy).__qualname__}",
        remedy="Add it to the class, or choose another strategy.",
    )
    return CheckpointingException(f"the strategy lacks {type(strategy).__name__}.{name}", [finding])


def handles_objects(strategy: Any) -> bool:
    """Whether a strategy takes ShardedObjects too. In some third-party strategies a method says."""
    answer = strategy.can_handle_sharded_objects
    return bool(answer() if callable(answer) else answer)


class LoadStrategyBase(ABC):
    """Reads one or more (backend, version)s."""

    def trusting(self) -> Self:
        """A strategy that unpickles whatever is stored, for checkpoints from a trusted source."""
        return self

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the backend."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the version."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it reads ShardedObjects as well."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - what its two subclasses have in common
    """Writes one (backend, version)."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it writes ShardedObjects as well."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Reads the common state, and ShardedObjects for strategies that cannot."""

    @abstractmethod
    def load_common(self, checkpoint_dir: PathOrStr) -> StateDict:
        """The common state dict."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> StateDict:
        """The same nested dict with every ShardedObject replaced by its stored value."""

    def file_names(
        self, leaves: Iterable[ShardedObject], checkpoint_dir: PathOrStr
    ) -> Iterable[str]:
        """Relative names of the files that hold the common state and these ShardedObjects."""
        del leaves, checkpoint_dir
        return []

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        """All stored ShardedObjects by unique key, without data."""
        if not self.can_handle_sharded_objects:
            return {}
        del checkpoint_dir
        raise lacks(self, "load_sharded_metadata", "lists the ShardedObjects")


class LoadShardedStrategy(LoadStrategyBase):
    """Reads ShardedTensors.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, save
        >>> from dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 3))}, "ckpt", "zarr")
        >>> strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 2)
        >>> strategy.load_tensors_metadata("ckpt")["w"].global_shape
        (2, 3)
    """

    def for_format(self, backend: str, version: int) -> LoadShardedStrategy:
        """The strategy for one of the formats that it understands: by default itself."""
        del backend, version
        return self

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        """The same nested dict with every ShardedTensor replaced by its loaded tensor."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        """All stored tensors by key, each as one whole shard without data."""

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        """All stored tensors by key, and objects by unique key if this strategy has them."""
        if not self.can_handle_sharded_objects:
            return dict(self.load_tensors_metadata(checkpoint_dir))
        raise lacks(self, "load_sharded_metadata", "lists the ShardedObjects")

    @left_out
    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        """Delete all tensors whose key begins with ``key_prefix``."""
        raise NotImplementedError(f"{type(self).__name__} does not remove tensors")

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        """What ``remove_sharded_tensors`` would do. By default it knows keys and no files."""
        if not has_method(self, "remove_sharded_tensors"):
            raise NotImplementedError(f"{type(self).__name__} does not remove tensors")
        stored = self.load_tensors_metadata(checkpoint_dir)
        return PlannedRemoval(tuple(key for key in stored if key.startswith(key_prefix)), ())


class SaveCommonStrategy(SaveStrategyBase):
    """Writes the common state, and ShardedObjects for strategies that cannot."""

    def lasting(self, durability: Durability) -> Self:
        """A strategy whose files are as durable as that; itself if it has only one way."""
        del durability
        return self

    def created_names(self, object_keys: Iterable[str]) -> Iterable[str]:
        """Relative names of all files and folders that this strategy will create.

        Raises:
            InvalidShardingError: if a key cannot be stored.
        """
        del object_keys
        return []

    @abstractmethod
    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: PathOrStr
    ) -> Sequence[SealedFile] | None:
        """Write the common state dict, durably; called on rank 0.

        Returns:
            The files that were made. None leaves it to rank 0 to look for them.
        """

    @left_out
    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> Sequence[SealedFile] | None:
        """Write the main replicas among the ShardedObjects, durably; called on every rank.

        Returns:
            As ``save_common``.
        """
        del sharded_objects_state_dict, checkpoint_dir
        raise lacks(self, "save_sharded_objects", "writes ShardedObjects")


class SaveShardedStrategy(SaveStrategyBase):
    """Writes ShardedTensors. ``save`` is all that a strategy of your own must have.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from dist_checkpointing import ShardedTensor, save
        >>> from dist_checkpointing.mapping import is_main_replica
        >>> from dist_checkpointing.strategies.base import SaveShardedStrategy
        >>> class OneFileATensor(SaveShardedStrategy):
        ...     def save(self, sharded_state_dict, checkpoint_dir):
        ...         for shard in sharded_state_dict.values():
        ...             if is_main_replica(shard.replica_id):
        ...                 torch.save(shard.data, Path(checkpoint_dir, f"{shard.key}.pt"))
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        >>> save(state, "ckpt", OneFileATensor("one_file", 1))
    """

    def resolved(self) -> SaveShardedStrategy:
        """The strategy that ``save`` drives: by default itself; a wrapper may name another."""
        return self

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        """Write the main replicas among the shards, durably; called on every rank."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Writes ShardedTensors now or later: ``async_save`` returns what is left to do."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Prepare a save and return what is left to do."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


def __getattr__(name: str) -> Any:
    if name in ("PlannedLoadStrategy", "PlannedSaveStrategy"):
        # Imported on first use, since they derive from the classes above.
        return getattr(
            importlib.import_module("dist_checkpointing.strategies.planned_strategies"), name
        )
    if name != "async_calls":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The queue that Megatron scripts share. Most scripts have none.
    queue = globals()[name] = AsyncCallsQueue()
    return queue
