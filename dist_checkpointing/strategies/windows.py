"""Windows of raw values, copied out of memory or read out of a file."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.geometry import Box, Window, ravel_offset

Array = npt.NDArray[Any]


def copy_window(values: Array, window: Window, target: Array) -> None:
    """Copy a window of the values of a chunk, 1-D, to an array of the window's box shape."""
    part = values[window.start : window.start + window.array_size].reshape(window.shape)
    target[...] = part if window.box.shape == window.shape else part[window.box.slices()]


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
        pread(descriptor, view, start + run[0] * target.itemsize)
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
        pread(descriptor, memoryview(block), start + first)
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


def pread(descriptor: int, view: memoryview, position: int) -> None:
    """Fill memory from a file.

    Raises:
        EOFError: if the file ends before.
    """
    while view:
        count = os.preadv(descriptor, [view], position)
        if count == 0:
            raise EOFError("the file ended early")
        view, position = view[count:], position + count
