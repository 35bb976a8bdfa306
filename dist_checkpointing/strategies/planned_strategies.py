"""The strategies that are made of a planner and of a StorageWriter or a StorageReader."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Any, ClassVar, Self

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import Finding, InvalidShardingError, UnsupportedFormatError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, large_objects
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning import DefaultSavePlanner, LoadPlanner, SavePlan, SavePlanner
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.save_plan import PlanCache, SavePlanning
from dist_checkpointing.planning.table_exchange import SharedIndex
from dist_checkpointing.storage import driver
from dist_checkpointing.storage.driver import PlanReader, read, read_plan
from dist_checkpointing.storage.interface import StorageReader, StorageWriter
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.staging import StagingBuffers, stage_plan
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    PathOrStr,
)
from dist_checkpointing.validation.load_errors import (
    StoredTensors,
    clear_partly_stored,
    with_memory,
)

ReplicaSharing = Callable[[SavePlanner | None, Leaves, Comm], tuple[SavePlanner, Leaves]]


class KnownFormats:
    """Compares the format of a checkpoint with a list, for any kind of load strategy.

    Attributes:
        reads: Each (backend, version) that the strategy understands.
        argument: Parameter of ``load`` by which a user chooses the strategy.
    """

    reads: ClassVar[frozenset[tuple[str, int]]]
    argument: ClassVar[str] = "sharded_strategy"

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the backend."""
        backends = sorted({backend for backend, _ in self.reads})
        if loaded_backend not in backends:
            raise self._incompatible("backend", backends, loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise UnsupportedFormatError if this strategy cannot read the version."""
        versions = sorted({version for _, version in self.reads})
        if loaded_version not in versions:
            raise self._incompatible("version", versions, loaded_version)

    def _incompatible(self, what: str, known: object, found: object) -> UnsupportedFormatError:
        finding = Finding(
            f"{type(self).__name__} does not read this {what}",
            expected=f"one of {known}",
            found=found,
            remedy=f"Leave {self.argument} out: the right one is found from the checkpoint.",
        )
        return UnsupportedFormatError(f"wrong strategy for this checkpoint's {what}", [finding])


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
        writer = self.writer_type(checkpoint_dir)
        writer.checkpoint_dir, writer.options = checkpoint_dir, self.options
        writer.reset(checkpoint_dir)
        return writer

    def plan(
        self,
        leaves: Leaves,
        writer: StorageWriter,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
    ) -> tuple[SavePlan, Index, SavePlanner]:
        """Decide who writes what, see ``SavePlanning``. Collective, touches no file.

        Returns:
            The plan of this rank, what the checkpoint will hold, and the planner that answers for
            the data of the plan.
        """
        planning = self.planning(leaves, writer, comm, cache=cache, others=others)
        return *planning.agree(comm), planning.planner

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

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        comm = default_comm() if self.comm is None else self.comm
        writer, plan, index, planner = self._planned(sharded_state_dict, checkpoint_dir, comm)
        driver.write(plan, index, planner, writer, comm)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Plan a save, and copy what this rank will write. Collective.

        Returns:
            A request that writes the copies. They are freed when the request is.
        """
        comm = default_comm() if self.comm is None else self.comm
        writer, plan, index, planner = self._planned(sharded_state_dict, checkpoint_dir, comm)
        with comm.agreed("copying the state"):
            plan = driver.prepare_write(plan, writer, comm)
            buffers = StagingBuffers()
            buffers.take()
            copies = stage_plan(plan, planner, buffers)
        written: Future[driver.Written] = Future()

        def write() -> None:
            try:
                written.set_result(driver.write_plan(plan, copies, writer, comm.rank))
            except Exception as error:  # noqa: BLE001 - kept for ``finish``: all ranks must hear it
                written.set_exception(error)

        def finish() -> None:
            of_ranks = driver.gather_written(written.result, writer, comm)
            driver.finish_durably(index, of_ranks, writer, comm)

        return AsyncRequest(write, (), [finish])

    def _planned(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr, comm: Comm
    ) -> tuple[StorageWriter, SavePlan, Index, SavePlanner]:
        leaves, _ = _sharded_leaves(sharded_state_dict)
        writer = self.make_writer(as_location(checkpoint_dir))
        with comm.agreed("making the folder"):
            location.make_folder(writer.checkpoint_dir)
        return writer, *self.plan(leaves, writer, comm)


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
        self.trusted = False
        self.plan_reader: PlanReader = read_plan

    def trusting(self) -> Self:
        strategy = copy.copy(self)
        strategy.trusted = True
        return strategy

    def make_reader(self, checkpoint_dir: Any) -> StorageReader:
        """A reader for one checkpoint."""
        reader = self.reader_type(checkpoint_dir)
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
        index = share_index(reader, comm).index(
            self.needed_keys({leaf.key for leaf in leaves.values()})
        )
        stored = StoredTensors(index)
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, ShardedTensor)]
        clear_partly_stored(tensors, stored)
        leaves = {
            path: with_memory(leaf, stored) if isinstance(leaf, ShardedTensor) else leaf
            for path, leaf in leaves.items()
        }
        read(leaves, index, self.planner, reader, comm, self.plan_reader)
        result: StateDict = unflatten(skeleton, {path: leaf.data for path, leaf in leaves.items()})
        return result

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        index = self.make_reader(as_location(checkpoint_dir)).read_metadata()
        return _whole_tensors(index)

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        reader = self.make_reader(as_location(checkpoint_dir))
        index = reader.read_metadata()
        reader.require_stored(large_objects(index.objects), index)
        metadata: ShardedStateDict = dict(_whole_tensors(index))
        for key, shape in index.objects.items():
            for cell in itertools.product(*map(range, shape)):
                leaf = ShardedObject(key, None, shape, cell)
                metadata[leaf.unique_key] = leaf
        return metadata


def _whole_tensors(index: Index) -> dict[str, ShardedTensor]:
    stored = map(index.__getitem__, index)
    return {s.key: ShardedTensor.of_box(s, Box.whole(s.global_shape)) for s in stored}


def share_index(reader: StorageReader, comm: Comm) -> SharedIndex:
    """What the checkpoint holds, read by rank 0 only. Collective."""
    return comm.from_rank0(
        "reading the index", lambda: SharedIndex.of(reader.read_metadata(), comm.world_size)
    )


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
            remedy="Call save or load of dist_checkpointing, which take the rest out.",
        )
        raise InvalidShardingError("not a sharded state dict", [finding])
    # Copies, so that memory made here does not appear in the caller's leaves.
    copies = {path: _shallow(leaf) for path, leaf in leaves.items()}
    return copies, skeleton


def _shallow(leaf: ShardedBase) -> ShardedBase:
    copied = leaf.without_data()
    copied.data = leaf.data
    return copied
