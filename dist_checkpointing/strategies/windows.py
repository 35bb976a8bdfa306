"""Values copied out of memory or read out of a file: windows of them, and many small ones."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem.ranged_reads import OpenFile, pread
from dist_checkpointing.format.geometry import Box, Window, ravel_offset
from dist_checkpointing.planning.shard_table import Int64s

_MOST_BUFFERS: Final = 1024
"""IOV_MAX of Linux and macOS."""
_MOST_SIZES: Final = 64
_LEAST_A_READ: Final = 8


def buffers_of(sizes: Int64s) -> dict[int, Callable[[int], Any]] | None:
    """What makes a buffer of each size at an address; None for too many sizes.

    A size costs as much as a hundred buffers, because it is a type.
    """
    kinds = np.unique(sizes).tolist()
    if len(kinds) > _MOST_SIZES:
        return None
    return {size: (ctypes.c_ubyte * size).from_address for size in kinds}


def read_scattered(descriptor: int, starts: Int64s, sizes: Int64s, addresses: Int64s) -> bool:
    """Read values of a file, in its order, to addresses; False if they are too scattered.

    Raises:
        EOFError: If the file ends before.
    """
    is_apart = starts[1:] != starts[:-1] + sizes[:-1]
    firsts = np.r_[0, np.flatnonzero(is_apart) + 1]
    makers = buffers_of(sizes)
    if makers is None or len(firsts) > 1 + len(starts) // _LEAST_A_READ:
        return False
    ends = np.r_[firsts[1:], len(starts)]
    places, lengths = addresses.tolist(), sizes.tolist()
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        for begin in range(first, end, _MOST_BUFFERS):
            rows = slice(begin, min(begin + _MOST_BUFFERS, end))
            own = zip(lengths[rows], places[rows], strict=True)
            buffers = [makers[size](address) for size, address in own]
            position, expected = int(starts[begin]), int(sizes[rows].sum())
            count = os.preadv(descriptor, buffers, position)
            if count != expected:
                _read_rest(descriptor, buffers, position, count)
    return True


def _read_rest(descriptor: int, buffers: list[Any], position: int, count: int) -> None:
    """Read what a short read has left out, buffer by buffer."""
    for buffer in buffers:
        array = np.frombuffer(buffer, dtype=np.uint8)
        if count < len(array):
            pread(descriptor, array[count:], position + count)
        count, position = max(0, count - len(array)), position + len(array)


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
_HUGE_PAGE_BYTES = 2**21
_RUNS_AHEAD = 256


def copy_window(values: Array, window: Window, target: Array) -> None:
    """Copy a window of the values of a chunk, 1-D, to an array of the window's box shape."""
    part = values[window.start : window.start + window.array_size].reshape(window.shape)
    target[...] = part if window.box.shape == window.shape else part[window.box.slices()]


def read_window(
    file: OpenFile, start: int, window: Window, target: Array, most_copied: int | None
) -> None:
    """Read a window of raw values out of an open file, in which they begin at byte ``start``.

    The target may have any strides, and a dtype that numpy itself knows. What cannot be read in
    place takes at most ``most_copied`` bytes of memory; if that is None, the file is mapped.

    Raises:
        EOFError: if the file has become shorter.
    """
    run = window.contiguous_range()
    if run is not None and target.flags.c_contiguous:
        file.read_into(target, start + run[0] * target.itemsize)
        return
    axes, are_runs = axes_apart(
        window, target.itemsize, maps_files=most_copied is None, most_gap=file.most_gap
    )
    parts = target[..., np.newaxis]  # so that a part is an array even if it is one element
    if axes and are_runs and parts[(0,) * axes].flags.c_contiguous:
        _read_runs(file, start, window, target, axes, maps_files=most_copied is None)
    else:
        box = window.box
        for index in itertools.product(*map(range, box.shape[:axes])):
            offset = tuple(map(sum, zip(box.offset, index, strict=False))) + box.offset[axes:]
            part = Box(offset, (1,) * axes + box.shape[axes:])
            own = target[tuple(slice(i, i + 1) for i in index)]
            inner = Window(window.start, window.shape, part)
            if most_copied is None:
                _copy_mapped(file.descriptor, start, inner, own)
            else:
                _copy_blocks(file, start, inner, own, most_copied)


def axes_apart(
    window: Window, itemsize: int, *, maps_files: bool, most_gap: int | None = None
) -> tuple[int, bool]:
    """How a window of a file is read.

    What is read of a file in buffers is at most 1.1 times of what is wanted where the contiguous
    runs have 4 KiB or more, and at most 16 KiB more for each run of fewer bytes.

    Returns:
        The number of leading axes along which parts are read one by one, each from its first
        element to its last; and whether each part is one run.
    """
    shape, box = window.shape, window.box.shape
    run = next((a for a in reversed(range(len(box))) if box[a] != shape[a]), 0)
    run_bytes = math.prod(box[run:]) * itemsize
    if most_gap is None and maps_files:
        most_gap = _MOST_MAPPED_GAP_BYTES
    elif most_gap is None:
        most_gap = _MOST_GAP_BYTES if run_bytes < _SMALL_RUN_BYTES else run_bytes // 10
    for axes in range(run):
        runs = math.prod(box[axes:run])
        if span_bytes(window, axes, itemsize) - runs * run_bytes <= runs * most_gap:
            return axes, runs == 1
    return run, True


def _read_runs(
    file: OpenFile, start: int, window: Window, target: Array, axes: int, *, maps_files: bool
) -> None:
    """Read the parts along the leading axes, each of them one run, to where they belong."""
    parts, itemsize, box = target[..., np.newaxis], target.itemsize, window.box
    first = window.start + ravel_offset(box.offset, window.shape)
    positions = np.array([start + first * itemsize])
    for axis in range(axes):
        step = math.prod(window.shape[axis + 1 :]) * itemsize
        positions = (positions[:, np.newaxis] + np.arange(box.shape[axis]) * step).reshape(-1)
    num_bytes = math.prod(box.shape[axes:]) * itemsize
    last = (-1,) * axes
    gap_bytes = span_bytes(window, 0, itemsize) // len(positions) - num_bytes
    if (
        maps_files
        and gap_bytes <= _MOST_CACHED_GAP_BYTES
        and file.is_cached(parts[last], int(positions[-1]))
        and file.is_cached(parts[(0,) * axes], int(positions[0]))
    ):
        _copy_mapped(file.descriptor, start, window, target, reads_around=False)
        return
    runs = zip(itertools.product(*map(range, box.shape[:axes])), positions.tolist(), strict=True)
    while batch := list(itertools.islice(runs, _RUNS_AHEAD)):
        file.read_runs([(parts[index], position) for index, position in batch])


def _copy_mapped(
    descriptor: int, start: int, window: Window, target: Array, *, reads_around: bool = True
) -> None:
    """Copy a window of values out of a mapped file, reading around it from the disk or not."""
    first, num_bytes = _span(window, target.itemsize)
    first += start
    # Linux maps a huge page of its cache at once, but only if all of it may be seen.
    aligned = first - first % _HUGE_PAGE_BYTES
    stop = -(-(first + num_bytes) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = min(stop, os.fstat(descriptor).st_size) - aligned
    if length < first + num_bytes - aligned:
        raise EOFError("the file ended early")
    mapped = mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=aligned)
    if not reads_around:
        mapped.madvise(mmap.MADV_RANDOM)
    target[...] = _strided(mapped, first - aligned, window, target)
    # The array that looked into it is gone, so this cannot pull memory from under anybody.
    mapped.close()


def _copy_blocks(
    file: OpenFile, start: int, window: Window, target: Array, most_bytes: int
) -> None:
    """Read whole blocks of rows and copy what is wanted of them."""
    first, num_bytes = _span(window, target.itemsize)
    rows = window.box.shape
    axis = next((a for a, extent in enumerate(rows) if extent > 1), None)
    if axis is None or num_bytes <= most_bytes:
        block = file.view(start + first, num_bytes)
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
        _copy_blocks(file, start, inner, target[index], most_bytes)


def _span(window: Window, itemsize: int) -> tuple[int, int]:
    """First byte, and bytes from there to the last one, of a window with elements."""
    first = ravel_offset(window.box.offset, window.shape)
    return (window.start + first) * itemsize, span_bytes(window, 0, itemsize)


def span_bytes(window: Window, axes: int, itemsize: int) -> int:
    """Bytes from the first element to the last at one index of the leading axes of a window."""
    last = tuple(extent - 1 for extent in window.box.shape[axes:])
    return (ravel_offset(last, window.shape[axes:]) + 1) * itemsize


def _strided(buffer: Any, offset: int, window: Window, like: Array) -> Array:
    """The window's box as an array over memory that begins with its first element."""
    itemsize = like.dtype.itemsize
    strides = [itemsize] * len(window.shape)
    for axis in reversed(range(len(strides) - 1)):
        strides[axis] = strides[axis + 1] * window.shape[axis + 1]
    return np.ndarray(window.box.shape, like.dtype, buffer, offset, tuple(strides))
