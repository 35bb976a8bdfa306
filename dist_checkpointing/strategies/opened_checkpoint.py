"""A checkpoint that ranks load together: its index, its tensors and its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import number_of_save
from dist_checkpointing.mapping import CommonStateDict, ShardedObject
from dist_checkpointing.mapping.nested_dicts import AtPaths, Path as TreePath, value_at
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    handles_objects,
    share_index,
)
from dist_checkpointing.strategies.selection import (
    LoadStrategies,
    Selection,
    open_checkpoint,
)
from dist_checkpointing.validation.load_errors import StoredTensors


@dataclass(slots=True, eq=False)
class OpenedCheckpoint:
    """A checkpoint that ranks load together; methods are collective.

    Attributes:
        folder: Folder of its files.
        save_number: Number of the save that made it.
        strategies: What reads it.
        common: Its common state.
        comm: The ranks.
        reader: Reads it.
        index: What is stored, as far as it was asked for.
        shapes: Global shape and dtype of the stored tensors, by key.
        stored_keys: Gives the keys of all stored tensors.
    """

    folder: Location
    save_number: int
    strategies: LoadStrategies
    common: CommonStateDict
    comm: Comm
    reader: StorageReader = field(init=False)
    index: Index = field(init=False)
    shapes: Mapping[str, tuple[Ints, torch.dtype]] = field(init=False)
    stored_keys: Callable[[], Iterable[str]] = field(init=False)

    @classmethod
    def open(
        cls,
        folder: Location,
        sharded_strategy: Selection[LoadShardedStrategy],
        common_strategy: Selection[LoadCommonStrategy],
        comm: Comm,
        *,
        trusted: bool,
    ) -> OpenedCheckpoint:
        """Find the strategies, and read the common state. Not collective."""
        # First: what another save begins to write afterwards must not pass for this checkpoint.
        save_number = number_of_save(folder)
        strategies = open_checkpoint(folder, sharded_strategy, common_strategy, trusted=trusted)
        return cls(folder, save_number, strategies, strategies.common.load_common(folder), comm)

    def read_index(self, parts: StateDictParts, *, is_kept: bool, is_whole: bool) -> None:
        """Read the index.

        Args:
            parts: What this rank asks for. The index may hold no more than that.
            is_kept: Whether the reader is used more than once.
            is_whole: Whether the index must hold everything.
        """
        strategy = self.strategies.sharded
        self.reader = strategy.make_reader(self.folder)
        self.reader.is_kept = is_kept
        shared = share_index(self.reader, self.comm)
        index = shared.whole
        if index is None:
            asked = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
            index = shared.index(None if is_whole else strategy.needed_keys(asked))
        self.index, self.stored_keys = index, shared.keys
        self.shapes = StoredTensors(self.index)

    def stored_shapes(self) -> dict[str, tuple[Ints, torch.dtype]]:
        """Global shape and dtype of each stored tensor, read by rank 0."""
        metadata = self.comm.from_rank0(
            "reading the index",
            lambda: self.strategies.sharded.load_tensors_metadata(self.folder),
        )
        return {key: (tuple(leaf.global_shape), leaf.dtype) for key, leaf in metadata.items()}

    def object_keys(self) -> set[str]:
        """Keys of the sharded objects, listed by rank 0."""
        return self.comm.from_rank0(
            "listing the sharded objects", lambda: self.strategies.object_keys(self.folder)
        )

    def read_objects(
        self, objects: Mapping[TreePath, ShardedObject], parts: StateDictParts
    ) -> tuple[Mapping[TreePath, ShardedObject], Mapping[TreePath, Any]]:
        """The objects to read with the tensors; or the values of all, if they lie apart."""
        if handles_objects(self.strategies.sharded):
            return replaced(objects, [leaf.without_data() for leaf in objects.values()]), {}
        with self.comm.agreed("reading the sharded objects"):
            nested = parts.nested(objects)
            values = self.strategies.common.load_sharded_objects(nested, self.folder)
            return {}, {path: value_at(values, path) for path in objects}

    def read(
        self, wanted: WantedTable, cells: Mapping[TreePath, ShardedObject], meter: Meter
    ) -> tuple[Mapping[TreePath, Any], Mapping[TreePath, Any]]:
        """Read tensors, and the objects that lie among them; the values of both."""
        self.reader.report = meter.add
        meter.expect(int(wanted.num_bytes.sum()))
        strategy, rows = self.strategies.sharded, wanted.with_objects(cells)
        read(rows, self.index, strategy.planner, self.reader, self.comm, strategy.plan_reader)
        return (
            replaced(wanted.leaves, [leaf.data for leaf in wanted.tensors]),
            replaced(cells, [leaf.data for leaf in cells.values()]),
        )


def replaced(leaves: Mapping[TreePath, Any], others: Sequence[Any]) -> Mapping[TreePath, Any]:
    """Other values at the same paths."""
    if isinstance(leaves, AtPaths):
        return leaves.replaced(others)
    return dict(zip(leaves, others, strict=True))
