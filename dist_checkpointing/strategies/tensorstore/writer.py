"""Rows of a plan into data files: small tensors together, large ones block by block."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME,
    NO_DIGEST,
    Digest,
    columns_of,
    digest_of,
    digests_at,
)
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.index import INDEX_NAME, Index, write_index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Checksum
from dist_checkpointing.storage.staging import HostBlocks, is_on_gpu
from dist_checkpointing.strategies.base import PlannedSaveStrategy
from dist_checkpointing.strategies.data_files import (
    MOST_PENDING_BYTES,
    DataFiles,
    balanced,
    write_shares,
)
from dist_checkpointing.strategies.incremental import PlanDigests, share_parts
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.tensorstore import database
from dist_checkpointing.strategies.tensorstore.database import StoredValues
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Values
from dist_checkpointing.strategies.tensorstore.reader import TensorStoreReader
from dist_checkpointing.strategies.zarr_metadata import padded_chunk, row_keys
from dist_checkpointing.threads import paused_collector

LARGE_BYTES: Final = 2**20
"""Values below this are written many at a time."""
_MOST_TOGETHER: Final = 8192
_MOST_THREADS: Final = 2
_LEAST_BYTES_A_THREAD: Final = 64 * 2**20

Array = npt.NDArray[Any]


class RowWriter:
    """Writes the values of rows of a plan to data files.

    Attributes:
        has_checksums: Whether digests are wanted.
        digests: ``[rows, 2]``, upper halves and checksums of the rows that were written, and of
            those that were known.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, known: PlanDigests, *, has_checksums: bool
    ) -> None:
        assert plan.index is not None
        self._table, self._index = (table := plan.table), plan.index
        self.has_checksums = has_checksums
        self.digests: npt.NDArray[np.uint64] = known.columns
        # What a planner makes once more may be something else.
        self._known = None if planner.makes_data or not known.known.any() else known
        self._data_of = known.data_of
        is_object, is_edge = table.is_object, _edges(table, plan.index)
        self._is_object, self._is_edge = is_object.tolist(), is_edge.tolist()
        self._sizes = table.num_bytes
        self._is_simple = ~is_object & ~is_edge & (self._sizes < LARGE_BYTES)

    def write(self, rows: Int64s, files: DataFiles, most_bytes: int) -> None:
        """Write some rows, with so much memory for copies; several threads may do so."""
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
        ends = self._sizes[rows].cumsum()
        begin = 0
        changes = np.flatnonzero(is_simple[1:] != is_simple[:-1]) + 1
        for change in [*changes.tolist(), len(rows)]:
            while begin < change:
                end = change
                if is_simple[begin]:
                    limit = most_bytes + (int(ends[begin - 1]) if begin else 0)
                    room = int(ends.searchsorted(limit, side="right"))
                    end = min(change, begin + _MOST_TOGETHER, max(begin + 1, room))
                yield begin, end, bool(is_simple[begin])
                begin = end

    def _write_memory(self, rows: Int64s, data: Sequence[Any], files: DataFiles) -> bool:
        """Write tensors from where they are in memory, without a look at each; False if in vain."""
        if not all(map(tensor_memory.is_plain_memory, data)):
            return False
        addresses = np.fromiter(map(torch.Tensor.data_ptr, data), np.int64, len(data))
        lengths = np.fromiter(map(attrgetter("nbytes"), data), np.int64, len(data))
        if not addresses.all() or (lengths != self._sizes[rows]).any():
            return False
        if self.has_checksums:
            made = slice(None) if self._known is None else ~self._known.known[rows]
            self.digests[rows[made]] = digests_at(addresses[made], lengths[made])
        files.put_memory(addresses, lengths)
        return True

    def _write_each(
        self, rows: Int64s, data: Sequence[object], files: DataFiles, most_bytes: int
    ) -> None:
        """Write rows one by one, the first of which have given their data already."""
        digests: list[bytes] = []
        given = chain(data, map(self._data_of, rows[len(data) :].tolist()))
        numbered = zip(rows.tolist(), given, strict=True)
        for row, own, blocks in self._with_blocks(numbered, files, most_bytes):
            if self._is_object[row]:
                value = serialize(own, f"the ShardedObject {self._table.key(row)!r}")
                files.put(value, len(value), 0)
                digests.append(digest_of(value, len(value)))
                continue
            assert isinstance(own, torch.Tensor)
            if not is_on_gpu(own) or own.nbytes < LARGE_BYTES or self._is_edge[row]:
                digests.append(self._put(row, _together(own, blocks), files))
                continue
            digest = Digest() if self.has_checksums else None
            files.begin_large(own.nbytes)
            for block in blocks:
                files.put_block(_contiguous(block), block.nbytes, digest)
            digests.append(NO_DIGEST if digest is None else digest.digest())
        self.digests[rows] = columns_of(digests)

    def _with_blocks(
        self, rows: Iterator[tuple[int, Any]], files: DataFiles, most_bytes: int
    ) -> Iterator[tuple[int, Any, Iterator[torch.Tensor]]]:
        """Rows, their data, and blocks of it on the CPU; the data itself, if it is there.

        From the first tensor on a GPU on, the next block is copied while one is written.
        """
        asked: deque[tuple[int, Any]] = deque()

        def tensors() -> Iterator[torch.Tensor]:
            for row, own in chain([(first, data)], rows):
                asked.append((row, own))
                yield torch.empty(0) if self._is_object[row] else own

        for first, data in rows:
            if self._is_object[first] or not is_on_gpu(data):
                yield first, data, iter([data])
                continue
            copies = HostBlocks(most_bytes, files.flush).of(tensors())
            for _, blocks in groupby(copies, key=itemgetter(0)):
                row, own = asked.popleft()
                yield row, own, map(itemgetter(1), blocks)

    def _put(self, row: int, array: Array, files: DataFiles) -> bytes:
        """Add a chunk and give its digest."""
        size, is_edge = array.nbytes, self._is_edge[row]
        digest = None if self.has_checksums else NO_DIGEST
        if digest is None and self._known is not None:
            digest = self._known.digest(row)
        if digest is None and size >= LARGE_BYTES and not is_edge:
            hashed = Digest()
            files.put_large(array, size, hashed)
            return hashed.digest()
        digest = digest or digest_of(array, size)
        if is_edge:
            shape = self._index.chunk_shape(self._table.key(row))
            array = padded_chunk(array, tuple(shape or ()))
        if array.nbytes >= LARGE_BYTES:
            files.put_large(array, size, None)
        else:
            files.put(array, array.nbytes, size)
        return digest


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


def _contiguous(data: torch.Tensor) -> Array:
    """The bits of a tensor on the CPU in C order, in its own memory where that is possible."""
    array = tensor_memory.as_numpy(data.contiguous())
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


class TensorStoreWriter(StorageWriter):
    """Writes zarr v3 arrays and objects as one OCDBT database."""

    layout: RowBlockLayout = RowBlockLayout()
    shares_files: ClassVar[bool] = True
    uses_object_stores: ClassVar[bool] = True

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        return [INDEX_NAME, CHECKSUMS_NAME, *database.CREATED_NAMES]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        table, index = plan.table, plan.index
        assert index is not None
        if not len(table):
            return done([])
        known = PlanDigests(table, planner.data_of(plan), self.options)
        reused, steady = share_parts(
            self,
            TensorStoreReader,
            table,
            known,
            lambda base: database.values_in_base(base, table, index),
            is_alone=self.world_size == 1,
        )
        with paused_collector():
            keys = b"\0".join(row_keys(table, index))
            shares = list(self._shares(table, reused.rows, steady))
        most_pending = max(1, self.options.buffer_bytes // max(1, len(shares)))
        rows = RowWriter(plan, planner, known, has_checksums=self.options.checksum is Checksum.XXH3)

        def open_files(share: tuple[str, Int64s], report: Callable[[int], None]) -> DataFiles:
            return DataFiles(self.checkpoint_dir, share[0], self.options, most_pending, report)

        written = write_shares(
            shares,
            open_files,
            lambda share, files: rows.write(share[1], files, most_pending),
            self.report,
            min(_MOST_THREADS, self.options.threads),
        )
        extents, names = np.empty((3, len(table)), dtype=np.int64), list[str]()
        for (_, own), files in zip(shares, written, strict=True):
            extents[:, own] = np.array(files.extents).reshape(-1, 3).T
            extents[0, own] += len(names)
            names += files.names
        extents[:, reused.rows] = reused.extents.T
        extents[0, reused.rows] += len(names)
        names += [file.name for file in reused.files]
        results = WriteResults(
            table,
            extents[2],
            rows.digests[:, 1],
            None if rows.has_checksums else table.is_object,
            tuple(file for files in written for file in files.sealed),
            StoredValues(keys, Values(names, extents), reused.files),
            rows.digests[:, 0] if rows.has_checksums else None,
        )
        return done(results)  # type: ignore[arg-type]

    def _shares(
        self, table: ShardTable, reused: Int64s, steady: Int64s
    ) -> Iterator[tuple[str, Int64s]]:
        """How the names of data files begin, and the rows in them.

        Each is work for a thread: a data group, or several parts of it of about the same bytes.
        """
        # To drop an optimizer's tensors deletes their files; to delete keys would free nothing.
        # A removal keeps objects: they must not hold on to such files.
        of_optimizer = np.array([is_of_optimizer(name) for name in table.names])[table.keys]
        # What has not changed may stay so: in files of its own it can be shared the next time.
        group = np.where(table.is_object, 0, 2 * of_optimizer)
        group[steady] += 1
        group[reused] = -1
        sizes = table.num_bytes
        is_large = sizes >= LARGE_BYTES
        for kind in sorted({*group.tolist()} - {-1}):
            own, is_optimizer = group == kind, kind > 1
            small, large = np.flatnonzero(own & ~is_large), np.flatnonzero(own & is_large)
            count = min(_MOST_THREADS, self.options.threads // 2)
            count = max(1, min(count, int(sizes[large].sum()) // _LEAST_BYTES_A_THREAD))
            for number, rows in enumerate(balanced(large, sizes, count)):
                # Large values first: these begin at the beginning of a page more often.
                folder = f"{database.DATA_FOLDER}/{'optimizer' if is_optimizer else 'model'}"
                stem = f"{folder}/{self.rank}.{number}-{os.urandom(4).hex()}"
                yield stem, rows if number else np.concatenate([rows, small])

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> list[SealedFile]:
        stored = [result.storage_data for of_rank in results for result in of_rank]
        parts = [values for values in stored if isinstance(values, StoredValues)]
        durability, folder = self.options.durability, self.checkpoint_dir
        with paused_collector():
            keys, values = database.merged_values(parts, metadata)
            files_of_base: list[SealedFile] = []
            if self.base is not None:
                shared = {file.name: file for part in parts for file in part.shared}
                values, files_of_base = database.keep_shared(folder, values, shared, self.options)
            tree = database.write_tree(folder, keys, values, durability)
        return [*files_of_base, *tree, write_index(metadata, folder, durability)]


class TensorStoreSaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("tensorstore", 1).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", TensorStoreSaveShardedStrategy())
    """

    writer_type: ClassVar[type[TensorStoreWriter]] = TensorStoreWriter
    writes: ClassVar[tuple[str, int]] = ("tensorstore", 1)
    can_handle_sharded_objects = True
