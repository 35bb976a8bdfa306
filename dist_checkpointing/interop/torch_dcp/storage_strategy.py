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
from dist_checkpointing.format.geometry import Box, Pieces, split_flat_range
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
from dist_checkpointing.planning.chunking import WholeShardLayout
from dist_checkpointing.planning.user_planner import call_hook
from dist_checkpointing.storage.interface import StorageReader, StorageWriter, WriteResult, done
from dist_checkpointing.strategies.base import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
)

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
    layout = WholeShardLayout()

    def __init__(
        self, checkpoint_dir: Path, make: Callable[[str], dcp_storage.StorageWriter]
    ) -> None:
        super().__init__(checkpoint_dir)
        self._make = make

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del index, world_size
        return [FOLDER_NAME]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        del world_size
        folder = self.checkpoint_dir / FOLDER_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = self._make(str(folder))
        call_hook(self._storage.set_up_storage_writer, rank == 0, rank=rank, use_collectives=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        items = [item for item, _, _ in _dcp_items(plan.items)]
        self._refuse_chunks_that_get_lost(items)
        return replace(plan, storage_data=self._storage.prepare_local_plan(dcp.SavePlan(items)))

    def _refuse_chunks_that_get_lost(self, items: Sequence[dcp.WriteItem]) -> None:
        if getattr(getattr(self._storage, "serialization_format", None), "name", "") != (
            "SAFETENSORS"
        ):
            return
        counts = Counter(item.index.fqn for item in items)
        findings = [
            Finding(
                "this rank has several parts of the tensor, and a safetensors file can hold one",
                name,
                remedy="Save one part of it on each rank, or use another storage.",
            )
            for name, count in counts.items()
            if count > 1
        ]
        if findings:
            raise InvalidShardingError("safetensors cannot hold this sharding", findings)

    def prepare_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        given: list[Any] = [plan.storage_data for plan in plans]
        self._described = create_default_global_save_plan(given)[1].state_dict_metadata
        pairs = zip(plans, self._storage.prepare_global_plan(given), strict=True)
        return [replace(plan, storage_data=own) for plan, own in pairs]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        data, own = _Data(plan.items, planner), plan.storage_data
        theirs = self._storage.write_data(own, data).wait()  # type: ignore[arg-type]
        num_bytes: Counter[MetadataIndex] = Counter()
        for result in theirs:
            item, _ = data.parts[result.index]
            num_bytes[item.index] += result.size_in_bytes
        results = [WriteResult(item.index, num_bytes[item.index]) for item in plan.items]
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

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del metadata, world_size
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
        self._storage.read_data(own, _Destinations(plan.items, planner)).wait()  # type: ignore[arg-type]
        return done(None)


class _Data:
    """The one method of a DCP planner that a writer calls."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._planner = planner
        self.parts = {own.index: (item, part) for own, item, part in _dcp_items(items)}

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor:
        item, part = self.parts[write_item.index]
        data = self._planner.get_data(item)
        assert isinstance(data, torch.Tensor)
        if part is None:
            return data
        start, box = part
        return data[start : start + box.num_elements].view(box.shape)


class _Destinations:
    """The methods of a DCP planner that a reader calls for tensors."""

    def __init__(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        self._items, self._planner = items, planner

    def _item(self, read_item: dcp.ReadItem) -> ReadItem:
        assert read_item.dest_index.index is not None
        return self._items[read_item.dest_index.index]

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        return self._planner.acquire_tensor(self._item(read_item))

    def commit_tensor(self, read_item: dcp.ReadItem, tensor: torch.Tensor) -> None:
        self._planner.apply_tensor(self._item(read_item), tensor)


def _dcp_items(
    items: Iterable[WriteItem],
) -> Iterator[tuple[dcp.WriteItem, WriteItem, tuple[int, Box] | None]]:
    """Our items as items of DCP: (DCP's, ours, (start, box) of a part of a flattened range)."""
    for item in items:
        part = item.tensor_data
        assert part is not None
        dtype = tensor_memory.from_name(part.dtype).torch
        if part.flat_range is None:
            yield _write_item(item.index.fqn, part.chunk, dtype, part.size), item, None
            continue
        start = 0
        for box in split_flat_range(part.chunk.shape, *part.flat_range):
            offset = tuple(a + b for a, b in zip(part.chunk.offset, box.offset, strict=True))
            own = _write_item(item.index.fqn, Box(offset, box.shape), dtype, part.size)
            yield own, item, (start, box)
            start += box.num_elements


def _write_item(name: str, box: Box, dtype: torch.dtype, size: Sequence[int]) -> dcp.WriteItem:
    offsets = torch.Size(box.offset)
    data = dcp.TensorWriteData(
        dcp_metadata.ChunkStorageMetadata(offsets, torch.Size(box.shape)),
        dcp_metadata.TensorProperties(dtype=dtype),
        torch.Size(size),
    )
    index = dcp_metadata.MetadataIndex(name, offsets)
    return dcp.WriteItem(index, dcp.WriteItemType.SHARD, tensor_data=data)


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
            yield StoredTensor(key, dtype, shape, tuple(max(extent, 1) for extent in shape))
