"""Strategies of third parties that have only ``save`` or ``load``, as strategies with a writer or a
reader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    StateMismatchError,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    tensor_memory,
)
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.coverage import main_rows
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.save_plan import PlanCache, SavePlanning
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.interface import StorageReader, StorageWriter, WriteResult, done
from dist_checkpointing.storage.staging import StagingBuffers, copied_objects
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveShardedStrategy,
    handles_objects,
)


class _HeldLeaves(DefaultSavePlanner):
    """Plans no more than that the shards make up each tensor: their strategy writes what it wants.

    ``leaves`` of this rank are nested. If they ``are_copies``, they do not need the state dict.
    """

    def __init__(self, leaves: ShardedStateDict, *, are_copies: bool = False) -> None:
        super().__init__()
        self.leaves, self.are_copies = leaves, are_copies

    def assign(self, catalog: ShardTable, num_ranks: int) -> tuple[ShardTable, Index]:
        return main_rows(catalog), Index.of(())

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan.with_items(())


class ForeignWriter(StorageWriter):
    """Writes with the ``save`` of a strategy, which gets the leaves as they are nested.

    It is called on every rank, also for none: it may be collective.
    """

    keeps_fingerprints = False
    is_opaque = True

    def __init__(self, strategy: SaveShardedStrategy, checkpoint_dir: Any) -> None:
        super().__init__(checkpoint_dir)
        self._strategy = strategy

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        return []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _HeldLeaves)
        if planner.are_copies and isinstance(self._strategy, AsyncSaveShardedStrategy):
            # Behind the training; the rest, which may be collective, comes later.
            request = self._strategy.async_save(planner.leaves, self.checkpoint_dir)
            request.execute()
            self.finalize_fns: Sequence[Callable[[], None]] = tuple(request.finalize_fns)
        else:
            self._strategy.save(planner.leaves, self.checkpoint_dir)
        return done([])

    def finish(
        self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile]:
        return []


class ForeignSaveStrategy(PlannedSaveStrategy):
    """A third party's strategy that has only ``save``, as one with plans, for one save.

    ``leaves`` of this rank are nested. ``validates``: check that the shards of all ranks make up
    each tensor.
    """

    def __init__(
        self, strategy: SaveShardedStrategy, leaves: ShardedStateDict, *, validates: bool
    ) -> None:
        self.writes = strategy.backend, strategy.version  # type: ignore[misc]
        super().__init__()
        self._strategy, self._leaves, self._validates = strategy, leaves, validates

    def make_writer(self, checkpoint_dir: Any) -> StorageWriter:
        return ForeignWriter(self._strategy, checkpoint_dir)

    def planning(
        self,
        leaves: Leaves,
        writer: StorageWriter,
        comm: Comm,
        *,
        cache: PlanCache | None = None,
        others: Iterable[ShardedBase] = (),
    ) -> SavePlanning:
        self.planner: SavePlanner | None = _HeldLeaves(self._leaves)
        checked = leaves if self._validates else {}
        return super().planning(checked, writer, comm, cache=cache, others=others)

    def stage(self, plan: SavePlan, planner: SavePlanner, buffers: StagingBuffers) -> SavePlanner:
        leaves, skeleton = flatten(self._leaves)
        copies = copied_objects(leaves)
        tensors = {
            path: leaf.data
            for path, leaf in leaves.items()
            if isinstance(leaf, ShardedTensor) and leaf.data is not None
        }
        sizes = [tensor.nbytes for tensor in tensors.values()]
        for path, data in zip(tensors, buffers.fill(sizes, tensors.values()), strict=True):
            copies[path].data = data
        return _HeldLeaves(unflatten(skeleton, copies), are_copies=True)

    def request(self, checkpoint_dir: Location) -> AsyncRequest:
        """What the strategy makes of an asynchronous save of its own."""
        assert isinstance(self._strategy, AsyncSaveShardedStrategy)
        return self._strategy.async_save(self._leaves, checkpoint_dir)


class ForeignReader(StorageReader):
    """Reads with the ``load`` of a strategy: to the plan, every stored tensor is one chunk.

    The strategy gets copies of the leaves that share their memory, under names of no meaning. It is
    called on every rank, also for none: it may be collective.
    """

    def __init__(self, strategy: LoadShardedStrategy, checkpoint_dir: Any) -> None:
        super().__init__(checkpoint_dir)
        self._strategy = strategy

    def location(self, chunk: MetadataIndex) -> str:
        return str(self.checkpoint_dir)

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return []

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing is known of its files."""

    def read_metadata(self) -> Index:
        with _any_error(self.checkpoint_dir):
            leaves = self._strategy.load_sharded_metadata(self.checkpoint_dir).values()
        return Index.of(
            (
                StoredTensor.undivided(
                    leaf.key, tensor_memory.from_torch(leaf.dtype, key=leaf.key), leaf.global_shape
                )
                for leaf in sorted(leaves, key=lambda leaf: leaf.key)
                if isinstance(leaf, ShardedTensor)
            ),
            {leaf.key: leaf.global_shape for leaf in leaves if isinstance(leaf, ShardedObject)},
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, DefaultLoadPlanner)  # the strategy has no other
        wanted = dict(_wanted(plan, planner))
        with _any_error(self.checkpoint_dir):
            asked = {name: shallow_copy(leaf) for name, leaf in wanted.items()}
            loaded = self._strategy.load(asked, self.checkpoint_dir)
        findings = []
        for name, leaf in wanted.items():
            value, data = loaded[name], leaf.data
            if isinstance(leaf, ShardedObject):
                leaf.data = value
            elif not isinstance(value, torch.Tensor) or value.shape != data.shape:
                problem = "the strategy returned something else than it was asked for"
                shape = tuple(getattr(value, "shape", [type(value).__name__]))
                findings.append(Finding(problem, leaf.key, expected=tuple(data.shape), found=shape))
            else:
                if value is not data:
                    data.detach().copy_(value)
                self.report(data.nbytes)
        StateMismatchError.raise_if(findings, "the strategy did not load what was wanted")
        return done(None)


def _wanted(plan: LoadPlan, planner: DefaultLoadPlanner) -> Iterator[tuple[str, ShardedBase]]:
    """The leaves of a plan by name; boxes of those that are to be filled only in part."""
    rows_of: dict[int, list[int]] = {}
    for row, source in enumerate(plan.table.sources.tolist()):
        rows_of.setdefault(source, []).append(row)
    counts = plan.table.num_elements
    for source, rows in rows_of.items():
        leaf = planner.leaves[source]
        if isinstance(leaf, ShardedObject) or counts[rows].sum() == leaf.data.numel():
            yield str(source), leaf
            continue
        for row in rows:
            item = plan.table.item(row)
            data, box = planner.acquire_tensor(item), item.storage.box
            at = box.shape, item.storage.shape, box.offset
            yield f"{source}.{row}", ShardedTensor(leaf.key, data, data.dtype, *at, None)


@contextmanager
def _any_error(folder: Location) -> Iterator[None]:
    """A strategy of a third party may raise anything where its files are damaged."""
    try:
        yield
    except CheckpointingException:
        raise
    except Exception as error:
        finding = Finding(f"{type(error).__name__}: {error}", path=str(folder))
        message = "its strategy cannot read the checkpoint"
        raise CorruptCheckpointError(message, [finding]) from error


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: WrappedLoadStrategy, *args: Any) -> Any:
        return getattr(self.base_strategy, name)(*args)

    return method


class WrappedLoadStrategy(LoadShardedStrategy):
    """Answers like another strategy, ``base_strategy``."""

    base_strategy: LoadShardedStrategy
    check_backend_compatibility: Callable[..., Any] = _forwarded("check_backend_compatibility")
    check_version_compatibility: Callable[..., Any] = _forwarded("check_version_compatibility")
    load_tensors_metadata: Callable[..., Any] = _forwarded("load_tensors_metadata")
    load_sharded_metadata: Callable[..., Any] = _forwarded("load_sharded_metadata")
    remove_sharded_tensors: Callable[..., Any] = _forwarded("remove_sharded_tensors")
    plan_removal: Callable[..., Any] = _forwarded("plan_removal")

    def trusting(self) -> Self:
        wrapper = copy.copy(self)
        wrapper.base_strategy = self.base_strategy.trusting()
        return wrapper

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)


class ForeignLoadStrategy(WrappedLoadStrategy, PlannedLoadStrategy):
    """A third party's strategy that has only ``load``, as one with plans."""

    def __init__(self, strategy: LoadShardedStrategy) -> None:
        super().__init__()
        self.base_strategy = strategy

    def make_reader(self, checkpoint_dir: Any) -> StorageReader:
        return ForeignReader(self.base_strategy, checkpoint_dir)


def as_planned(strategy: LoadShardedStrategy) -> PlannedLoadStrategy:
    """The strategy itself, or what makes one of it that has a reader."""
    if isinstance(strategy, PlannedLoadStrategy):
        return strategy
    return ForeignLoadStrategy(strategy)
