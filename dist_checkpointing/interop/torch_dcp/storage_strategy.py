"""Any DCP storage (files, fsspec, Hugging Face safetensors, your own) as a strategy.

The DCP storage writes into the folder ``dcp`` of the checkpoint. DCP itself can load from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint import (
    metadata as dcp_metadata,
    planner as dcp,
    storage as dcp_storage,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    StrategyNotFoundError,
)
from dist_checkpointing.format.geometry import Box, Pieces
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.user_planner import call_hook
from dist_checkpointing.storage.interface import StorageReader, StorageWriter, WriteResult, done
from dist_checkpointing.strategies.base import PlannedLoadStrategy, PlannedSaveStrategy
from dist_checkpointing.strategies.checkpointable import shard_item

FOLDER_NAME = "dcp"
BACKEND = ("dcp", 1)


class DCPStorageSaveStrategy(PlannedSaveStrategy):
    """Saves tensors through a DCP StorageWriter; the common strategy saves everything else.

    The ranks plan and agree as with any other strategy, without the planner and the collectives of
    DCP. A flattened range is stored as the boxes that make it up.

    Args:
        storage_writer: called with a folder on every rank: a DCP writer class, or a function that
            makes a writer, such as ``partial(HuggingFaceStorageWriter, save_distributed=True)``.
        planner: used instead of DefaultSavePlanner.
        comm: the ranks that save together when ``save`` is called directly.

    Example:
        >>> from torch.distributed.checkpoint import FileSystemWriter
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.ones(3))
        >>> save({"w": weight}, "ckpt/17", DCPStorageSaveStrategy(FileSystemWriter))
    """

    writes: ClassVar[tuple[str, int]] = BACKEND

    def __init__(
        self,
        storage_writer: Callable[[str], dcp_storage.StorageWriter],
        *,
        planner: SavePlanner | None = None,
        comm: Comm | None = None,
    ) -> None:
        super().__init__(planner=planner, comm=comm)
        self.storage_writer = storage_writer

    def make_writer(self, checkpoint_dir: Path) -> StorageWriter:
        return _Writer(checkpoint_dir, self.storage_writer)


class DCPStorageLoadStrategy(PlannedLoadStrategy):
    """Loads tensors through a DCP StorageReader, into any sharding.

    It reads what DCPStorageSaveStrategy wrote. If its own ``load`` is called, it also reads a
    folder that DCP wrote. The common strategy loads values that are not tensors.

    Warning: ``FileSystemReader`` of torch unpickles ``.metadata``, which lets a checkpoint run any
    code. Use it only for checkpoints that you trust.

    Args:
        storage_reader: called with a folder on every rank: a DCP reader class, or a function that
            makes a reader.
        planner: used instead of DefaultLoadPlanner.
        comm: the ranks that load together when ``load`` is called directly.

    Example:
        >>> from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.ones(3))
        >>> save({"w": weight}, "ckpt/17", DCPStorageSaveStrategy(FileSystemWriter))
        >>> load({"w": weight}, "ckpt/17", DCPStorageLoadStrategy(FileSystemReader))
        {'w': tensor([1., 1., 1.])}
    """

    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({BACKEND})

    def __init__(
        self,
        storage_reader: Callable[[str], dcp_storage.StorageReader],
        *,
        planner: LoadPlanner | None = None,
        comm: Comm | None = None,
    ) -> None:
        super().__init__(planner=planner, comm=comm)
        self.storage_reader = storage_reader

    def make_reader(self, checkpoint_dir: Path) -> StorageReader:
        return _Reader(checkpoint_dir, self.storage_reader)


def reader_must_be_named() -> NoReturn:
    """The registry's entry for such checkpoints, which do not name their reader: it refuses."""
    finding = Finding(
        "it was saved through a DCP storage, and does not name the reader",
        remedy="Pass sharded_strategy=DCPStorageLoadStrategy(reader), or register one as "
        f"{BACKEND}; FileSystemReader reads what FileSystemWriter wrote, and so on.",
    )
    raise StrategyNotFoundError(f"{BACKEND} needs a DCP reader", [finding])


class _Writer(StorageWriter):
    # A chunk is a shard, however large it is.
    layout = RowBlockLayout(max_chunk_bytes=1 << 62, keeps_ranges=False)

    def __init__(
        self, checkpoint_dir: Path, make: Callable[[str], dcp_storage.StorageWriter]
    ) -> None:
        super().__init__(checkpoint_dir)
        self._make = make

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del index, world_size
        return [FOLDER_NAME]

    def set_up_storage_writer(self, *, rank: int) -> None:
        folder = self.checkpoint_dir / FOLDER_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = self._make(str(folder))
        call_hook(self._storage.set_up_storage_writer, rank == 0, rank=rank, use_collectives=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        form = getattr(getattr(self._storage, "serialization_format", None), "name", "")
        if form == "SAFETENSORS":
            _require_one_part_each(plan.items)
        given = dcp.SavePlan([*map(_write_item, plan.items)])
        return replace(plan, storage_data=self._storage.prepare_local_plan(given))

    def prepare_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        given: list[Any] = [plan.storage_data for plan in plans]
        self._described = create_default_global_save_plan(given)[1].state_dict_metadata
        pairs = zip(plans, self._storage.prepare_global_plan(given), strict=True)
        return [replace(plan, storage_data=own) for plan, own in pairs]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {_write_item(item).index: item for item in plan.items}
        own: Any = plan.storage_data
        theirs = self._storage.write_data(own, _Planner(planner, items)).wait()  # type: ignore[arg-type]
        sizes = {result.index: result.size_in_bytes for result in theirs}
        results = [WriteResult(item.index, sizes[index]) for index, item in items.items()]
        for_finish = WriteResult(MetadataIndex(FOLDER_NAME), 0, tuple(theirs))
        return done([*results, for_finish])

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        described: dict[str, Any] = dict(self._described)
        for key in metadata:
            if key not in described:  # it has no elements, so no rank wrote it
                size = torch.Size(metadata[key].global_shape)
                properties = dcp_metadata.TensorProperties(dtype=metadata[key].dtype.torch)
                described[key] = dcp_metadata.TensorStorageMetadata(properties, size, [])
        of_ranks: list[Any] = [of_rank[-1].storage_data for of_rank in results]
        self._storage.finish(dcp_metadata.Metadata(described), [*map(list, of_ranks)])


def _require_one_part_each(items: Iterable[WriteItem]) -> None:
    problem = "this rank has several parts of the tensor, and a safetensors file can hold one"
    remedy = "Save one part of it on each rank, or use another storage."
    counts = Counter(item.index.fqn for item in items)
    findings = [Finding(problem, key, remedy=remedy) for key, n in counts.items() if n > 1]
    InvalidShardingError.raise_if(findings, "safetensors cannot hold this sharding")


class _Reader(StorageReader):
    def __init__(
        self, checkpoint_dir: Path, make: Callable[[str], dcp_storage.StorageReader]
    ) -> None:
        super().__init__(checkpoint_dir)
        own = checkpoint_dir / FOLDER_NAME
        self._folder = own if own.is_dir() else checkpoint_dir
        self._storage = make(str(self._folder))

    def location(self, chunk: MetadataIndex) -> str:
        return f"{self._folder}: {chunk.fqn} at {chunk.offset}"

    def read_metadata(self) -> Index:
        try:
            index = Index.of(_stored_tensors(self._metadata))
            return Index.from_json(index.to_json(), str(self._folder))  # this checks every number
        except Exception as error:
            finding = Finding(f"{type(error).__name__}: {error}", path=str(self._folder))
            message = f"{type(self._storage).__name__} cannot read its metadata"
            raise CorruptCheckpointError(message, [finding]) from error

    @cached_property
    def _metadata(self) -> dcp_metadata.Metadata:
        return self._storage.read_metadata()

    def set_up_storage_reader(self, _: Index, *, rank: int) -> None:
        set_up = self._storage.set_up_storage_reader
        call_hook(set_up, self._metadata, rank == 0, rank=rank, use_collectives=True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        items = [_read_item(item, position) for position, item in enumerate(plan.items)]
        return replace(plan, storage_data=self._storage.prepare_local_plan(dcp.LoadPlan(items)))

    def prepare_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        given: list[Any] = [plan.storage_data for plan in plans]
        pairs = zip(plans, self._storage.prepare_global_plan(given), strict=True)
        return [replace(plan, storage_data=own) for plan, own in pairs]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        own: Any = plan.storage_data
        self._storage.read_data(own, _Planner(planner, plan.items)).wait()  # type: ignore[arg-type]
        return done(None)


class _Planner:
    """The methods of a DCP planner that a storage calls; ``items`` are ours, by those of DCP."""

    def __init__(self, planner: Any, items: Any) -> None:
        self._planner, self._items = planner, items

    def resolve_data(self, write_item: dcp.WriteItem) -> Any:
        return self._planner.get_data(self._items[write_item.index])

    def resolve_tensor(self, read_item: dcp.ReadItem) -> Any:
        return self._planner.acquire_tensor(self._items[read_item.dest_index.index])

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        self._planner.apply_tensor(self._items[read_item.dest_index.index], tensor)


def _write_item(item: WriteItem) -> dcp.WriteItem:
    part: Any = item.tensor_data
    properties = dcp_metadata.TensorProperties(dtype=tensor_memory.from_name(part.dtype).torch)
    return shard_item(item.index.fqn, part.chunk, properties, part.size, None)


def _read_item(item: ReadItem, position: int) -> dcp.ReadItem:
    source: Any = item.storage_index
    target: Any = item.dest_index
    return dcp.ReadItem(
        dcp.LoadItemType.TENSOR,
        dcp_metadata.MetadataIndex(target.fqn, target.offset, position),
        torch.Size(item.dest_offsets),
        dcp_metadata.MetadataIndex(source.fqn, source.offset, source.index),
        torch.Size(item.storage_offsets),
        torch.Size(item.lengths),
    )


def _stored_tensors(metadata: dcp_metadata.Metadata) -> Iterator[StoredTensor]:
    for key, stored in sorted(metadata.state_dict_metadata.items()):
        if isinstance(stored, dcp_metadata.BytesStorageMetadata):
            continue
        shape = tuple(stored.size)
        dtype = tensor_memory.from_torch(stored.properties.dtype, key=key)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
        if pieces := [(box, None) for box in boxes if box.num_elements]:
            yield StoredTensor(key, dtype, shape, None, Pieces.of(len(shape), pieces))
        else:
            yield StoredTensor.undivided(key, dtype, shape)
