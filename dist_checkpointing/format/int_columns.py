"""Columns of integers in few bytes: differences from row to row, in the smallest type that fits.

Neighbours in a model look alike, so that a number takes a byte, and almost none once compressed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dist_checkpointing.format.pieces import Int64s

_CODES: Final = "bhiq"
_INT_SIZES: Final = {ord(code): np.dtype(code).itemsize for code in _CODES}


def pack_column(column: Int64s) -> bytes:
    """The bytes of a column of int64, which do not tell how many rows it has."""
    steps = np.diff(column, prepend=0)
    low, high = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
    for code in _CODES:
        limits = np.iinfo(np.dtype(code))
        if limits.min <= low and high <= limits.max:
            return code.encode() + steps.astype(np.dtype(code)).tobytes()
    raise AssertionError("an int64 fits into an int64")


def column_end(data: bytes, begin: int, rows: int) -> int:
    """Where the bytes of a packed column end."""
    return begin + 1 + rows * _INT_SIZES[data[begin]]


def unpack_column(data: bytes, begin: int, rows: int) -> Int64s:
    """The packed column that begins there."""
    steps = np.frombuffer(data, chr(data[begin]), rows, begin + 1)
    return np.cumsum(steps, dtype=np.int64)
