"""Uncompressed chunks, read from wherever they lie in a file straight into the destination.

Only what is wanted of a chunk is read. Small chunks that lie close together share one read, large
ones are read by several threads, and a strided part is taken out of a mapped file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Box, Window, ravel_offset
from dist_checkpointing.planning import LoadPlanner, ReadItem
from dist_checkpointing.storage.options import StorageOptions

T = TypeVar("T")


R = TypeVar("R")


_BATCHES_PER_THREAD = 8


def in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int) -> list[R]:
    """``work`` done for all tasks, a few at a time; the first error ends it.

    Tasks go to the threads in batches: handing over one costs as much as writing a small file.
    """
    size = max(1, len(tasks) // (threads * _BATCHES_PER_THREAD))
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    with ThreadPoolExecutor(threads, thread_name_prefix="chunk-io") as pool:
        futures = [pool.submit(lambda b: [work(task) for task in b], batch) for batch in batches]
        try:
            return [result for future in futures for result in future.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


Array = npt.NDArray[Any]

SMALL_BYTES = 2**18
_RUN_BYTES = 2**22
_GAP_BYTES = 2**16
"""Reading over a gap of this size costs no more than another read."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a chunk lie.

    Attributes:
        path: of the file.
        offset: of the first byte.
        num_bytes: of the whole chunk.
        file_bytes: size that the file must have; None if it holds more than this chunk.
    """

    path: str
    offset: int
    num_bytes: int
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A part of a chunk, and the item that wants it."""

    item: ReadItem
    extent: Extent
    dtype: DType

    @property
    def key(self) -> str:
        """Of the tensor, for messages."""
        return self.item.storage_index.fqn


def read_chunks(
    reads: Sequence[ChunkRead],
    planner: LoadPlanner,
    options: StorageOptions,
    *,
    maps_files: bool,
    report: Callable[[int], None],
) -> None:
    """Fill every item.

    Args:
        reads: in any order.
        planner: answers for the destinations.
        options: how many threads, and how much memory for what cannot be read in place.
        maps_files: whether strided parts are read through a mapping.
        report: called with the number of bytes that have arrived since the last call.

    Raises:
        CorruptCheckpointError: if a file is missing or too short.
    """
    runs: list[list[ChunkRead]] = []
    single: list[ChunkRead] = []
    for run in _in_runs(sorted(reads, key=lambda read: (read.extent.path, read.extent.offset))):
        if len(run) > 1:
            runs.append(run)
        else:
            single += run
    # Many small copies are work for the interpreter: threads would only take turns.
    scratch = np.empty(_RUN_BYTES if runs else 0, dtype=np.uint8)
    for run in runs:
        with paused_collector():
            num_bytes = _read_run(run, planner, scratch)
        report(num_bytes)
    most = max(1, options.buffer_bytes // options.threads)

    def read_one(read: ChunkRead) -> None:
        report(_read_single(read, planner, maps_files=maps_files, most_bytes=most))

    in_threads(read_one, single, options.threads)


def _in_runs(reads: Sequence[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """The reads, those of small neighbours together."""
    run: list[ChunkRead] = []
    path, begin, end = "", 0, 0
    for read in reads:
        extent = read.extent
        stop = extent.offset + extent.num_bytes
        joins = (
            extent.path == path
            and stop - begin <= _RUN_BYTES
            and extent.offset - end <= _GAP_BYTES
            and extent.num_bytes <= SMALL_BYTES
        )
        if run and not joins:
            yield run
            run = []
        if not run:
            path, begin, end = extent.path, extent.offset, 0
            if extent.num_bytes > SMALL_BYTES:
                yield [read]
                continue
        run.append(read)
        end = max(end, stop)
    if run:
        yield run


def _read_run(run: Sequence[ChunkRead], planner: LoadPlanner, scratch: Array) -> int:
    begin = run[0].extent.offset
    end = max(read.extent.offset + read.extent.num_bytes for read in run)
    block: Any = scratch[: end - begin]
    with _opened(run[-1].extent, run[-1].key) as descriptor:
        _pread(descriptor, memoryview(block), begin)
    num_bytes = 0
    for read in run:
        start = read.extent.offset - begin
        values = block[start : start + read.extent.num_bytes].view(read.dtype.bits)
        num_bytes += fill(read.item, read.dtype, values, planner)
    return num_bytes


def fill(item: ReadItem, dtype: DType, values: Array, planner: LoadPlanner) -> int:
    """Fill an item from the values of its chunk, which is in memory already.

    Args:
        item: what to fill.
        dtype: of the values.
        values: 1-D, as ``dtype.bits``.
        planner: answers for the destination.

    Returns:
        How many bytes that were.
    """
    destination = planner.acquire_tensor(item)
    target = dtypes.fillable(destination, dtype.torch)
    if target is None:
        apply_staged(item, dtype, planner, _RUN_BYTES, partial(copy_window, values))
    else:
        copy_window(values, item.storage, target)
        planner.apply_tensor(item, destination)
    return item.dest.box.num_elements * dtype.itemsize


def apply_staged(
    item: ReadItem,
    dtype: DType,
    planner: LoadPlanner,
    most_bytes: int,
    read: Callable[[Window, Array], None],
) -> None:
    """Read what cannot be filled in place, part by part, and hand it to the planner.

    Args:
        item: what to read.
        dtype: as stored.
        planner: puts each part where it belongs.
        most_bytes: of a part.
        read: reads a window of the chunk into an array of the window's box shape.
    """
    for part in item.parts(max(1, most_bytes // dtype.itemsize)):
        staged = np.empty(part.lengths, dtype=dtype.bits)
        read(part.storage, staged)
        planner.apply_tensor(part, dtypes.as_tensor(staged, dtype.torch))


def copy_window(values: Array, window: Window, target: Array) -> None:
    """Copy a window of the values of a chunk, 1-D, to an array of the window's box shape."""
    part = values[window.start : window.start + window.array_size].reshape(window.shape)
    target[...] = part if window.box.shape == window.shape else part[window.box.slices()]


def _read_single(
    read: ChunkRead, planner: LoadPlanner, *, maps_files: bool, most_bytes: int
) -> int:
    item, dtype = read.item, read.dtype
    destination = planner.acquire_tensor(item)
    target = dtypes.fillable(destination, dtype.torch)
    # What is staged may have to be gathered from rows that are read whole: both need memory.
    most_bytes = most_bytes if target is not None else max(1, most_bytes // 2)
    most_copied = None if maps_files else most_bytes
    with _opened(read.extent, read.key) as descriptor:

        def read_part(window: Window, staged: Array) -> None:
            read_window(descriptor, read.extent.offset, window, staged, most_copied)

        if target is None:
            apply_staged(item, dtype, planner, most_bytes, read_part)
        else:
            read_part(item.storage, target)
            planner.apply_tensor(item, destination)
    return item.dest.box.num_elements * dtype.itemsize


def read_window(
    descriptor: int, start: int, window: Window, target: Array, most_copied: int | None
) -> None:
    """Read a window of raw values out of an open file, which must be long enough.

    Args:
        descriptor: of the file.
        start: of the values, in bytes.
        window: to read.
        target: an array of the window's box shape, any strides, whose dtype numpy itself knows.
        most_copied: bytes of memory for what cannot be read in place; None to map the file.

    Raises:
        EOFError: if the file has become shorter.
    """
    run = window.contiguous_range()
    if run is not None and target.flags.c_contiguous:
        view = memoryview(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        _pread(descriptor, view, start + run[0] * target.itemsize)
    elif most_copied is None:
        _copy_mapped(descriptor, start, window, target)
    else:
        _copy_blocks(descriptor, start, window, target, most_copied)


def _copy_mapped(descriptor: int, start: int, window: Window, target: Array) -> None:
    first, num_bytes = _span(window, target.itemsize)
    first += start
    aligned = first - first % mmap.ALLOCATIONGRANULARITY
    length = first - aligned + num_bytes
    mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=aligned)
    target[...] = _strided(mapped, first - aligned, window, target)
    # The array that looked into it is gone, so this cannot pull memory from under anybody.
    mapped.close()


def _copy_blocks(
    descriptor: int, start: int, window: Window, target: Array, most_bytes: int
) -> None:
    """Read whole blocks of rows and copy what is wanted of them."""
    first, num_bytes = _span(window, target.itemsize)
    rows = window.box.shape
    axis = next((a for a, extent in enumerate(rows) if extent > 1), None)
    if axis is None or num_bytes <= most_bytes:
        block = bytearray(num_bytes)
        _pread(descriptor, memoryview(block), start + first)
        target[...] = _strided(block, 0, window, target)
        return
    step = max(1, rows[axis] * most_bytes // num_bytes)
    for begin in range(0, rows[axis], step):
        extent = min(step, rows[axis] - begin)
        box = window.box
        offset = (*box.offset[:axis], box.offset[axis] + begin, *box.offset[axis + 1 :])
        part = Box(offset, (*rows[:axis], extent, *rows[axis + 1 :]))
        index = (*(slice(None),) * axis, slice(begin, begin + extent))
        inner = Window(window.start, window.shape, part)
        _copy_blocks(descriptor, start, inner, target[index], most_bytes)


def _span(window: Window, itemsize: int) -> tuple[int, int]:
    """First byte, and bytes from there to the last one, of a window with elements."""
    box = window.box
    last = tuple(stop - 1 for stop in box.stop)
    first = ravel_offset(box.offset, window.shape)
    count = ravel_offset(last, window.shape) - first + 1
    return (window.start + first) * itemsize, count * itemsize


def _strided(buffer: Any, offset: int, window: Window, like: Array) -> Array:
    """The window's box as an array over memory that begins with its first element."""
    itemsize = like.dtype.itemsize
    strides = [itemsize] * len(window.shape)
    for axis in reversed(range(len(strides) - 1)):
        strides[axis] = strides[axis + 1] * window.shape[axis + 1]
    return np.ndarray(window.box.shape, like.dtype, buffer, offset, tuple(strides))


def read_extent(extent: Extent, key: str) -> bytes:
    """All bytes of an extent.

    Raises:
        CorruptCheckpointError: if the file is missing or too short; names ``key``.
    """
    with _opened(extent, key) as descriptor:
        data = bytearray(extent.num_bytes)
        _pread(descriptor, memoryview(data), extent.offset)
    return bytes(data)


@contextmanager
def _opened(extent: Extent, key: str) -> Iterator[int]:
    try:
        descriptor = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _corrupt(extent, key, "a chunk is missing") from error
    try:
        # A mapped file that is too short would kill the process instead of raising.
        size = os.fstat(descriptor).st_size
        needed = extent.offset + extent.num_bytes
        if size < needed or extent.file_bytes not in (None, size):
            raise _corrupt(
                extent,
                key,
                "a chunk has the wrong size"
                if extent.file_bytes is not None
                else "the file that holds a chunk ends before it",
                expected=f"{needed} bytes",
                found=size,
            )
        try:
            yield descriptor
        except EOFError as error:
            raise _corrupt(extent, key, str(error)) from error
    finally:
        os.close(descriptor)


def _pread(descriptor: int, view: memoryview, position: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], position)
        if count == 0:
            raise EOFError("the file ended early")
        view, position = view[count:], position + count


def _corrupt(extent: Extent, key: str, problem: str, **details: Any) -> CorruptCheckpointError:
    finding = Finding(problem, key, path=extent.path, **details)
    return CorruptCheckpointError("the checkpoint is damaged", [finding])
