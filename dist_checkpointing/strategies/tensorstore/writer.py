"""Writes values into data files of this rank; rank 0 writes the tree that says where they are."""

from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_char
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, checksum_of_bytes
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import INDEX_NAME, Index, write_index
from dist_checkpointing.format.ocdbt.nodes import Extents
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.layout import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.host_blocks import HostBlocks, is_on_gpu
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.protocol import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.tensorstore import keys
from dist_checkpointing.strategies.tensorstore.data_files import (
    LARGE_BYTES,
    MOST_PENDING_BYTES,
    Array,
    DataFiles,
)
from dist_checkpointing.strategies.tensorstore.tree_file import StoredValues, joined, write_tree

_MOST_THREADS = 2
_LEAST_BYTES_A_THREAD = 64 * 2**20
_MOST_TOGETHER = 8192
_MEMORY = memoryview((c_char * sys.maxsize).from_address(0)).cast("B")
"""All memory of this process, of which only what belongs to a tensor may be read."""


class TensorStoreWriter(StorageWriter):
    """Writes zarr v3 arrays and objects as one OCDBT database."""

    layout = RowBlockLayout()

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del index, world_size
        return [INDEX_NAME, CHECKSUMS_NAME, *keys.CREATED_NAMES]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        del world_size
        self._rank = rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        table, index = plan.table, plan.index
        assert index is not None
        if not len(table):
            return done([])
        with paused_collector():
            row_keys = keys.keys_to_write(table, index)
            key_lengths = np.fromiter(map(len, row_keys), dtype=np.uint16)
            joined_keys = b"".join(row_keys)
            del row_keys
            shares = list(self._shares(table))
        most_pending = max(1, self.options.buffer_bytes // len(shares))
        rows = _Rows(plan, planner, index, has_checksums=self.options.checksum is Checksum.XXH3)

        def write(share: _Share) -> tuple[DataFiles, list[SealedFile]]:
            folder = Path(keys.DATA_FOLDER, keys.DATA_GROUPS[share.group])
            (self.checkpoint_dir / folder).mkdir(parents=True, exist_ok=True)
            stem = str(folder / f"{self._rank}.{share.number}-{uuid.uuid4().hex[:8]}")
            files = DataFiles(self.checkpoint_dir, stem, self.options, most_pending, self.report)
            try:
                rows.write(share.rows, files, most_pending)
                return files, files.finish()
            except BaseException:
                files.give_up()
                raise

        with ThreadPoolExecutor(min(_MOST_THREADS, self.options.threads), "data-files") as pool:
            written = list(pool.map(write, shares))
        extents = Extents(*np.empty((3, len(table)), dtype=np.int64))
        names: list[str] = []
        for share, (files, _) in zip(shares, written, strict=True):
            extents.file[share.rows] = np.array(files.file) + len(names)
            extents.offset[share.rows], extents.length[share.rows] = files.offset, files.length
            names += files.names
        results = WriteResults(
            table,
            extents.length,
            rows.digests,
            None if rows.has_checksums else table.is_object,
            tuple(file for _, sealed in written for file in sealed),
            StoredValues(tuple(names), joined_keys, key_lengths, extents),
        )
        return done(results)  # type: ignore[arg-type]

    def _shares(self, table: ShardTable) -> Iterator[_Share]:
        """The work, of each data group on one thread, or on several of about the same bytes."""
        groups = np.array([keys.group_of(name) for name in table.names])[table.keys]
        # A removal keeps objects: they must not hold on to the files of an optimizer's tensors.
        groups[table.is_object] = keys.DATA_GROUPS.index("model")
        sizes = table.num_bytes
        for group in np.unique(groups).tolist():
            own = groups == group
            small = np.flatnonzero(own & (sizes < LARGE_BYTES))
            large = np.flatnonzero(own & (sizes >= LARGE_BYTES))
            count = min(_MOST_THREADS, self.options.threads // 2)
            count = max(1, min(count, int(sizes[large].sum()) // _LEAST_BYTES_A_THREAD))
            shares: list[list[int]] = [[] for _ in range(count)]
            loads = [0] * count
            for row, size in zip(large.tolist(), sizes[large].tolist(), strict=True):
                least = loads.index(min(loads))
                shares[least].append(row)
                loads[least] += size
            for number, rows in enumerate(shares):
                # Large values first: these begin at the beginning of a page more often.
                last = small.tolist() if number == 0 else []
                yield _Share(group, number, np.array(rows + last, dtype=np.int64))

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        stored = [result.storage_data for of_rank in results for result in of_rank]
        parts = [values for values in stored if isinstance(values, StoredValues)]
        durability, folder = self.options.durability, self.checkpoint_dir
        if durability is Durability.FSYNC:
            files = [folder / name for values in parts for name in values.files]
            local.fsync_folders(files, folder)
        with paused_collector():
            write_tree(folder, *joined(parts, metadata), durability)
        write_index(metadata, folder, durability)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one thread writes.

    Attributes:
        group: data group that all of it belongs to.
        number: of the share in its group.
        rows: of the plan.
    """

    group: int
    number: int
    rows: Int64s


class _Rows:
    """Writes the values of rows of a plan to data files.

    Attributes:
        digests: checksums of the rows that were written.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, index: Index, *, has_checksums: bool
    ) -> None:
        table = plan.table
        self.has_checksums = has_checksums
        self.digests = np.zeros(len(table), dtype=np.uint64)
        self._table = table
        self._index = index
        self._data_of = planner.data_of(plan)
        is_edge = _edges(table, index)
        self._is_object = table.is_object.tolist()
        self._is_edge = is_edge.tolist()
        self._sizes = table.num_bytes
        self._is_simple = ~table.is_object & ~is_edge & (self._sizes < LARGE_BYTES)

    def write(self, rows: Int64s, files: DataFiles, most_bytes: int) -> None:
        """Write some rows; several threads may do so.

        Args:
            rows: to write.
            files: get the values.
            most_bytes: memory for copies of tensors on GPUs.
        """
        for begin, end, is_simple in self._batches(rows, min(most_bytes, MOST_PENDING_BYTES)):
            data: list[object] = []
            if is_simple:
                data = list(map(self._data_of, rows[begin:end].tolist()))
                if self._write_memory(rows[begin:end], data, files):
                    continue
                if not all(isinstance(own, torch.Tensor) and own.is_cpu for own in data):
                    # What is copied from a GPU is copied ahead of what is written.
                    self._write_each(rows[begin:], data, files, most_bytes)
                    return
            self._write_each(rows[begin:end], data, files, most_bytes)

    def _batches(self, rows: Int64s, most_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """Runs of rows that may be written together, and of those that may not be."""
        is_simple = self._is_simple[rows]
        ends = np.cumsum(self._sizes[rows])
        begin = 0
        for change in [*(np.flatnonzero(np.diff(is_simple)) + 1).tolist(), len(rows)]:
            while begin < change:
                end = change
                if is_simple[begin]:
                    limit = most_bytes + (int(ends[begin - 1]) if begin else 0)
                    room = int(np.searchsorted(ends, limit, side="right"))
                    end = min(change, begin + _MOST_TOGETHER, max(begin + 1, room))
                yield begin, end, bool(is_simple[begin])
                begin = end

    def _write_memory(self, rows: Int64s, data: Sequence[Any], files: DataFiles) -> bool:
        """Write tensors from where they are in memory, without a look at each; False if in vain."""
        if not dtypes.are_plain_memory(data):
            return False
        addresses = np.fromiter(map(torch.Tensor.data_ptr, data), np.int64, len(data))
        lengths = np.fromiter(map(attrgetter("nbytes"), data), np.int64, len(data))
        if not addresses.all() or (lengths != self._sizes[rows]).any():
            return False
        if self.has_checksums:
            spans = zip(addresses.tolist(), (addresses + lengths).tolist(), strict=True)
            digests = [xxhash.xxh3_64_intdigest(_MEMORY[start:stop]) for start, stop in spans]
            self.digests[rows] = np.array(digests, dtype=np.uint64)
        files.put_memory(addresses, lengths)
        return True

    def _write_each(
        self, rows: Int64s, data: Sequence[object], files: DataFiles, most_bytes: int
    ) -> None:
        """Write rows one by one, the first of which have given their data already."""
        digests: list[int] = []
        given = chain(data, map(self._data_of, rows[len(data) :].tolist()))
        left = zip(rows.tolist(), given, strict=True)
        for row, own in left:
            if self._is_object[row]:
                digests.append(self._put_object(row, own, files))
                continue
            assert isinstance(own, torch.Tensor)
            array = _in_place(own)
            if array is None:
                self._write_copies(row, own, left, files, digests, most_bytes)
                break
            digests.append(self._put(row, array, files))
        self.digests[rows] = np.array(digests, dtype=np.uint64)

    def _put_object(self, row: int, data: object, files: DataFiles) -> int:
        value = serialize(data, f"the ShardedObject {self._table.key(row)!r}")
        files.put(value, len(value), 0)
        return checksum_of_bytes(value)

    def _put(self, row: int, array: Array, files: DataFiles) -> int:
        """Add a chunk and give its checksum."""
        size, is_edge = array.nbytes, self._is_edge[row]
        if size >= LARGE_BYTES and not is_edge:
            digest = xxhash.xxh3_64() if self.has_checksums else None
            files.put_large(array, size, digest)
            return 0 if digest is None else digest.intdigest()
        checksum = xxhash.xxh3_64_intdigest(array) if self.has_checksums else 0  # type: ignore[arg-type]
        if is_edge:
            array = self._padded(row, array)
        if array.nbytes >= LARGE_BYTES:
            files.put_large(array, size, None)
        else:
            files.put(array, array.nbytes, size)
        return checksum

    def _write_copies(
        self,
        first: int,
        data: torch.Tensor,
        left: Iterator[tuple[int, object]],
        files: DataFiles,
        digests: list[int],
        most_bytes: int,
    ) -> None:
        """Write the first of some rows that is not in place, and those that are left.

        Of tensors on GPUs the next block is copied while one is written.
        """
        asked: deque[tuple[int, object]] = deque()

        def tensors() -> Iterator[torch.Tensor]:
            asked.append((first, data))
            yield data
            for row, given in left:
                asked.append((row, given))
                yield given if isinstance(given, torch.Tensor) else torch.empty(0)

        copies = HostBlocks(most_bytes, files.flush).of(tensors())
        for _, numbered in groupby(copies, key=itemgetter(0)):
            row, given = asked.popleft()
            blocks = (block for _, block in numbered)
            if self._is_object[row]:
                next(blocks)
                digests.append(self._put_object(row, given, files))
                continue
            assert isinstance(given, torch.Tensor)
            if not is_on_gpu(given) or given.nbytes < LARGE_BYTES or self._is_edge[row]:
                array = _together(given, blocks)
                digests.append(self._put(row, array, files))
                continue
            digest = xxhash.xxh3_64() if self.has_checksums else None
            files.begin_large(given.nbytes)
            for block in blocks:
                files.put_block(_contiguous(block), block.nbytes, digest)
            digests.append(0 if digest is None else digest.intdigest())

    def _padded(self, row: int, array: Array) -> Array:
        """A chunk at the edge of a tensor in its full size."""
        chunk = self._index.chunk_shape(self._table.key(row))
        assert chunk is not None
        whole = np.zeros(tuple(chunk), dtype=array.dtype)
        whole[tuple(map(slice, array.shape))] = array
        return whole


def _together(data: torch.Tensor, blocks: Iterator[torch.Tensor]) -> Array:
    """The bits of a tensor that comes in blocks of rows; in the memory of the only block."""
    first = _contiguous(next(blocks))
    if first.nbytes == data.nbytes:
        return first.reshape(tuple(data.shape))
    whole = np.empty(tuple(data.shape), dtype=first.dtype)
    flat, start = whole.reshape(-1), 0
    for part in chain([first], map(_contiguous, blocks)):
        flat[start : start + part.size] = part.reshape(-1)
        start += part.size
    return whole


def _in_place(data: torch.Tensor) -> Array | None:
    """The bits of a tensor in C order; None if they must be copied from elsewhere first."""
    if data.requires_grad:
        data = data.detach()
    return dtypes.fillable(data.contiguous(), data.dtype)


def _contiguous(data: torch.Tensor) -> Array:
    """The bits of a tensor on the CPU in C order, in its own memory where that is possible."""
    array = dtypes.as_numpy(data.detach().resolve_conj().resolve_neg().contiguous())
    # The memory of a dtype that numpy does not have itself can only be handed on as integers.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


def _edges(table: ShardTable, index: Index) -> npt.NDArray[np.bool_]:
    """Which rows are chunks that stick out of their tensor."""
    number = index.rows_of(table.names)[table.keys]
    is_edge = number >= 0
    if is_edge.any():
        full = index.chunk_shapes.prod(axis=1)[number]
        is_edge &= index.has_grid[number] & (table.shapes.prod(axis=1) < full)
    return is_edge
