"""Many small values of a file, read straight to where each of them belongs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dist_checkpointing.filesystem.ranged_reads import pread
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
