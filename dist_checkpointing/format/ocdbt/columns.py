"""Columns of integers and byte strings, in which every record of a database is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MOST_U16: Final = (1 << 16) - 1
MOST_U32: Final = (1 << 32) - 1
MOST_I64: Final = (1 << 63) - 1
MOST_U64: Final = (1 << 64) - 1
_MOST_VARINT_BYTES: Final = 10
_BYTES: Final = np.uint64(1) << np.arange(8, 64, 8, dtype=np.uint64)
"""The first number that takes two bytes, three, ..., eight."""


class Malformed(ValueError):
    """A record that is not what the format allows."""


class Body:
    """The body of a record, read column by column."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def varint(self, most: int) -> int:
        """One unsigned integer of variable length."""
        value = shift = 0
        for byte in self.data[self.position : self.position + _MOST_VARINT_BYTES]:
            self.position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value > most:
                    raise Malformed(f"the integer {value} is above {most}")
                return value
        raise Malformed("an integer has no end")

    def varints(self, count: int, most: int = MOST_I64) -> I64:
        """A column of unsigned integers of at most 63 bits."""
        return self.wide_varints(count, most).astype(np.int64)

    def wide_varints(self, count: int, most: int = MOST_U64) -> U64:
        """A column of unsigned integers."""
        # Before anything of this size is made.
        if count > len(self.data) - self.position:
            raise Malformed(f"a column of {count} integers runs over the end")
        if count <= 0:
            return np.zeros(0, dtype=np.uint64)
        begin = self.position
        for width in (1, 3, _MOST_VARINT_BYTES):
            window = self._bytes[begin : begin + width * count]
            stops = np.flatnonzero(window < 0x80)[:count]
            if len(stops) == count:
                break
        else:
            raise Malformed(f"{count} integers have no end, or more than 64 bits")
        self.position = begin + int(stops[-1]) + 1
        values = window.astype(np.uint64) if width == 1 else _joined_digits(window, stops)
        if most < MOST_U64 and int(values.max()) > most:
            raise Malformed(f"the integer {values.max()} is above {most}")
        return values

    def fixed(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """A column of integers of fixed size."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), dtype=kind)

    def take(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self.data):
            raise Malformed(f"{num_bytes} bytes from {self.position} run over the end")
        taken = self.data[self.position : stop]
        self.position = stop
        return taken

    def finish(self) -> None:
        """Make sure that nothing is left."""
        if self.position != len(self.data):
            raise Malformed(f"{len(self.data) - self.position} bytes are left")


def _joined_digits(data: npt.NDArray[np.uint8], stops: I64) -> U64:
    """The integers whose last bytes are at ``stops``."""
    sizes = np.diff(stops, prepend=-1)
    longest = int(sizes.max())
    # The tenth byte of an integer has one bit of its 64.
    if longest > _MOST_VARINT_BYTES or (
        longest == _MOST_VARINT_BYTES and (data[stops[sizes == longest]] > 1).any()
    ):
        raise Malformed("an integer has more than 64 bits")
    starts = stops - sizes + 1
    values = np.zeros(len(stops), dtype=np.uint64)
    shortest = int(sizes.min())
    for place in range(longest):
        has = slice(None) if place < shortest else np.flatnonzero(sizes > place)
        digits = (data[starts[has] + place] & 0x7F).astype(np.uint64)
        values[has] |= digits << np.uint64(7 * place)
    return values


def total(lengths: I64, most: int, what: str) -> int:
    """The sum of lengths, each of at most 32 bits or with a sum that cannot overflow."""
    if len(lengths) and (int(lengths.max()) > most or int(lengths.sum()) > most):
        raise Malformed(f"{what} take more than {most} bytes")
    return int(lengths.sum())


def encoded(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Unsigned integers of variable length, one after the other."""
    column = np.asarray(values, dtype=np.uint64)
    if not len(column) or int(column.max()) < 0x80:
        return column.astype(np.uint8).tobytes()
    sizes = np.ones(len(column), dtype=np.int64)
    for place in range(1, _MOST_VARINT_BYTES):
        longer = column >> np.uint64(7 * place) != 0
        if not longer.any():
            break
        sizes += longer
    ends = np.cumsum(sizes)
    data = np.empty(int(ends[-1]), dtype=np.uint8)
    starts = ends - sizes
    for place in range(int(sizes.max())):
        has = np.flatnonzero(sizes > place)
        digits = column[has] >> np.uint64(7 * place) & np.uint64(0x7F)
        more = (sizes[has] > place + 1).astype(np.uint64) << np.uint64(7)
        data[starts[has] + place] = digits | more
    return data.tobytes()


def shared_lengths(strings: Sequence[bytes]) -> I64:
    """How many bytes each of the strings shares with the one before; 0 for the first."""
    count = len(strings)
    shared = np.zeros(count, dtype=np.int64)
    if count < 2:
        return shared
    lengths = np.fromiter(map(len, strings), dtype=np.int64, count=count)
    joined = b"".join(strings) + bytes(8)
    # Eight bytes from each place on, as one number: most neighbours differ within a few of these.
    words = np.ndarray((len(joined) - 7,), dtype="<u8", buffer=joined, strides=(1,))
    starts = np.cumsum(lengths) - lengths
    both = np.minimum(lengths[1:], lengths[:-1])
    rows = np.arange(count - 1)
    place = 0
    while len(rows):
        differ = words[starts[rows] + place] ^ words[starts[rows + 1] + place]
        lowest_bit = differ & (~differ + np.uint64(1))
        alike = np.where(differ == 0, 8, np.searchsorted(_BYTES, lowest_bit, side="right"))
        shared[rows + 1] = np.minimum(place + alike, both[rows])
        place += 8
        rows = rows[(differ == 0) & (both[rows] > place)]
    return shared
