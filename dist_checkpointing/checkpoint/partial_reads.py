"""Reads single boxes, objects and the common state of a checkpoint, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor, large_tensors
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, StateDict, tensor_memory
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader, set_up_reader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import common_reader, handles_objects, open_checkpoint

_FEW = 4
"""So few boxes are read one by one where the reader can do that: a plan costs more than a read."""


class PartialReads:
    """What reads one checkpoint; strategies are looked for on first use.

    Attributes:
        options: StorageOptions of the reads, if set before the first one.
    """

    def __init__(self, folder: Location, config: CheckpointingConfig, *, trusted: bool) -> None:
        self._folder = folder
        self._config = config
        self._trusted = trusted
        self.options: StorageOptions | None = None
        self._own_index: Index | None = None
        self._seen: set[str] = set()

    @cached_property
    def sharded(self) -> LoadShardedStrategy:
        """The strategy for tensors."""
        found = open_checkpoint(self._folder).sharded
        found = found.trusting() if self._trusted else found
        if self.options is not None and isinstance(found, PlannedLoadStrategy):
            found = copy.copy(found)
            found.options = self.options
        return found

    @cached_property
    def _reader(self) -> StorageReader:
        assert isinstance(self.sharded, PlannedLoadStrategy)
        reader = self.sharded.make_reader(self._folder)
        reader.is_kept = True
        _ = reader.files  # asked once for all of its copies
        return reader

    def make_reader(self) -> StorageReader:
        """A reader for one read; all of them share what they find out about where parts are.

        Only for strategies that are made of a StorageReader.
        """
        return copy.copy(self._reader)

    @cached_property
    def _common(self) -> LoadCommonStrategy:
        found = common_reader(self._config)
        return found.trusting() if self._trusted else found

    def index(self) -> Index:
        """What is stored, for a checkpoint without an index file."""
        if isinstance(self.sharded, PlannedLoadStrategy):
            self._own_index = self.make_reader().read_metadata()
            return self._own_index
        with _strange_errors(self._folder):
            stored = self.sharded.load_tensors_metadata(self._folder)
        return Index.of(
            StoredTensor.undivided(
                key, tensor_memory.from_torch(tensor.dtype, key=key), tensor.global_shape
            )
            for key, tensor in sorted(stored.items())
        )

    def boxes(self, index: Index, wanted: Sequence[tuple[StoredTensor, Box]]) -> list[torch.Tensor]:
        """One new tensor for each box, which must lie in its tensor; see ``Checkpoint.read``."""
        strategy = self.sharded
        if len(wanted) <= _FEW and isinstance(strategy, PlannedLoadStrategy):
            found = [self._reader.read_box(stored, box) for stored, box in wanted]
            parts = [part for part in found if part is not None]
            if len(parts) == len(found):
                return parts
        keys = {stored.key for stored, _ in wanted} - self._seen
        self.require_stored(large_tensors(index, keys), index)
        self._seen |= keys
        leaves = {
            number: ShardedTensor.of_box(stored, box) for number, (stored, box) in enumerate(wanted)
        }
        for leaf in leaves.values():
            leaf.init_data("cpu")
        if isinstance(strategy, PlannedLoadStrategy):
            paths: dict[TreePath, ShardedTensor] = {
                (DictKey(number),): leaf for number, leaf in leaves.items()
            }
            reader = self.make_reader()
            index = self.index_for(reader, index)
            read(paths, index, strategy.planner, reader, SingleProcess())
            return [_data(leaf) for leaf in leaves.values()]
        with _strange_errors(self._folder):
            template = {str(number): leaf for number, leaf in leaves.items()}
            loaded = strategy.load(template, self._folder)
        return [loaded[str(number)] for number in leaves]

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Make sure that large tensors and objects are there, see ``StorageReader``."""
        if claims and isinstance(self.sharded, PlannedLoadStrategy):
            self.sharded.make_reader(self._folder).require_stored(claims, index)

    def index_for(self, reader: StorageReader, index: Index) -> Index:
        """The index as a reader wants it: one that makes its own may note more in it."""
        if type(reader).read_metadata is StorageReader.read_metadata:
            return index
        if self._own_index is None:
            self._own_index = reader.read_metadata()
        return self._own_index

    def files(self, index: Index, chunks: Sequence[MetadataIndex]) -> list[str | None]:
        """The file of each stored chunk, relative to the checkpoint; None where it is not known."""
        strategy = self.sharded
        if not isinstance(strategy, PlannedLoadStrategy):
            return [None] * len(chunks)
        reader = self.make_reader()
        set_up_reader(reader, self.index_for(reader, index), rank=0, world_size=1)
        return [None if place is None else place.file for place in reader.places(chunks)]

    def location(self, index: Index, key: str, box: Box, number: int) -> str:
        """Where a chunk or piece lies, in words."""
        strategy = self.sharded
        if not isinstance(strategy, PlannedLoadStrategy):
            return str(self._folder)
        reader = self.make_reader()
        index = self.index_for(reader, index)
        set_up_reader(reader, index, rank=0, world_size=1)
        piece = None if index[key].pieces is None else number
        return reader.location(MetadataIndex(key, box.offset, piece))

    def object_grids(self, index: Index) -> Mapping[str, Ints]:
        """The grids of all sharded objects, by key."""
        if handles_objects(self.sharded) and isinstance(self.sharded, PlannedLoadStrategy):
            return index.objects
        strategy = self.sharded if handles_objects(self.sharded) else self._common
        stored = strategy.load_sharded_metadata(self._folder)
        return {
            leaf.key: tuple(leaf.global_shape)
            for leaf in stored.values()
            if isinstance(leaf, ShardedObject)
        }

    def object_cell(self, index: Index, key: str, shape: Ints, cell: Ints) -> Any:
        """The value of one cell of a sharded object."""
        leaf = ShardedObject(key, None, shape, cell)
        strategy = self.sharded
        if not handles_objects(strategy):
            return self._common.load_sharded_objects({"cell": leaf}, self._folder)["cell"]
        if not isinstance(strategy, PlannedLoadStrategy):
            return strategy.load({"cell": leaf}, self._folder)["cell"]
        # ``load`` of the strategy would be collective where there is a process group.
        reader = self.make_reader()
        index = self.index_for(reader, index)
        leaves: dict[TreePath, ShardedObject] = {(DictKey("cell"),): leaf}
        read(leaves, index, strategy.planner, reader, SingleProcess())
        return leaf.data

    def common(self) -> StateDict:
        """The common state."""
        return self._common.load_common(self._folder)


@contextmanager
def _strange_errors(folder: Location) -> Iterator[None]:
    """A strategy of a third party may raise anything where its files are damaged."""
    try:
        yield
    except CheckpointingException:
        raise
    except Exception as error:
        finding = Finding(f"{type(error).__name__}: {error}", path=str(folder))
        raise CorruptCheckpointError(
            "its strategy cannot read the checkpoint", [finding]
        ) from error


def _data(leaf: ShardedTensor) -> torch.Tensor:
    assert leaf.data is not None
    return leaf.data
