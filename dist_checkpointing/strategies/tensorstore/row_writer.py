"""Writes rows of a plan: small tensors together, from where they are; others one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.format.checksums import NO_DIGEST, Digest, columns_of, digest_of, digests_at
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.staging import HostBlocks, is_on_gpu
from dist_checkpointing.strategies.base_parts import PlanDigests
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.tensorstore.data_files import (
    LARGE_BYTES,
    MOST_PENDING_BYTES,
    Array,
    DataFiles,
)

_MOST_TOGETHER = 8192


class RowWriter:
    """Writes the values of rows of a plan to data files.

    Args:
        plan: what this rank writes.
        planner: answers for its data.
        known: digests of its rows, as far as they have been made; gets the others.
        has_checksums: whether digests are wanted.

    Attributes:
        has_checksums: Whether digests are wanted.
        digests: ``[rows, 2]``, upper halves and checksums of the rows that were written, and of
            those that were known.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        known: PlanDigests,
        *,
        has_checksums: bool,
    ) -> None:
        table, index = plan.table, plan.index
        assert index is not None
        self.has_checksums = has_checksums
        self.digests = known.columns
        # What a planner makes once more may be something else.
        self._known = None if planner.makes_data or not known.known.any() else known
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
        if not tensor_memory.are_plain_memory(data):
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
        self.digests[rows] = columns_of(digests)

    def _put_object(self, row: int, data: object, files: DataFiles) -> bytes:
        value = serialize(data, f"the ShardedObject {self._table.key(row)!r}")
        files.put(value, len(value), 0)
        return digest_of(value, len(value))

    def _put(self, row: int, array: Array, files: DataFiles) -> bytes:
        """Add a chunk and give its digest."""
        size, is_edge = array.nbytes, self._is_edge[row]
        known = NO_DIGEST if not self.has_checksums else None
        if known is None and self._known is not None:
            known = self._known.digest(row)
        if size >= LARGE_BYTES and not is_edge:
            if known is not None:
                files.put_large(array, size, None)
                return known
            digest = Digest()
            files.put_large(array, size, digest)
            return digest.digest()
        checksum = known or digest_of(array, size)
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
        digests: list[bytes],
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
            digest = Digest() if self.has_checksums else None
            files.begin_large(given.nbytes)
            for block in blocks:
                files.put_block(_contiguous(block), block.nbytes, digest)
            digests.append(NO_DIGEST if digest is None else digest.digest())

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
    return tensor_memory.fillable(data.contiguous(), data.dtype)


def _contiguous(data: torch.Tensor) -> Array:
    """The bits of a tensor on the CPU in C order, in its own memory where that is possible."""
    array = tensor_memory.as_numpy(data.detach().resolve_conj().resolve_neg().contiguous())
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
