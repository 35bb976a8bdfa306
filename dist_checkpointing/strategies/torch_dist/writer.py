"""Writes .distcp files, a few a rank, and ``.metadata``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from torch.serialization import get_crc32_options

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, checksum_of_bytes
from dist_checkpointing.format.geometry import Ints, split_flat_range
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.planning import (
    MetadataIndex,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.planning.layout import RowBlockLayout
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.protocol import StorageWriter, WriteResult, done
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.torch_dist.contents import unique_keys
from dist_checkpointing.strategies.torch_dist.data_files import DataFile, file_name
from dist_checkpointing.strategies.torch_dist.flattened import (
    common_box_shape,
    flattened_chunk,
    flattened_size,
)
from dist_checkpointing.strategies.torch_dist.metadata import DcpMetadata, DcpTensor, Place
from dist_checkpointing.strategies.torch_dist.metadata_pickle import to_pickle

_MIN_FILE_BYTES = 32 * 2**20
_MOST_FILES = 8
"""Of one rank. Rank 0 names the files of all ranks before they are written, and does not know how
many threads another rank has."""

Row = tuple[str, Ints | None, Ints | None, Place]
"""What a rank wrote: key, offsets and sizes of a chunk (None for a value), and where it is."""

Chunk = tuple[tuple[Ints, Ints], torch.Tensor]
"""Offsets and sizes of a chunk as DCP counts them, and its values in that shape."""


@dataclass(frozen=True, slots=True)
class _Task:
    """An item of the plan and its position there."""

    position: int
    item: WriteItem


class TorchDistWriter(StorageWriter):
    """Writes what plain torch DCP and Megatron-Core read."""

    # A chunk is a shard, however large it is.
    layout = RowBlockLayout(max_chunk_bytes=1 << 62)
    gathers_results: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._rank = 0
        self._with_crc = get_crc32_options()  # which other threads and processes may not see

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        clashes = [key for key in unique_keys(index) if key in index]
        if clashes:
            raise InvalidShardingError(
                "keys of the state dict clash",
                [
                    Finding(
                        "is also the name of a cell of a ShardedObject", key, remedy="Rename it."
                    )
                    for key in clashes
                ],
            )
        names = [
            file_name(rank, number) for rank in range(world_size) for number in range(_MOST_FILES)
        ]
        return [DCP_METADATA_NAME, CHECKSUMS_NAME, *names]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        del world_size
        self._rank = rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert plan.index is not None
        index = plan.index
        keys = {item.index.fqn for item in plan.items if item.tensor_data is not None}
        flattened = {key: common_box_shape(index[key]) is not None for key in keys}
        parts = _split(plan.items, min(self.options.threads, _MOST_FILES))
        buffer_bytes = max(1, self.options.buffer_bytes // max(1, len(parts)))
        results: list[WriteResult | None] = [None] * len(plan.items)

        def fill(work: tuple[int, list[_Task]]) -> list[Row]:
            number, tasks = work
            path = self.checkpoint_dir / file_name(self._rank, number)
            rows: list[Row] = []
            with DataFile.created(path, with_crc=self._with_crc, buffer_bytes=buffer_bytes) as file:
                for task in tasks:
                    item = task.item
                    as_one = flattened.get(item.index.fqn, False)
                    written, result = self._write_item(file, item, planner, as_one=as_one)
                    rows += written
                    results[task.position] = result
            if self.options.durability is Durability.FSYNC:
                local.fsync_file(path)
            return rows

        with ThreadPoolExecutor(max(1, len(parts)), "distcp") as pool:
            rows = [row for part in pool.map(fill, enumerate(parts)) for row in part]
        if self.options.durability is Durability.FSYNC and parts:
            local.fsync_folder(self.checkpoint_dir)
        # One result for all places: it is cheaper to send than one an item.
        names = [file_name(self._rank, number) for number in range(len(parts))]
        sizes = [(self.checkpoint_dir / name).stat().st_size for name in names]
        files = tuple(map(SealedFile, names, sizes))
        num_bytes = sum(row[3].length for row in rows)
        places = WriteResult(MetadataIndex(""), num_bytes, rows, files=files)
        return done([*(result for result in results if result is not None), places])

    def _write_item(
        self, file: DataFile, item: WriteItem, planner: SavePlanner, *, as_one: bool
    ) -> tuple[list[Row], WriteResult]:
        data, key = planner.get_data(item), item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            assert item.index.offset is not None
            assert item.object_cell is not None
            cell = ShardedObject(key, None, item.object_cell, item.index.offset).unique_key
            # Megatron keeps a list of all cells of this name on the rank.
            value = serialize([data], f"the ShardedObject {key!r}")
            place = file.add_bytes(value)
            digest = checksum_of_bytes(value)
            return [(cell, None, None, place)], WriteResult(
                item.index, place.length, checksum=digest
            )
        assert isinstance(data, torch.Tensor)
        hasher = xxhash.xxh3_64() if self.options.checksum is Checksum.XXH3 else None
        rows: list[Row] = [
            (key, offsets, sizes, file.add_tensor(values, sizes, hasher))
            for (offsets, sizes), values in _chunks(item, data, as_one=as_one)
        ]
        self.report(data.nbytes)
        size = sum(row[3].length for row in rows)
        checksum = None if hasher is None else hasher.intdigest()
        return rows, WriteResult(item.index, size, checksum=checksum)

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        chunks: dict[str, list[tuple[Ints, Ints]]] = {key: [] for key in metadata}
        values: list[str] = []
        places: dict[tuple[str, Ints | None], Place] = {}
        rows: Iterator[Any] = (
            row for of_rank in results for result in of_rank for row in _rows(result)
        )
        for key, offsets, sizes, place in rows:
            places[key, offsets] = place
            if offsets is None:
                values.append(key)
            else:
                chunks[key].append((offsets, sizes))
        tensors = {key: _dcp_tensor(metadata, key, chunks[key]) for key in metadata}
        content = to_pickle(DcpMetadata(tensors, tuple(values), places))
        path = self.checkpoint_dir / DCP_METADATA_NAME
        local.write_atomic(path, content, self.options.durability)


def _rows(result: WriteResult) -> list[Row]:
    assert isinstance(result.storage_data, list)
    return result.storage_data


def _dcp_tensor(index: Index, key: str, chunks: list[tuple[Ints, Ints]]) -> DcpTensor:
    stored = index[key]
    box_shape, shape = common_box_shape(stored), stored.global_shape
    size = shape if box_shape is None else flattened_size(shape, box_shape)
    whole = None if box_shape is None else shape
    return DcpTensor(stored.dtype.torch, size, tuple(chunks), whole)


def _split(items: Sequence[WriteItem], threads: int) -> list[list[_Task]]:
    """The items of one rank on one file, or on several of about the same bytes."""
    if not items:
        return []
    sizes = [item.tensor_storage_size() or 0 for item in items]
    count = max(1, min(threads, sum(sizes) // _MIN_FILE_BYTES))
    parts: list[list[_Task]] = [[] for _ in range(count)]
    loads = [0] * count
    for position, (item, size) in enumerate(zip(items, sizes, strict=True)):
        least = loads.index(min(loads))
        parts[least].append(_Task(position, item))
        loads[least] += size
    return parts


def _chunks(item: WriteItem, data: torch.Tensor, *, as_one: bool) -> Iterator[Chunk]:
    """An item as DCP will know it.

    Args:
        item: of the plan.
        data: its values.
        as_one: whether its tensor is stored flattened, if it is; else a flattened range becomes
            the boxes that it consists of, which every reader of DCP understands.
    """
    part = item.tensor_data
    assert part is not None
    if part.flat_range is None:
        yield (part.chunk.offset, part.chunk.shape), data
    elif as_one:
        chunk = flattened_chunk(part.chunk, part.flat_range)
        yield chunk, data.view(chunk[1])
    else:
        start = 0
        for local in split_flat_range(part.chunk.shape, *part.flat_range):
            offset = tuple(a + b for a, b in zip(part.chunk.offset, local.offset, strict=True))
            values = data[start : start + local.num_elements]
            yield (offset, local.shape), values.reshape(local.shape)
            start += local.num_elements
