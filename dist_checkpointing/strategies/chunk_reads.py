"""Rows of a load plan filled from uncompressed chunks: whole, in runs, in strided windows, in
place.

Only what is wanted of a chunk is read. Small chunks that lie close together share one read, large
ones are read by several threads, and a strided part is taken out of a mapped file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import (
    FolderReads,
    OpenFile,
    ReadLimits,
    WrongSizeError,
    is_cached,
    open_file,
    pread,
)
from dist_checkpointing.format.geometry import Box, Ints, Window, ravel_offset
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.tensor_memory import DType
from dist_checkpointing.planning import Destinations, LoadPlan, LoadPlanner, ReadItem, ReadTable
from dist_checkpointing.planning.load_plan import contiguous_ranges
from dist_checkpointing.planning.shard_table import Columns, Int64s
from dist_checkpointing.storage.staging import DeviceBlocks, is_on_gpu
from dist_checkpointing.threads import in_threads, paused_collector

_MOST_BUFFERS: Final = 1024
"""IOV_MAX of Linux and macOS."""

_MOST_SIZES: Final = 64
"""A size of buffers costs as much as a hundred of them, because it is a type."""
_LEAST_A_READ: Final = 8


def read_scattered(descriptor: int, starts: Int64s, sizes: Int64s, addresses: Int64s) -> bool:
    """Read values of a file, in its order, to addresses; False if they are too scattered.

    Raises:
        EOFError: If the file ends before.
    """
    is_first = np.r_[True, starts[1:] != starts[:-1] + sizes[:-1]]
    kinds = np.unique(sizes).tolist()
    if len(kinds) > _MOST_SIZES or is_first.sum() > 1 + len(starts) // _LEAST_A_READ:
        return False
    makers = {size: (ctypes.c_ubyte * size).from_address for size in kinds}
    is_first[::_MOST_BUFFERS] = True
    places, lengths = addresses.tolist(), sizes.tolist()
    for begin, end in itertools.pairwise([*np.flatnonzero(is_first).tolist(), len(starts)]):
        own = zip(lengths[begin:end], places[begin:end], strict=True)
        buffers = [makers[size](address) for size, address in own]
        position = int(starts[begin])
        if os.preadv(descriptor, buffers, position) == sizes[begin:end].sum():
            continue
        for array in (np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers):
            pread(descriptor, array, position)
            position += len(array)
    return True


Array = npt.NDArray[Any]
_SMALL_RUN_BYTES = 2**12

_MOST_GAP_BYTES = 2**14
"""Reading over so much between small runs takes as long as one more ``preadv`` (1.1 to 1.5 us from
the page cache). On a network file system a request takes far longer, but ``WILLNEED`` lets many be
under way at a time."""

_MOST_MAPPED_GAP_BYTES = 2**16
"""A page fault reads about so much around the page: between runs that lie further apart, a mapped
file would be read from the disk in vain."""

_MOST_CACHED_GAP_BYTES = 2**19
"""Of a file in the page cache so much is mapped in less time than a ``preadv`` takes."""

_MOST_SINGLE_BYTES = 2**20
_HUGE_PAGE_BYTES = 2**21
_RUNS_AHEAD = 256


def read_window(
    file: OpenFile, start: int, window: Window, target: Array, most_copied: int | None
) -> None:
    """Read a window of raw values out of an open file, in which they begin at byte ``start``.

    The target may have any strides, and a dtype that numpy itself knows. What cannot be read in
    place takes at most ``most_copied`` bytes of memory; if that is None, the file is mapped.

    Raises:
        EOFError: if the file has become shorter.
    """
    run, itemsize = window.contiguous_range(), target.itemsize
    if run is not None and target.flags.c_contiguous:
        file.read_into(target, start + run[0] * itemsize)
        return
    maps_files, lengths = most_copied is None, window.box.shape
    axes = axes_apart(window, itemsize, maps_files=maps_files, most_gap=file.most_gap)
    positions = (start + run_positions(window, axes, itemsize)).tolist()
    strides = _strides(window, itemsize)
    parts = target[..., np.newaxis]  # so that a part is an array even if it is one element
    places = zip(np.ndindex(*lengths[:axes]), positions, strict=True)
    num_bytes = math.prod(lengths[axes:]) * itemsize
    are_runs = num_bytes == span_bytes(window, axes, itemsize)
    if not axes or not are_runs or not parts[(0,) * axes].flags.c_contiguous:
        for index, position in places:
            part = parts[index][..., 0]
            if most_copied is None:
                _copy_mapped(file.descriptor, position, strides[axes:], part)
            else:
                _copy_blocks(file, position, strides[axes:], part, most_copied)
        return
    # Each part is one run, read to where it belongs.
    gap_bytes = span_bytes(window, 0, itemsize) // len(positions) - num_bytes
    if (
        maps_files
        and gap_bytes <= _MOST_CACHED_GAP_BYTES
        and is_cached(file.descriptor, parts[(-1,) * axes], positions[-1])
        and is_cached(file.descriptor, parts[(0,) * axes], positions[0])
    ):
        _copy_mapped(file.descriptor, positions[0], strides, target, reads_around=False)
        return
    while batch := list(itertools.islice(places, _RUNS_AHEAD)):
        file.read_runs([(parts[index], position) for index, position in batch])


def chunk_with(tensor: StoredTensor, box: Box) -> tuple[Ints, Box] | None:
    """Index of the chunk in which all of a box lies, and the box in elements of that chunk."""
    if tensor.chunk_shape is None or 0 in box.shape:
        return None
    index, offset = [], []
    for start, extent, length in zip(box.offset, box.shape, tensor.chunk_shape, strict=True):
        number, first = divmod(start, length)
        if first + extent > length:
            return None
        index.append(number)
        offset.append(first)
    return tuple(index), Box(tuple(offset), box.shape)


def read_single(
    files: FolderReads,
    name: str,
    start: int,
    window: Window,
    dtype: DType,
    memory: Callable[..., torch.Tensor],
    *,
    is_all: bool = False,
) -> torch.Tensor | None:
    """A window of raw values that begin at a byte of a file, in memory that ``memory`` makes.

    The file ends with them if they are all of it. None where several threads take less time, and
    for whatever is wrong: a plan names that.
    """
    most_read = num_bytes = window.array_size * dtype.itemsize
    if num_bytes > _MOST_SINGLE_BYTES and window.contiguous_range() is not None:
        most_read = window.box.num_elements * dtype.itemsize
    if most_read > _MOST_SINGLE_BYTES and files.limits.threads > 1:
        return None
    part = memory(window.box.shape, dtype=dtype.torch)
    target = tensor_memory.fillable(part, part.dtype)
    assert target is not None
    try:
        with files.open(name) as file:
            file.require(start + num_bytes, is_all=is_all)
            read_window(file, start, window, target, num_bytes)
    except (FileNotFoundError, NotADirectoryError, EOFError):
        return None
    return part


def axes_apart(
    window: Window, itemsize: int, *, maps_files: bool, most_gap: int | None = None
) -> int:
    """Number of leading axes of a window in a file along which parts are read one by one, each from
    its first element to its last.

    What is read of a file in buffers is at most 1.1 times of what is wanted where the contiguous
    runs have 4 KiB or more, and at most 16 KiB more for each run of fewer bytes.
    """
    shape, box, strides = window.shape, window.box.shape, _strides(window, itemsize)
    run = next((a for a in reversed(range(len(box))) if box[a] != shape[a]), 0)
    run_bytes = math.prod(box[run:]) * itemsize
    if most_gap is None and maps_files:
        most_gap = _MOST_MAPPED_GAP_BYTES
    elif most_gap is None:
        most_gap = _MOST_GAP_BYTES if run_bytes < _SMALL_RUN_BYTES else run_bytes // 10
    for axes in range(run):
        runs = math.prod(box[axes:run])
        span = _strided_bytes(box[axes:], strides[axes:], itemsize)
        if span - runs * run_bytes <= runs * most_gap:
            return axes
    return run


def run_positions(window: Window, axes: int, itemsize: int) -> Int64s:
    """First byte of the part of a window at each index of its leading axes, in C order."""
    box = window.box
    steps = zip(box.shape[:axes], _strides(window, itemsize), strict=False)
    first = (window.start + ravel_offset(box.offset, window.shape)) * itemsize
    return np.ravel(sum(np.ix_(*(np.arange(n) * step for n, step in steps)), first))


def span_bytes(window: Window, axes: int, itemsize: int) -> int:
    """Bytes from the first element to the last at one index of the leading axes of a window."""
    return _strided_bytes(window.box.shape[axes:], _strides(window, itemsize)[axes:], itemsize)


def _strides(window: Window, itemsize: int) -> Ints:
    """Bytes between neighbours along each axis of the array that a window is a part of."""
    return tuple(itemsize * math.prod(window.shape[a + 1 :]) for a in range(len(window.shape)))


def _strided_bytes(lengths: Ints, strides: Ints, itemsize: int) -> int:
    """Bytes from the first element to the last."""
    steps = zip(lengths, strides, strict=True)
    return itemsize + sum((extent - 1) * step for extent, step in steps)


def _copy_mapped(
    descriptor: int, first: int, strides: Ints, target: Array, *, reads_around: bool = True
) -> None:
    """Copy elements out of a mapped file, reading around them from the disk or not."""
    stop = first + _strided_bytes(target.shape, strides, target.itemsize)
    # Linux maps a huge page of its cache at once, but only if all of it may be seen.
    aligned = first - first % _HUGE_PAGE_BYTES
    end = min(-(-stop // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, os.fstat(descriptor).st_size)
    if end < stop:
        raise EOFError("the file ended early")
    mapped = mmap.mmap(descriptor, end - aligned, access=mmap.ACCESS_READ, offset=aligned)
    if not reads_around:
        mapped.madvise(mmap.MADV_RANDOM)
    target[...] = np.ndarray(target.shape, target.dtype, mapped, first - aligned, strides)
    # The array that looked into it is gone, so this cannot pull memory from under anybody.
    mapped.close()


def _copy_blocks(file: OpenFile, first: int, strides: Ints, target: Array, most_bytes: int) -> None:
    """Read whole blocks of rows and copy what is wanted of them."""
    num_bytes = _strided_bytes(target.shape, strides, target.itemsize)
    axis = next((axis for axis, extent in enumerate(target.shape) if extent > 1), None)
    if axis is None or num_bytes <= most_bytes:
        block = file.view(first, num_bytes)
        target[...] = np.ndarray(target.shape, target.dtype, block, 0, strides)
        return
    step = max(1, target.shape[axis] * most_bytes // num_bytes)
    for begin in range(0, target.shape[axis], step):
        part = target[(*(slice(None),) * axis, slice(begin, begin + step))]
        _copy_blocks(file, first + begin * strides[axis], strides, part, most_bytes)


_PART_BYTES = 2**23
"""At most half of this is handed to a planner at a time of what is in memory already."""


class Filler:
    """Fills the rows of a plan from chunks.

    ``table`` has the same rows where chunks are stored in another shape than the plan says.
    """

    def __init__(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        index: Index,
        files: FolderReads,
        *,
        table: ReadTable | None = None,
    ) -> None:
        table = plan.table if table is None else table
        self.table = table
        self._planner = planner
        self.destinations: Destinations = planner.destinations(plan)
        self._files = files
        self._most_bytes = files.limits.most_bytes
        self._of_thread = threading.local()
        numbers, self._types = index.dtypes_of(table.names)
        self._type_of: Int64s = numbers[table.keys]
        sizes = [0 if dtype is None else dtype.itemsize for dtype in self._types]
        items = np.array(sizes, dtype=np.int64)[self._type_of]
        starts, is_run = contiguous_ranges(
            table.storage_starts, table.storage_shapes, table.storage_boxes, table.lengths
        )
        self._starts = np.where(is_run, starts * items, -1)
        self.num_bytes: Int64s = table.num_elements * items
        torch_types = [None if dtype is None else dtype.torch for dtype in self._types]
        addresses = self.destinations.addresses(torch_types, self._type_of)
        # Of what is a run both in its chunk and in memory.
        self._addresses = np.where(is_run, -1 if addresses is None else addresses, -1)

    def dtype(self, row: int) -> DType:
        """Dtype of a row, as stored."""
        dtype = self._types[int(self._type_of[row])]
        assert dtype is not None
        return dtype

    def fill(self, row: int, block: Array, start: int = 0, size: int | None = None) -> int:
        """Fill a row from its chunk, some bytes in memory; returns the bytes of the row."""
        size = block.nbytes if size is None else size
        address, begin = int(self._addresses[row]), int(self._starts[row])
        num_bytes = int(self.num_bytes[row])
        if address < 0 or begin + num_bytes > size:
            return self._read(row, block[start : start + size], 0, _PART_BYTES)
        ctypes.memmove(address, block.ctypes.data + start + begin, num_bytes)
        return num_bytes

    def read_run(self, rows: Int64s, file: OpenFile, starts: Int64s, sizes: Int64s) -> bool:
        """Fill rows from chunks that follow each other in a long enough file, if that pays."""
        addresses, begins, counts = (
            c[rows] for c in (self._addresses, self._starts, self.num_bytes)
        )
        if file.descriptor < 0 or (addresses < 0).any() or (begins + counts > sizes).any():
            return False
        return read_scattered(file.descriptor, starts + begins, counts, addresses)

    def read(self, row: int, file: OpenFile, start: int) -> int:
        """Fill a row from its chunk in a long enough file; returns the bytes of the row."""
        return self._read(row, file, start, self._most_bytes)

    def _read(self, row: int, source: OpenFile | Array, start: int, most_bytes: int) -> int:
        """Read a row in place; or part by part, and hand these to the planner."""
        destination, dtype = self.destinations.acquire(row), self.dtype(row)
        target = tensor_memory.fillable(destination.detach(), dtype.torch)
        begin, num_bytes = int(self._starts[row]), int(self.num_bytes[row])
        if target is None:  # what is staged may have to be gathered from rows: both need memory
            most_bytes = max(1, most_bytes // 2)

        def read(window: Window, values: Array) -> None:
            if isinstance(source, OpenFile):
                most_copied = None if self._files.maps_files else most_bytes
                read_window(source, start, window, values, most_copied)
            else:
                array = source.view(dtype.bits)[window.start : window.start + window.array_size]
                values[...] = array.reshape(window.shape)[window.box.slices()]

        if target is not None:
            if begin < 0 or not target.flags.c_contiguous:
                read(self.table.storage(row), target)
            elif isinstance(source, OpenFile):
                source.read_into(target, start + begin)
            else:
                run = source[begin : begin + num_bytes].view(dtype.bits)
                target[...] = run.reshape(target.shape)
            self.destinations.filled(row, destination)
            return num_bytes
        item = replace(self.table.item(row), storage=self.table.storage(row))
        if not is_on_gpu(destination) or not self.destinations.is_own_memory:
            for part in item.parts(max(1, most_bytes // dtype.itemsize)):
                staged = np.empty(part.lengths, dtype=dtype.bits)
                read(part.storage, staged)
                self._planner.apply_tensor(part, tensor_memory.as_tensor(staged, dtype.torch))
            return num_bytes
        blocks: DeviceBlocks | None = getattr(self._of_thread, "blocks", None)
        if blocks is None:
            blocks = self._of_thread.blocks = DeviceBlocks(max(1, self._most_bytes // 2))
        parts = list(item.parts(max(1, blocks.block_bytes // dtype.itemsize)))

        def read_into(part: ReadItem, block: torch.Tensor) -> None:
            read(part.storage, tensor_memory.as_numpy(block))

        work = [(self._planner.acquire_tensor(part), partial(read_into, part)) for part in parts]
        blocks.fill(work, dtype.torch)
        return num_bytes


SMALL_BYTES = 2**18


class Extent(NamedTuple):
    """Where a chunk lies in a file."""

    folder: Location
    name: str
    offset: int
    num_bytes: int

    @property
    def path(self) -> str:
        """Path or URL of the file, for messages."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkReads(Columns):
    """Where the chunks of some rows of a plan lie, as columns.

    Files are relative to the checkpoint; ``fill_files`` says that each holds one chunk and nothing
    else.
    """

    rows: Int64s
    names: Sequence[str]
    files: Int64s
    offsets: Int64s
    num_bytes: Int64s
    fill_files: bool = False

    def __len__(self) -> int:
        return len(self.rows)


def read_chunks(
    reads: ChunkReads, filler: Filler, below: FolderReads, *, report: Callable[[int], None]
) -> None:
    """Fill the rows of all reads.

    Raises:
        CorruptCheckpointError: if a file is missing or too short.
    """
    limits = below.limits
    reads = reads.take(np.lexsort((reads.offsets, reads.files)))
    starts = _run_starts(reads, filler.num_bytes[reads.rows], limits).tolist()
    bounds = [*itertools.pairwise([*starts, len(reads)])]
    of_thread = threading.local()

    def opened(position: int) -> AbstractContextManager[OpenFile]:
        file, offset, length = (
            int(column[position]) for column in (reads.files, reads.offsets, reads.num_bytes)
        )
        extent = Extent(below.folder, reads.names[file], offset, length)
        key = filler.table.key(int(reads.rows[position]))
        return opened_extent(extent, key, below, is_all=reads.fill_files)

    def read_run(bound: Sequence[int]) -> None:
        if not hasattr(of_thread, "scratch"):
            of_thread.scratch = np.empty(limits.run_bytes + limits.small_bytes, dtype=np.uint8)
        first, end = bound
        rows, starts, sizes = (
            column[first:end] for column in (reads.rows, reads.offsets, reads.num_bytes)
        )
        begin, last = int(starts[0]), int((starts + sizes).argmax())
        with opened(first + last) as file:
            if filler.read_run(rows, file, starts, sizes):
                report(int(filler.num_bytes[rows].sum()))
                return
            num_bytes = int(starts[last] + sizes[last]) - begin
            block = file.view(begin, num_bytes, of_thread.scratch)
        chunks = zip(rows.tolist(), (starts - begin).tolist(), sizes.tolist(), strict=True)
        report(sum(filler.fill(row, block, start, size) for row, start, size in chunks))

    def read_one(position: int) -> None:
        with opened(position) as file:
            report(filler.read(int(reads.rows[position]), file, int(reads.offsets[position])))

    if runs := [(first, end) for first, end in bounds if end > first + 1]:
        with paused_collector():
            in_threads(read_run, runs, limits.run_threads)
    singles = [first for first, end in bounds if end == first + 1]
    in_threads(read_one, singles, limits.threads)


def _run_starts(reads: ChunkReads, wanted_bytes: Int64s, limits: ReadLimits) -> Int64s:
    """First position of each run of reads, which are sorted: small neighbours are read together."""
    if len(reads) < 2:
        return np.arange(len(reads))
    # Small chunks, nearly all of them wanted, are read whole, with their neighbours.
    most_unwanted = np.maximum(limits.most_unwanted, wanted_bytes // 10)
    small = reads.num_bytes <= limits.small_bytes
    small &= reads.num_bytes - wanted_bytes <= most_unwanted
    gaps = np.diff(reads.offsets) - reads.num_bytes[:-1]
    joined = (np.diff(reads.files) == 0) & (gaps <= limits.gap_bytes) & small[1:] & small[:-1]
    apart = np.r_[True, ~joined]
    first = reads.offsets[np.maximum.accumulate(np.where(apart, np.arange(len(reads)), 0))]
    block = (reads.offsets - first) // limits.run_bytes
    apart[1:] |= block[1:] != block[:-1]
    return np.flatnonzero(apart)


def read_extent(extent: Extent, key: str) -> bytes:
    """All bytes of an extent.

    Raises:
        CorruptCheckpointError: if the file is missing or too short; names ``key``.
    """
    with opened_extent(extent, key) as file:
        return file.view(extent.offset, extent.num_bytes).tobytes()


@contextmanager
def opened_extent(
    extent: Extent, key: str, below: FolderReads | None = None, *, is_all: bool = False
) -> Iterator[OpenFile]:
    """The file of an extent, which ends with it if that ``is_all`` of it; errors as those of
    ``read_extent``.
    """
    folder, name, offset, num_bytes = extent
    path, end = extent.path, offset + num_bytes
    try:
        with open_file(folder, name) if below is None else below.open(name) as file:
            file.require(end, is_all=is_all)
            yield file
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(path, key, "a chunk is missing") from error
    except WrongSizeError as error:
        problem = (
            "a chunk has the wrong size" if is_all else "the file that holds a chunk ends before it"
        )
        details = {"expected": f"{end} bytes", "found": error.found}
        raise damaged(path, key, problem, **details) from error
    except EOFError as error:
        raise damaged(path, key, str(error)) from error


def damaged(path: str, key: str, problem: str, **details: Any) -> CorruptCheckpointError:
    """The error about a stored value that is lost or not what it must be."""
    finding = Finding(problem, key, path=path, **details)
    return CorruptCheckpointError("the checkpoint is damaged", [finding])
