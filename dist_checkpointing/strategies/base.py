"""What a strategy is: the abstract classes that every backend derives from, and the registry."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from concurrent.futures import Future
from os import PathLike
from typing import Any, ClassVar, Self

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, large_objects
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.planning import DefaultSavePlanner, LoadPlanner, SavePlan, SavePlanner
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.save_plan import PlanCache, SavePlanning
from dist_checkpointing.planning.table_exchange import SharedIndex
from dist_checkpointing.planning.user_planner import adapted
from dist_checkpointing.storage import driver
from dist_checkpointing.storage.driver import PlanReader, read, read_plan
from dist_checkpointing.storage.interface import StorageReader, StorageWriter
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.storage.staging import StagingBuffers, stage_plan
from dist_checkpointing.strategies.async_calls import AsyncCallsQueue, AsyncRequest
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from dist_checkpointing.threads import fill
from dist_checkpointing.validation.load_errors import clear_partly_stored, with_memory

# Beside what stands below: Megatron has these here.
__all__ = [
    "StrategyAction",
    "default_strategies",
    "get_default_strategy",
    "register_default_strategy",
]

PathOrStr = str | PathLike[str]
"""A folder, or the URL of a prefix in an object store."""


def has_method(strategy: object, name: str) -> bool:
    """Whether a strategy has a method that it needs only for some checkpoints, other than one that
    raises for all.
    """
    method = getattr(type(strategy), name, None)
    raising = (LoadShardedStrategy.remove_sharded_tensors, SaveCommonStrategy.save_sharded_objects)
    return callable(method) and method not in raising


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


class _Strategy(ABC):  # noqa: B024 - what all strategies have in common
    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it reads or writes ShardedObjects as well."""
        return False


class LoadStrategyBase(_Strategy):
    """Reads one or more (backend, version)s."""

    trusted: bool = False

    def trusting(self) -> Self:
        """A strategy that unpickles whatever is stored, for checkpoints from a trusted source."""
        strategy = copy.copy(self)
        strategy.trusted = True
        return strategy

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the backend."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the version."""


class SaveStrategyBase(_Strategy):
    """Writes one (backend, version)."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Reads the common state, and ShardedObjects for strategies that cannot."""

    @abstractmethod
    def load_common(self, checkpoint_dir: PathOrStr) -> StateDict:
        """The common state dict."""

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> StateDict:
        """The same nested dict with every ShardedObject replaced by its stored value."""
        raise lacks(self, "load_sharded_objects", "reads ShardedObjects")

    def file_names(
        self, leaves: Iterable[ShardedObject], checkpoint_dir: PathOrStr
    ) -> Iterable[str]:
        """Relative names of the files that hold the common state and these ShardedObjects."""
        return []

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        """All stored ShardedObjects by unique key, without data."""
        if not handles_objects(self):
            return {}
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
        return self

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        """The same nested dict with every ShardedTensor replaced by its loaded tensor."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        """All stored tensors by key, each as one whole shard without data."""

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        """All stored tensors by key, and objects by unique key if this strategy has them."""
        if not handles_objects(self):
            return dict(self.load_tensors_metadata(checkpoint_dir))
        raise lacks(self, "load_sharded_metadata", "lists the ShardedObjects")

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
        return self

    def created_names(self, object_keys: Iterable[str]) -> Iterable[str]:
        """Relative names of all files and folders that this strategy will create.

        Raises:
            InvalidShardingError: if a key cannot be stored.
        """
        return []

    @abstractmethod
    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: PathOrStr
    ) -> Sequence[SealedFile] | None:
        """Write the common state dict, durably; called on rank 0.

        Returns:
            The files that were made. None leaves it to rank 0 to look for them.
        """

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> Sequence[SealedFile] | None:
        """Write the main replicas among the ShardedObjects, durably; called on every rank.

        Returns:
            As ``save_common``.
        """
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


ReplicaSharing = Callable[[SavePlanner | None, Leaves, Comm], tuple[SavePlanner, Leaves]]


class KnownFormats:
    """Compares the format of a checkpoint with a list, for any kind of load strategy.

    Attributes:
        reads: Each (backend, version) that the strategy understands.
    """

    reads: ClassVar[frozenset[tuple[str, int]]]

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self._require("backend", 0, loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self._require("version", 1, loaded_version)

    def _require(self, what: str, position: int, found: object) -> None:
        known = sorted({known[position] for known in self.reads})
        if found not in known:
            kind = "common" if isinstance(self, LoadCommonStrategy) else "sharded"
            finding = Finding(
                f"{type(self).__name__} does not read this {what}",
                expected=f"one of {known}",
                found=found,
                remedy=f"Leave {kind}_strategy out: the right one is found from the checkpoint.",
            )
            raise UnsupportedFormatError(f"wrong strategy for this checkpoint's {what}", [finding])


class PlannedSaveStrategy(AsyncSaveShardedStrategy):
    """A save strategy made of a planner and a StorageWriter.

    Everything between the state dict and the bytes is here; a backend adds its writer.

    Args:
        backend: Name that the checkpoint records; by default that of the backend.
        version: Version that the checkpoint records; by default that of the backend.
        planner: Used instead of DefaultSavePlanner.
        comm: The ranks that save together when ``save`` is called directly.
        options: Options of the I/O.

    Attributes:
        writer_options: Attributes of the writers.
        share_replicas: Function that gets the planner (if any) and the leaves of a save, and
            returns a planner and leaves that let any rank write the replicas that it has. It is
            collective. None: main replicas are written.
        writer_type: Class of the writers. A backend sets it, or overrides ``make_writer``.
        writes: The (backend, version) of the files.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, save
        >>> from dist_checkpointing.planning import BalancedSavePlanner
        >>> from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        >>> save(state, "ckpt", Zarr3SaveShardedStrategy(planner=BalancedSavePlanner()))
    """

    writer_type: ClassVar[type[StorageWriter]]
    writes: ClassVar[tuple[str, int]]
    writer_options: Mapping[str, Any] = {}

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
        self.options: StorageOptions = options or StorageOptions()
        self.share_replicas: ReplicaSharing | None = None

    def make_writer(self, checkpoint_dir: Any) -> StorageWriter:
        """A writer for one checkpoint."""
        writer: StorageWriter = adapted(self.writer_type(checkpoint_dir), StorageWriter)
        writer.checkpoint_dir, writer.options = checkpoint_dir, self.options
        vars(writer).update(self.writer_options)
        writer.reset(checkpoint_dir)
        return writer

    def is_one_file(self, path: PathOrStr) -> bool:
        """Whether what is saved to a path is one file, and no folder."""
        return False

    def holdable(
        self, path: PathOrStr, common_state_dict: StateDict, objects: Mapping[str, Any]
    ) -> tuple[StateDict, Mapping[str, Any]]:
        """What of a common state, and of the cells of objects by key, can be saved to a path."""
        return common_state_dict, objects

    def common_strategy(
        self, writer: StorageWriter, common_state_dict: StateDict
    ) -> SaveCommonStrategy | None:
        """What saves the common state in a format that has a place of its own for it, or None."""
        return None

    def planning(
        self,
        leaves: Leaves,
        writer: StorageWriter,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
    ) -> SavePlanning:
        """The planning of a save on this rank. Collective only if the strategy shares replicas."""
        if self.share_replicas is not None:
            planner, leaves = self.share_replicas(self.planner, leaves, comm)
        else:
            planner = DefaultSavePlanner() if self.planner is None else self.planner
        return SavePlanning(
            leaves,
            planner,
            writer.layout,
            comm,
            cache=cache,
            others=others,
            destination=(str(writer.checkpoint_dir.absolute()), f"{self.backend} {self.version}"),
        )

    def stage(self, plan: SavePlan, planner: SavePlanner, buffers: StagingBuffers) -> SavePlanner:
        """Copy all that one rank will write: a planner that no longer needs the state dict."""
        return stage_plan(plan, planner, buffers)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        comm, writer, plan, index, planner = self._planned(sharded_state_dict, checkpoint_dir)

        def write() -> driver.Written:
            prepared = driver.prepare_write(plan, writer, comm)
            return driver.write_plan(prepared, planner, writer, comm.rank)

        driver.finish(write, index, writer, comm)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Plan a save, and copy what this rank will write. Collective.

        Returns:
            A request that writes the copies. They are freed when the request is.
        """
        comm, writer, plan, index, planner = self._planned(sharded_state_dict, checkpoint_dir)
        with comm.agreed("copying the state"):
            plan = driver.prepare_write(plan, writer, comm)
            buffers = StagingBuffers()
            buffers.acquire()
            copies = stage_plan(plan, planner, buffers)
        written: Future[driver.Written] = Future()

        def write() -> driver.Written:
            return driver.write_plan(plan, copies, writer, comm.rank)

        def finish() -> None:
            driver.finish(written.result, index, writer, comm)

        # An error is kept for ``finish``: all ranks must hear of it.
        return AsyncRequest(fill, (written, write), [finish])

    def _planned(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> tuple[Comm, StorageWriter, SavePlan, Index, SavePlanner]:
        comm = default_comm() if self.comm is None else self.comm
        leaves, _ = _sharded_leaves(sharded_state_dict)
        writer = self.make_writer(as_location(checkpoint_dir))
        with comm.agreed("making the folder"):
            location.make_folder(writer.checkpoint_dir)
        planning = self.planning(leaves, writer, comm)
        return comm, writer, *planning.agree(comm), planning.planner


class PlannedLoadStrategy(KnownFormats, LoadShardedStrategy):
    """A load strategy made of a planner and a StorageReader.

    Args:
        planner: Used instead of DefaultLoadPlanner.
        comm: The ranks that load together when ``load`` is called directly.
        options: Options of the I/O.

    Attributes:
        trusted: Whether objects may be unpickled without an allow-list.
        plan_reader: Function that reads the plans of all ranks. It is collective. By default each
            rank reads its own.
        reader_type: Class of the readers. A backend sets it, or overrides ``make_reader``.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, load, save
        >>> from dist_checkpointing.storage import StorageOptions
        >>> from dist_checkpointing.strategies.zarr import Zarr3LoadShardedStrategy
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, "ckpt", "zarr")
        >>> template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
        >>> load(template, "ckpt", Zarr3LoadShardedStrategy(options=StorageOptions(threads=1)))
        {'w': tensor([1., 1.])}
    """

    reader_type: ClassVar[type[StorageReader]]

    def __init__(
        self,
        *,
        planner: LoadPlanner | None = None,
        comm: Comm | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        self.planner = planner
        self.comm = comm
        self.options: StorageOptions = options or StorageOptions()
        self.plan_reader: PlanReader = read_plan

    def make_reader(self, checkpoint_dir: Any) -> StorageReader:
        """A reader for one checkpoint."""
        reader: StorageReader = adapted(self.reader_type(checkpoint_dir), StorageReader)
        reader.checkpoint_dir = checkpoint_dir
        reader.options, reader.trusted = self.options, self.trusted
        reader.reset(checkpoint_dir)
        return reader

    def needed_keys(self, asked: AbstractSet[str]) -> AbstractSet[str] | None:
        """Keys whose stored form this rank must know to load ``asked``; None for all."""
        # A planner of the user's own may look for them under other names.
        return asked if self.planner is None else None

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        comm = default_comm() if self.comm is None else self.comm
        leaves, skeleton = _sharded_leaves(sharded_state_dict)
        reader = self.make_reader(as_location(checkpoint_dir))
        keys = self.needed_keys({leaf.key for leaf in leaves.values()})
        index = share_index(reader, comm).index(keys)
        tensors = {
            path: with_memory(leaf)
            for path, leaf in leaves.items()
            if isinstance(leaf, ShardedTensor)
        }
        leaves |= tensors
        clear_partly_stored([*tensors.values()], index)
        read(leaves, index, self.planner, reader, comm, self.plan_reader)
        result: StateDict = unflatten(skeleton, {path: leaf.data for path, leaf in leaves.items()})
        return result

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        return _whole_tensors(self.make_reader(as_location(checkpoint_dir)).read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        reader = self.make_reader(as_location(checkpoint_dir))
        index = reader.read_metadata()
        reader.require_stored(large_objects(index.objects), index)
        return _whole_tensors(index) | {x.unique_key: x for x in object_cells(index.objects)}


def object_cells(objects: Mapping[str, Ints]) -> Iterator[ShardedObject]:
    """All cells of sharded objects with these grids, in C order."""
    for key, shape in objects.items():
        for cell in itertools.product(*map(range, shape)):
            yield ShardedObject(key, None, shape, cell)


def _whole_tensors(index: Index) -> dict[str, Any]:
    stored = map(index.__getitem__, index)
    return {s.key: ShardedTensor.of_box(s, Box.whole(s.global_shape)) for s in stored}


def share_index(reader: StorageReader, comm: Comm) -> SharedIndex:
    """What the checkpoint holds, read by rank 0 only. Collective."""
    return comm.from_rank0(
        "reading the index", lambda: SharedIndex.of(reader.read_metadata(), comm.world_size)
    )


def _sharded_leaves(sharded_state_dict: ShardedStateDict) -> tuple[dict[Any, ShardedBase], Any]:
    leaves, skeleton = flatten(sharded_state_dict)
    kinds = {type(leaf) for leaf in leaves.values()}
    foreign = {kind for kind in kinds if not issubclass(kind, ShardedTensor | ShardedObject)}
    if foreign:
        finding = Finding(
            "a strategy takes ShardedTensors and ShardedObjects only",
            found=", ".join(sorted(kind.__name__ for kind in foreign)),
            remedy="Call save or load of dist_checkpointing, which take the rest out.",
        )
        raise InvalidShardingError("not a sharded state dict", [finding])
    # Copies, so that memory made here does not appear in the caller's leaves.
    return {path: shallow_copy(leaf) for path, leaf in leaves.items()}, skeleton


def __getattr__(name: str) -> Any:
    if name != "async_calls":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The queue that Megatron scripts share. Most scripts have none.
    queue = globals()[name] = AsyncCallsQueue()
    return queue
