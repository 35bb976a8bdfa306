"""Fills the rows of a load plan from chunks, in memory or in files."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.filesystem.ranged_reads import OpenFile, ReadLimits
from dist_checkpointing.format.geometry import Window
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.tensor_memory import DType
from dist_checkpointing.planning import LoadPlan, LoadPlanner, ReadItem, ReadTable
from dist_checkpointing.planning.load_plan import contiguous_ranges
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.storage.staging import DeviceBlocks, is_on_gpu
from dist_checkpointing.strategies.windows import copy_window, read_scattered, read_window

Array = npt.NDArray[Any]

_PART_BYTES = 2**22
"""At most so much of what cannot be filled in place is handed to a planner at a time."""


class Filler:
    """Fills the rows of a plan from chunks.

    ``table`` has the same rows where chunks are stored in another shape than the plan says.
    """

    def __init__(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        index: Index,
        limits: ReadLimits,
        *,
        table: ReadTable | None = None,
    ) -> None:
        table = plan.table if table is None else table
        self.table = table
        self._planner = planner
        self._destinations = planner.destinations(plan)
        self._most_bytes = limits.most_bytes
        self._maps_files = limits.maps_files
        self._of_thread = threading.local()
        numbers, self._types = index.dtypes_of(table.names)
        self._torch_types = [None if dtype is None else dtype.torch for dtype in self._types]
        self._type_of: Int64s = numbers[table.keys]
        items = index.itemsizes_of(table.names)[table.keys]
        starts, is_run = contiguous_ranges(
            table.storage_starts, table.storage_shapes, table.storage_boxes, table.lengths
        )
        self._starts = np.where(is_run, starts * items, -1)
        self.num_bytes: Int64s = table.num_elements * items
        addresses = self._destinations.addresses(self._torch_types, self._type_of)
        if addresses is not None:
            addresses[~is_run] = -1
        self._addresses = addresses

    def dtype(self, row: int) -> DType:
        """Dtype of a row, as stored."""
        dtype = self._types[int(self._type_of[row])]
        assert dtype is not None
        return dtype

    def fill(self, row: int, chunk: Array) -> int:
        """Fill a row from its chunk, whose bytes are in memory; returns the bytes of the row."""
        self._fill(row, chunk, 0, chunk.nbytes)
        return int(self.num_bytes[row])

    def fill_run(self, rows: Int64s, starts: Int64s, sizes: Int64s, block: Array) -> int:
        """Fill rows whose chunks lie in one block of memory; returns the bytes of the rows."""
        for row, start, size in zip(rows.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            self._fill(row, block, start, size)
        return int(self.num_bytes[rows].sum())

    def _fill(self, row: int, block: Array, start: int, size: int) -> None:
        destination, num_bytes = self._destinations.acquire(row), int(self.num_bytes[row])
        begin = int(self._starts[row])
        if (
            begin >= 0
            and begin + num_bytes <= size
            and destination.dtype is self._torch_types[int(self._type_of[row])]
            and tensor_memory.is_plain_memory(destination)
            and destination.nbytes == num_bytes
        ):
            source = block.ctypes.data + start + begin
            ctypes.memmove(destination.data_ptr(), source, num_bytes)
            self._destinations.filled(row, destination)
        else:
            self._copy(row, block[start : start + size], destination)

    def read_run(self, rows: Int64s, file: OpenFile, starts: Int64s, sizes: Int64s) -> bool:
        """Fill rows from chunks that follow each other in a long enough file, if that pays."""
        if self._addresses is None or file.descriptor < 0:
            return False
        addresses, begins, counts = (
            c[rows] for c in (self._addresses, self._starts, self.num_bytes)
        )
        if (addresses < 0).any() or (begins + counts > sizes).any():
            return False
        return read_scattered(file.descriptor, starts + begins, counts, addresses)

    def _copy(self, row: int, chunk: Array, destination: torch.Tensor) -> None:
        dtype = self.dtype(row)
        values = chunk.view(dtype.bits)
        target = tensor_memory.fillable(destination, dtype.torch)
        if target is None:
            self._staged(row, destination, _PART_BYTES, partial(copy_window, values))
        else:
            copy_window(values, self.table.storage(row), target)
            self._destinations.filled(row, destination)

    def read(self, row: int, file: OpenFile, start: int) -> int:
        """Fill a row from its chunk in a long enough file; returns the bytes of the row."""
        destination, dtype = self._destinations.acquire(row), self.dtype(row)
        target = tensor_memory.fillable(destination, dtype.torch)
        # What is staged may have to be gathered from rows that are read whole: both need memory.
        most_bytes = self._most_bytes if target is not None else max(1, self._most_bytes // 2)
        most_copied = None if self._maps_files else most_bytes

        def read_part(window: Window, staged: Array) -> None:
            read_window(file, start, window, staged, most_copied)

        if target is None:
            self._staged(row, destination, most_bytes, read_part)
        elif self._starts[row] >= 0 and target.flags.c_contiguous:
            file.read_into(target, start + int(self._starts[row]))
            self._destinations.filled(row, destination)
        else:
            read_part(self.table.storage(row), target)
            self._destinations.filled(row, destination)
        return int(self.num_bytes[row])

    def _staged(
        self,
        row: int,
        destination: torch.Tensor,
        most_bytes: int,
        read: Callable[[Window, Array], None],
    ) -> None:
        item = replace(self.table.item(row), storage=self.table.storage(row))
        dtype = self.dtype(row)
        if not is_on_gpu(destination) or not self._destinations.is_own_memory:
            apply_staged(item, dtype, self._planner, most_bytes, read)
            return
        blocks: DeviceBlocks | None = getattr(self._of_thread, "blocks", None)
        if blocks is None:
            blocks = self._of_thread.blocks = DeviceBlocks(max(1, self._most_bytes // 2))
        parts = list(item.parts(max(1, blocks.block_bytes // dtype.itemsize)))

        def read_into(part: ReadItem, block: torch.Tensor) -> None:
            read(part.storage, tensor_memory.as_numpy(block))

        work = [(self._planner.acquire_tensor(part), partial(read_into, part)) for part in parts]
        blocks.fill(work, dtype.torch)


def apply_staged(
    item: ReadItem,
    dtype: DType,
    planner: LoadPlanner,
    most_bytes: int,
    read: Callable[[Window, Array], None],
) -> None:
    """Read what cannot be filled in place, part by part, and hand it to the planner."""
    for part in item.parts(max(1, most_bytes // dtype.itemsize)):
        staged = np.empty(part.lengths, dtype=dtype.bits)
        read(part.storage, staged)
        planner.apply_tensor(part, tensor_memory.as_tensor(staged, dtype.torch))
