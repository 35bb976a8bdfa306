"""What a strategy is: the abstract classes, and the two from which planned backends derive."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.index import Index
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from dist_checkpointing.options import Durability, StorageOptions
from dist_checkpointing.planned_save import PlanCache, PlannedSave, plan_save
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlanner,
    SavePlanner,
)
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.removal import PlannedRemoval
from dist_checkpointing.storage import StorageReader, StorageWriter, read, write
from dist_checkpointing.strategies.async_calls import AsyncCallsQueue, AsyncRequest
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from dist_checkpointing.tree import flatten, unflatten

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
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


def __getattr__(name: str) -> Any:
    # The queue that Megatron scripts share; made on first use, since most have none.
    if name != "async_calls":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    queue = globals()[name] = AsyncCallsQueue()
    return queue


PathOrStr = str | PathLike[str]


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


class SaveStrategyBase(ABC):  # noqa: B024 - what its two kinds share
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

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        """All stored ShardedObjects by unique key, without data."""
        if not self.can_handle_sharded_objects:
            return {}
        raise NotImplementedError(checkpoint_dir)


class LoadShardedStrategy(LoadStrategyBase):
    """Reads ShardedTensors."""

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
        raise NotImplementedError

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        """Delete all tensors whose key begins with ``key_prefix``."""
        raise NotImplementedError

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        """What ``remove_sharded_tensors`` would do; by default nothing is known of files."""
        if type(self).remove_sharded_tensors is LoadShardedStrategy.remove_sharded_tensors:
            raise NotImplementedError
        stored = self.load_tensors_metadata(checkpoint_dir)
        return PlannedRemoval(tuple(key for key in stored if key.startswith(key_prefix)), ())


class SaveCommonStrategy(SaveStrategyBase):
    """Writes the common state, and ShardedObjects for strategies that cannot."""

    def lasting(self, durability: Durability) -> Self:
        """A strategy whose files are as durable as that; one that has no choice returns itself."""
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
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: PathOrStr) -> None:
        """Write the common state dict, durably; called on rank 0."""

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> None:
        """Write the main replicas among the ShardedObjects, durably; called on every rank."""
        raise NotImplementedError


class SaveShardedStrategy(SaveStrategyBase):
    """Writes ShardedTensors. ``save`` is all that a strategy of your own must have."""

    def resolved(self) -> SaveShardedStrategy:
        """The strategy that ``save`` drives: by default itself; a wrapper may name another."""
        return self

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        """Write the main replicas among the shards, durably; called on every rank."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that can put off its I/O; it is usable as a synchronous one too."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Prepare a save and return what is left to do."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


class PlannedSaveStrategy(SaveShardedStrategy):
    """A save strategy made of a planner and a StorageWriter.

    Everything between the state dict and the bytes is here; a backend adds its writer.

    Args:
        backend: recorded in the checkpoint; the backend's own name if left out.
        version: likewise.
        planner: used instead of DefaultSavePlanner.
        comm: the ranks that save together when ``save`` is called directly.
        options: knobs of the I/O.

    Attributes:
        writer_type: set by a backend (or it overrides ``make_writer``).
        writes: the (backend, version) whose files it writes.
    """

    writer_type: ClassVar[type[StorageWriter]]
    writes: ClassVar[tuple[str, int]]

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        planner: SavePlanner | None = None,
        comm: Comm | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        super().__init__(backend or self.writes[0], version or self.writes[1])
        if (self.backend, self.version) != self.writes:
            raise UnsupportedFormatError(
                f"{type(self).__name__} writes {self.writes}, not {(self.backend, self.version)}"
            )
        self.planner = planner
        self.comm = comm
        self.options = options or StorageOptions()

    def make_writer(self, checkpoint_dir: Path) -> StorageWriter:
        """A writer for one checkpoint."""
        writer = self.writer_type(checkpoint_dir)
        writer.options = self.options
        return writer

    def plan(
        self,
        leaves: Leaves,
        writer: StorageWriter,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
    ) -> PlannedSave:
        """Decide who writes what, see ``plan_save``. Collective, touches no file."""
        planner = DefaultSavePlanner() if self.planner is None else self.planner
        return plan_save(leaves, planner, writer.layout, comm, cache=cache, others=others)

    def write(self, planned: PlannedSave, writer: StorageWriter, comm: Comm) -> None:
        """Write what was planned. Collective, durable, not committed."""
        write(planned, writer, comm)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        comm = default_comm() if self.comm is None else self.comm
        leaves, _ = _sharded_leaves(sharded_state_dict)
        writer = self.make_writer(Path(checkpoint_dir))
        self.write(self.plan(leaves, writer, comm), writer, comm)


class PlannedLoadStrategy(LoadShardedStrategy):
    """A load strategy made of a planner and a StorageReader.

    Args:
        planner: used instead of DefaultLoadPlanner.
        comm: the ranks that load together when ``load`` is called directly.
        options: knobs of the I/O.

    Attributes:
        trusted: whether objects may be unpickled without an allow-list.
        reader_type: set by a backend (or it overrides ``make_reader``).
        reads: the (backend, version)s whose files it understands.
    """

    reader_type: ClassVar[type[StorageReader]]
    reads: ClassVar[frozenset[tuple[str, int]]]

    def __init__(
        self,
        *,
        planner: LoadPlanner | None = None,
        comm: Comm | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        self.planner = planner
        self.comm = comm
        self.options = options or StorageOptions()
        self.trusted = False

    def trusting(self) -> Self:
        strategy = copy.copy(self)
        strategy.trusted = True
        return strategy

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        backends = sorted({backend for backend, _ in self.reads})
        if loaded_backend not in backends:
            raise _incompatible(self, "backend", backends, loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        versions = sorted({version for _, version in self.reads})
        if loaded_version not in versions:
            raise _incompatible(self, "version", versions, loaded_version)

    def make_reader(self, checkpoint_dir: Path) -> StorageReader:
        """A reader for one checkpoint."""
        reader = self.reader_type(checkpoint_dir)
        reader.options, reader.trusted = self.options, self.trusted
        return reader

    def read(self, leaves: Leaves, index: Index, reader: StorageReader, comm: Comm) -> None:
        """Fill the leaves, which all have memory. Collective."""
        planner = DefaultLoadPlanner() if self.planner is None else self.planner
        read(leaves, index, planner, reader, comm)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        comm = default_comm() if self.comm is None else self.comm
        leaves, skeleton = _sharded_leaves(sharded_state_dict)
        reader = self.make_reader(Path(checkpoint_dir))
        index = comm.from_rank0("reading the index", reader.read_metadata)
        for leaf in leaves.values():
            if isinstance(leaf, ShardedTensor):
                leaf.init_data("cpu")
        self.read(leaves, index, reader, comm)
        result: StateDict = unflatten(skeleton, {path: leaf.data for path, leaf in leaves.items()})
        return result

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        index = self.make_reader(Path(checkpoint_dir)).read_metadata()
        return {key: _whole(index, key) for key in index}

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        index = self.make_reader(Path(checkpoint_dir)).read_metadata()
        metadata: ShardedStateDict = {key: _whole(index, key) for key in index}
        for key, shape in index.objects.items():
            for cell in itertools.product(*map(range, shape)):
                leaf = ShardedObject(key, None, shape, cell)
                metadata[leaf.unique_key] = leaf
        return metadata


def _whole(index: Index, key: str) -> ShardedTensor:
    stored = index[key]
    shape = stored.global_shape
    ndim = len(shape)
    return ShardedTensor(key, None, stored.dtype.torch, shape, shape, (0,) * ndim, (1,) * ndim)


def _sharded_leaves(sharded_state_dict: ShardedStateDict) -> tuple[dict[Any, ShardedBase], Any]:
    leaves, skeleton = flatten(sharded_state_dict)
    foreign = sorted(
        {
            type(leaf).__name__
            for leaf in leaves.values()
            if not isinstance(leaf, ShardedTensor | ShardedObject)
        }
    )
    if foreign:
        finding = Finding(
            "a strategy takes ShardedTensors and ShardedObjects only",
            found=", ".join(foreign),
            remedy="Call save or load of dist_checkpointing, which sort out the rest.",
        )
        raise InvalidShardingError("not a sharded state dict", [finding])
    # Copies, so that memory made here does not appear in the caller's leaves.
    copies = {path: _shallow(leaf) for path, leaf in leaves.items()}
    return copies, skeleton


def _shallow(leaf: ShardedBase) -> ShardedBase:
    copied = leaf.without_data()
    copied.data = leaf.data
    return copied


def _incompatible(
    strategy: LoadStrategyBase, what: str, known: list[Any], found: object
) -> CheckpointingException:
    finding = Finding(
        f"{type(strategy).__name__} does not read this {what}",
        expected=f"one of {known}",
        found=found,
        remedy="Leave sharded_strategy out: the right one is found from the checkpoint.",
    )
    return UnsupportedFormatError(f"wrong strategy for this checkpoint's {what}", [finding])
