"""Reads single boxes, objects and the common state of a checkpoint, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor, large_tensors
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, StateDict
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader, set_up_reader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    PlannedLoadStrategy,
    handles_objects,
)
from dist_checkpointing.strategies.selection import common_reader, sharded_reader
from dist_checkpointing.threads import paused_collector

_FEW = 4
"""So few boxes are read one by one where the reader can do that: a plan costs more than a read."""


class PartialReads:
    """What reads one checkpoint; strategies are looked for on first use.

    Attributes:
        options: StorageOptions of the reads, if set before the first one.
        memory: Makes the tensors that are read into, as ``torch.empty`` does.
    """

    def __init__(self, folder: Location, config: CheckpointingConfig, *, trusted: bool) -> None:
        self._folder = folder
        self._config = config
        self._trusted = trusted
        self.options: StorageOptions | None = None
        self.memory: Callable[..., torch.Tensor] = torch.empty
        self._own_index: Index | None = None
        self._is_set_up = False
        self._seen: set[str] = set()

    @cached_property
    def sharded(self) -> PlannedLoadStrategy:
        strategy = sharded_reader(self._config, trusted=self._trusted)
        if self.options is not None:
            strategy = copy.copy(strategy)
            strategy.options = self.options
        return strategy

    @cached_property
    @paused_collector()  # it imports the strategies, in many objects for the collector to look at
    def _reader(self) -> StorageReader:
        reader = self.sharded.make_reader(self._folder)
        reader.is_kept = True
        # Asked once for all of its copies. Files are mapped on local disks.
        reader.files.keeps_open = reader.files.maps_files
        return reader

    def make_reader(self) -> StorageReader:
        """A reader for one read; all of them share what they find out about where parts are."""
        return copy.copy(self._reader)

    @cached_property
    def _common(self) -> LoadCommonStrategy:
        return common_reader(self._config, trusted=self._trusted)

    def index(self) -> Index:
        """What is stored, for a checkpoint without an index file."""
        # By the reader of which the others are copies: it may remember more.
        self._own_index = self._reader.read_metadata()
        return self._own_index

    def boxes(self, index: Index, wanted: Sequence[tuple[StoredTensor, Box]]) -> list[torch.Tensor]:
        """One new tensor for each box, which must lie in its tensor; see ``Checkpoint.read``."""
        if len(wanted) <= _FEW:
            reader = self.set_up_reader(index)
            found = [reader.read_box(stored, box, self.memory) for stored, box in wanted]
            parts = [part for part in found if part is not None]
            if len(parts) == len(found):
                return parts
        keys = {stored.key for stored, _ in wanted} - self._seen
        self.require_stored(large_tensors(index, keys), index)
        self._seen |= keys
        leaves = [ShardedTensor.of_box(stored, box) for stored, box in wanted]
        for leaf in leaves:
            leaf.init_data("cpu", self.memory)
        self._read(leaves, index)
        return [leaf.data for leaf in leaves if leaf.data is not None]

    def _read(self, leaves: Sequence[ShardedBase], index: Index) -> None:
        # ``load`` of the strategy would be collective where there is a process group.
        index, planner = self.index_for(index), self.sharded.planner
        read(WantedTable.of(leaves), index, planner, self.make_reader(), SingleProcess())

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Make sure that large tensors and objects are there, see ``StorageReader``."""
        if claims:
            self.sharded.make_reader(self._folder).require_stored(claims, index)

    def index_for(self, index: Index) -> Index:
        """The index as readers made after this call want it: one of their own may say more."""
        if type(self._reader).read_metadata is StorageReader.read_metadata:
            return index
        return self.index() if self._own_index is None else self._own_index

    def set_up_reader(self, index: Index) -> StorageReader:
        """A reader that can be asked for boxes and objects, and where parts are."""
        if not self._is_set_up:
            set_up_reader(self._reader, self.index_for(index), rank=0, world_size=1)
            self._is_set_up = True
        return self._reader

    def files(self, index: Index, chunks: Sequence[MetadataIndex]) -> list[str | None]:
        """The file of each chunk or cell in the checkpoint; None where it is not known."""
        places = self.set_up_reader(index).places(chunks)
        return [None if place is None else place.file for place in places]

    def location(self, index: Index, key: str, box: Box, number: int) -> str:
        """Where a chunk or piece lies, in words."""
        piece = None if self.index_for(index)[key].pieces is None else number
        return self.set_up_reader(index).location(MetadataIndex(key, box.offset, piece))

    def object_grids(self, index: Index) -> Mapping[str, Ints]:
        if handles_objects(self.sharded):
            return index.objects
        stored = self._common.load_sharded_metadata(self._folder)
        return {
            leaf.key: tuple(leaf.global_shape)
            for leaf in stored.values()
            if isinstance(leaf, ShardedObject)
        }

    def object_cell(self, index: Index, key: str, shape: Ints, cell: Ints) -> Any:
        leaf = ShardedObject(key, None, shape, cell)
        if not handles_objects(self.sharded):
            return self._common.load_sharded_objects({"cell": leaf}, self._folder)["cell"]
        self._read([leaf], index)
        return leaf.data

    def common(self) -> StateDict:
        return self._common.load_common(self._folder)
