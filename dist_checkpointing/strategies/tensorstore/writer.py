"""Writes chunks into this rank's own databases, large ones without a copy."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt
import tensorstore as ts
import torch

from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, checksum, checksum_of_bytes
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import INDEX_NAME, Index, StoredTensor, write_index
from dist_checkpointing.format.seal import SealedFile, files_below
from dist_checkpointing.planning import (
    MetadataIndex,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.storage.heap import give_back_freed
from dist_checkpointing.storage.options import Checksum, Durability, StorageOptions
from dist_checkpointing.storage.protocol import StorageWriter, WriteResult, done
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.tensorstore import database, keys
from dist_checkpointing.strategies.tensorstore.forks import require_threads

_MOST_LANES = 2
_MIN_LANE_BYTES = 64 * 2**20
_SMALL_BYTES = 2**20
"""Below this a copy of the bytes costs less than opening an array for them."""

_KEY_BYTES = 2048
"""About what TensorStore needs for a key, beside its value, until it is committed."""

Task = tuple[int, WriteItem]
"""Position in the plan, and what stands there."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one lane writes.

    Attributes:
        section: that all of it belongs to.
        lane: number of the lane in its section.
        described: keys of arrays to describe.
        small: small items, which go through the interpreter quickly.
        large: items that are written one by one.
    """

    section: str
    lane: int
    described: list[str]
    small: list[Task]
    large: list[Task]


class _Lane:
    """One database that is filled by one thread.

    Values collect in a transaction that refers to the caller's memory; committing it writes them
    behind each other into one data file. What had to be copied counts against the buffer.
    """

    def __init__(self, folder: Path, context: Any, options: StorageOptions, lanes: int) -> None:
        self.folder = folder
        self._context = context
        self._most_copied = max(1, options.buffer_bytes // lanes)
        self._most_referenced = options.data_file_bytes
        self._settings = {
            "config": database.CONFIG,
            "target_data_file_size": options.data_file_bytes,
        }
        self._store = database.open_store(folder, context, **self._settings)
        self._arrays: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._transaction = ts.Transaction()
        self._target = self._store.with_transaction(self._transaction)
        self._writes: list[Any] = []
        self._arrays.clear()
        self._copied = self._referenced = self._keys = 0

    def put(self, key: str, value: bytes) -> None:
        """Store bytes."""
        self._target.write(key, value)  # an error would come out when it is committed
        self._count(len(value), copied=True)

    def put_chunk(
        self,
        tensor: StoredTensor,
        item: WriteItem,
        array: npt.NDArray[Any],
        *,
        copied: bool,
    ) -> None:
        """Store a chunk without copying it; ``copied`` says that the array itself is a copy."""
        part = item.tensor_data
        assert part is not None
        path = keys.array_path(tensor, part.chunk, part.flat_range)
        target = self._arrays.get(path)
        if target is None:
            target = self._arrays[path] = ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": database.spec(self.folder, path, **self._settings),
                    "metadata": keys.array_node(tensor, part.chunk, part.flat_range),
                    # A chunk of zeros that is not written could not be told from a lost one.
                    "store_data_equal_to_fill_value": True,
                },
                open=True,
                assume_metadata=True,
                context=self._context,
                transaction=self._transaction,
            ).result()
        if tensor.pieces is None:
            target = target[part.chunk.slices()]
        self._writes.append(target.write(array, can_reference_source_data_indefinitely=True).copy)
        whole = tensor.pieces is not None or part.chunk.shape == tensor.grid.chunk_shape
        self._count(array.nbytes, copied=copied or not whole)

    def _count(self, num_bytes: int, *, copied: bool) -> None:
        self._keys += 1
        if copied:
            self._copied += num_bytes
        else:
            self._referenced += num_bytes
        self._copied += _KEY_BYTES
        if self._copied >= self._most_copied or self._referenced >= self._most_referenced:
            self.commit()

    def commit(self) -> None:
        """Write everything that has collected."""
        if self._copied or self._referenced:
            for write in self._writes:
                write.result()
            self._transaction.commit_sync()
            is_large = self._keys >= database.MANY_KEYS
            self._begin()
            if is_large:
                give_back_freed()


class TensorStoreWriter(StorageWriter):
    """Writes zarr v3 arrays and objects into OCDBT databases; rank 0 merges them."""

    gathers_results: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        require_threads()

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del index, world_size
        return [INDEX_NAME, CHECKSUMS_NAME, *database.CREATED_NAMES]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        index = plan.index
        assert index is not None
        with paused_collector():
            work = self._share_out(plan, index)
        context = database.make_context(self.options, _existing(self.checkpoint_dir))
        results: list[WriteResult | None] = [None] * len(plan.items)

        def fill(share: _Share) -> WriteResult:
            folder = database.section_folder(self.checkpoint_dir, share.section)
            folder /= f"{self._rank}.{share.lane}-{uuid.uuid4().hex[:8]}"
            lane = _Lane(folder, context, self.options, len(work))
            with paused_collector():
                for key in share.described:
                    for name, value in keys.metadata_values(index[key]):
                        lane.put(name, value)
                for position, item in share.small:
                    results[position] = self._write_item(lane, item, index, planner)
            for position, item in share.large:
                results[position] = self._write_item(lane, item, index, planner)
            lane.commit()
            if self.options.durability is Durability.FSYNC:
                local.fsync_tree(folder)
            name = folder.relative_to(self.checkpoint_dir).as_posix()
            held = database.contents(folder)
            files = tuple(
                SealedFile(file, size) for file, size in files_below(folder, self.checkpoint_dir)
            )
            return WriteResult(MetadataIndex(name), held.num_bytes, (name, held), files=files)

        with ThreadPoolExecutor(min(_MOST_LANES, self.options.threads), "lane") as pool:
            filled = list(pool.map(fill, work))
        return done([*(result for result in results if result is not None), *filled])

    def _share_out(self, plan: SavePlan, index: Index) -> list[_Share]:
        """The work, on one lane a section, or on several of about the same bytes."""
        # Any rank can describe any array, so each takes its share, also of those without chunks.
        described = list(index)[self._rank :: self._world_size]
        sections: dict[str, tuple[list[str], list[tuple[Task, int]]]] = {}
        for key in described:
            sections.setdefault(database.section_of(key), ([], []))[0].append(key)
        sizes = plan.table.num_bytes.tolist()
        for task, size in zip(enumerate(plan.items), sizes, strict=True):
            section = database.section_of(task[1].index.fqn)
            sections.setdefault(section, ([], []))[1].append((task, size))
        return [
            share
            for section, (names, tasks) in sections.items()
            for share in _lanes(section, names, tasks, max(1, self.options.threads // 2))
        ]

    def _write_item(
        self, lane: _Lane, item: WriteItem, index: Index, planner: SavePlanner
    ) -> WriteResult:
        data = planner.get_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert item.object_cell is not None
            assert item.index.offset is not None
            value = serialize(data, f"the ShardedObject {item.index.fqn!r}")
            lane.put(keys.object_key(item.index.fqn, item.index.offset, item.object_cell), value)
            return WriteResult(item.index, len(value), checksum=checksum_of_bytes(value))
        assert isinstance(data, torch.Tensor)
        part = item.tensor_data
        assert part is not None
        tensor = index[item.index.fqn]
        on_cpu = data if data.device.type == "cpu" else data.detach().to("cpu")
        array = dtypes.as_numpy(on_cpu.contiguous())
        digest = checksum(array) if self.options.checksum is Checksum.XXH3 else None
        whole = tensor.pieces is not None or part.chunk.shape == tensor.grid.chunk_shape
        if whole and array.nbytes < _SMALL_BYTES:
            lane.put(keys.chunk_key(tensor, part.chunk, part.flat_range), array.tobytes())
        else:
            copied = planner.makes_data or array.ctypes.data != data.data_ptr()
            lane.put_chunk(tensor, item, array, copied=copied)
        self.report(array.nbytes)
        return WriteResult(item.index, array.nbytes, checksum=digest)

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        parts: list[Any] = [result.storage_data for of_rank in results for result in of_rank]
        context = database.make_context(self.options, self.checkpoint_dir)
        database.merge(self.checkpoint_dir, parts, context)
        if self.options.durability is Durability.FSYNC:
            nodes = self.checkpoint_dir / database.NODES_NAME
            if nodes.exists():
                local.fsync_tree(nodes)
                local.fsync_file(self.checkpoint_dir / database.MANIFEST_NAME)
            folders = {self.checkpoint_dir / name for name, _ in parts}
            local.fsync_folders(folders, self.checkpoint_dir)
        write_index(metadata, self.checkpoint_dir, self.options.durability)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _lanes(
    section: str, described: list[str], tasks: list[tuple[Task, int]], most_lanes: int
) -> list[_Share]:
    small = [task for task, size in tasks if size < _SMALL_BYTES]
    large = [(task, size) for task, size in tasks if size >= _SMALL_BYTES]
    count = max(1, min(_MOST_LANES, most_lanes, sum(size for _, size in large) // _MIN_LANE_BYTES))
    lanes: list[list[Task]] = [[] for _ in range(count)]
    loads = [0] * count
    for task, size in large:
        least = loads.index(min(loads))
        lanes[least].append(task)
        loads[least] += size
    return [
        _Share(section, lane, described if lane == 0 else [], small if lane == 0 else [], tasks)
        for lane, tasks in enumerate(lanes)
    ]
