"""Third-party load strategies that have only ``load``, as strategies with a reader."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import torch

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    StateMismatchError,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    tensor_memory,
)
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.planning import DefaultLoadPlanner, LoadPlan, LoadPlanner, MetadataIndex
from dist_checkpointing.storage.interface import StorageReader, done
from dist_checkpointing.strategies.base import LoadShardedStrategy, PathOrStr, handles_objects
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy


class ForeignReader(StorageReader):
    """Reads with the ``load`` of a strategy: to the plan, every stored tensor is one chunk.

    The strategy gets copies of the leaves that share their memory, under names of no meaning. It is
    called on every rank, also for none: it may be collective.
    """

    def __init__(self, strategy: LoadShardedStrategy, checkpoint_dir: Any) -> None:
        super().__init__(checkpoint_dir)
        self._strategy = strategy

    def location(self, chunk: MetadataIndex) -> str:
        del chunk
        return str(self.checkpoint_dir)

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        del wanted
        return []

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing is known of its files."""

    def read_metadata(self) -> Index:
        with _any_error(self.checkpoint_dir):
            if handles_objects(self._strategy):
                stored = self._strategy.load_sharded_metadata(self.checkpoint_dir)
            else:
                stored = dict(self._strategy.load_tensors_metadata(self.checkpoint_dir))
        leaves = stored.values()
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
            value = loaded[name]
            if isinstance(leaf, ShardedObject):
                leaf.data = value
            elif not isinstance(value, torch.Tensor) or value.shape != leaf.data.shape:
                finding = Finding(
                    "the strategy returned something else than it was asked for",
                    leaf.key,
                    expected=tuple(leaf.data.shape),
                    found=tuple(getattr(value, "shape", [type(value).__name__])),
                )
                findings.append(finding)
            else:
                if value is not leaf.data:
                    leaf.data.detach().copy_(value)
                self.report(leaf.data.nbytes)
        if findings:
            raise StateMismatchError("the strategy did not load what was wanted", findings)
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
            yield (
                f"{source}.{row}",
                ShardedTensor(
                    leaf.key, data, data.dtype, box.shape, item.storage.shape, box.offset, None
                ),
            )


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


class ForeignLoadStrategy(PlannedLoadStrategy):
    """A third party's strategy that has only ``load``, as one with plans."""

    def __init__(self, strategy: LoadShardedStrategy) -> None:
        super().__init__()
        self.strategy = strategy

    def trusting(self) -> Self:
        copied = copy.copy(self)
        copied.strategy = self.strategy.trusting()
        return copied

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.strategy.check_version_compatibility(loaded_version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.strategy)

    def make_reader(self, checkpoint_dir: Any) -> StorageReader:
        return ForeignReader(self.strategy, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        return self.strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        return self.strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        self.strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        return self.strategy.plan_removal(checkpoint_dir, key_prefix)


def as_planned(strategy: LoadShardedStrategy) -> PlannedLoadStrategy:
    """The strategy itself, or what makes one of it that has a reader."""
    if isinstance(strategy, PlannedLoadStrategy):
        return strategy
    return ForeignLoadStrategy(strategy)
