"""What a load reads: the index, the tensors, and the objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.mapping.nested_dicts import AtPaths, chained, value_at
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.mapping.state_dict_parts import Partition
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import LoadShardedStrategy
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy, share_index
from dist_checkpointing.strategies.selection import LoadStrategies, handles_objects
from dist_checkpointing.validation.load_errors import StoredTensors


def open_stored(
    found: LoadStrategies,
    checkpoint_dir: Location,
    parts: Partition,
    comm: Comm,
    *,
    is_kept: bool,
    is_whole: bool,
) -> tuple[
    StorageReader | None,
    Index | None,
    Mapping[str, tuple[Ints, torch.dtype]],
    Callable[[], Iterable[str]],
]:
    """What is stored: a reader and its index, for planned strategies; global shapes and dtypes.

    The index may hold no more than what ``parts`` asks for; the last value gives the keys of all
    tensors. ``is_kept`` says that the reader is used more than once, ``is_whole`` that the index
    must hold everything.
    """
    if isinstance(found.sharded, PlannedLoadStrategy):
        reader = found.sharded.make_reader(checkpoint_dir)
        reader.is_kept = is_kept
        shared = share_index(reader, comm)
        index = shared.whole
        if index is None:
            asked = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
            index = shared.index(None if is_whole else found.sharded.needed_keys(asked))
        stored: Mapping[str, tuple[Ints, torch.dtype]] = StoredTensors(index)
        return reader, index, stored, shared.keys
    stored = stored_shapes(found, checkpoint_dir, comm)
    return None, None, stored, stored.keys


def stored_shapes(
    found: LoadStrategies, folder: Location, comm: Comm
) -> dict[str, tuple[Ints, torch.dtype]]:
    """Global shape and dtype of each stored tensor, read by rank 0. Collective."""
    metadata = comm.from_rank0(
        "reading the index", lambda: found.sharded.load_tensors_metadata(folder)
    )
    return {key: (tuple(leaf.global_shape), leaf.dtype) for key, leaf in metadata.items()}


def replaced(leaves: Mapping[TreePath, Any], others: Sequence[Any]) -> Mapping[TreePath, Any]:
    """Other values at the same paths."""
    if isinstance(leaves, AtPaths):
        return leaves.replaced(others)
    return dict(zip(leaves, others, strict=True))


def split_objects(
    objects: Mapping[TreePath, ShardedObject],
    found: LoadStrategies,
    parts: Partition,
    folder: Location,
    comm: Comm,
) -> tuple[Mapping[TreePath, ShardedObject], Mapping[TreePath, Any]]:
    """The objects to read with the tensors; or the values of all, if they lie apart. Collective."""
    if handles_objects(found.sharded):
        return replaced(objects, [leaf.without_data() for leaf in objects.values()]), {}
    with comm.agreed("reading the sharded objects"):
        values = found.common.load_sharded_objects(parts.nested(objects), folder)
        return {}, {path: value_at(values, path) for path in objects}


def read_wanted(
    tensors: WantedLeaves,
    cells: Mapping[TreePath, ShardedObject],
    strategy: LoadShardedStrategy,
    reader: StorageReader | None,
    index: Index | None,
    parts: Partition,
    checkpoint_dir: Location,
    comm: Comm,
    meter: Meter,
) -> tuple[Mapping[TreePath, Any], Mapping[TreePath, Any]]:
    """Read tensors, and the objects that lie among them; the values of both."""
    if reader is not None and index is not None:
        reader.report = meter.add
        meter.expect(int(tensors.tensors.num_bytes.sum()))
        assert isinstance(strategy, PlannedLoadStrategy)
        leaves = WantedLeaves(chained(tensors.by_path, cells), tensors.tensors)
        read(leaves, index, strategy.planner, reader, comm, strategy.plan_reader)
        own, others = tensors.tensors.leaves, cells.values()
        return (
            replaced(tensors.by_path, [leaf.data for leaf in own]),
            replaced(cells, [leaf.data for leaf in others]),
        )
    with comm.agreed("reading"):
        result = strategy.load(parts.nested({**tensors, **cells}), checkpoint_dir)
        of_tensors, of_cells = (
            {path: value_at(result, path) for path in own} for own in (tensors, cells)
        )
        return of_tensors, of_cells
