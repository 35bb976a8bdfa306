"""128-bit digests of stored parts, by which an incremental save knows what has not changed.

The table of checksums has the lower half of each digest: xxh3_64, which is also the lower half of
xxh3_128 for more than 240 bytes. The upper half, that of xxh3_128, lies in a file beside the table.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from ctypes import c_char
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import ChecksumColumns, TableFile, bytes_of, parse_table
from dist_checkpointing.format.seal import SealedFile

Uint64s = npt.NDArray[np.uint64]

DIGEST_BYTES: Final = 16
NO_DIGEST: Final = bytes(DIGEST_BYTES)
_SHORT_BYTES: Final = 240
"""Up to here the lower half of xxh3_128 is not xxh3_64."""
_LARGE_BYTES: Final = 1 << 20
"""From here on other threads may run while a digest is made."""
_DIGESTS_SUFFIX: Final = ".upper"
_DIGESTS_MAGIC: Final = b"DCKPTUPR"
_DIGESTS_HEAD: Final = struct.Struct("<8sI16s")
"""Magic, version, xxh3_128 of the table of checksums."""
_DIGESTS_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 31
_MEMORY: Final = memoryview((c_char * sys.maxsize).from_address(0)).cast("B")
"""All memory of this process, of which only what belongs to a tensor may be read."""


class Digest:
    """The digest of bytes that come one after the other."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0
        self._short = b""

    def update(self, data: memoryview) -> None:
        """Add bytes. Other threads may run meanwhile."""
        self._num_bytes += len(data)
        if self._num_bytes <= _SHORT_BYTES:
            self._short += data
        self._hash.update(data)

    def digest(self) -> bytes:
        """The upper half, then the checksum."""
        if self._num_bytes > _SHORT_BYTES:
            return self._hash.digest()
        return digest_of(self._short, self._num_bytes)


def digest_of(data: Any, num_bytes: int) -> bytes:
    """The digest of bytes, or of a contiguous array: its upper half, then its checksum."""
    if num_bytes > _SHORT_BYTES:
        return xxhash.xxh3_128_digest(data)
    return xxhash.xxh3_128_digest(data)[:8] + xxhash.xxh3_64_digest(data)


def digest_of_array(array: npt.NDArray[Any]) -> bytes:
    """The digest of the elements of a C-contiguous array of any dtype."""
    data = bytes_of(array)
    if len(data) < _LARGE_BYTES:
        return digest_of(data, len(data))
    digest = Digest()
    digest.update(data)
    return digest.digest()


def digests_at(
    addresses: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """``[runs, 2]``: the digests of small runs of memory, which must stay while this works."""
    starts, stops = addresses.tolist(), (addresses + num_bytes).tolist()
    spans = zip(starts, stops, strict=True)
    columns = columns_of([xxhash.xxh3_128_digest(_MEMORY[start:stop]) for start, stop in spans])
    short = np.flatnonzero(num_bytes <= _SHORT_BYTES)
    lower = [xxhash.xxh3_64_intdigest(_MEMORY[starts[i] : stops[i]]) for i in short.tolist()]
    columns[short, 1] = np.array(lower, dtype=np.uint64)
    return columns


def columns_of(digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """``[digests, 2]``: the upper half and the checksum of each."""
    found = np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
    columns: npt.NDArray[np.uint64] = found.reshape(-1, 2)
    return columns


def upper_name(table: str) -> str:
    """Name of the file with the upper halves for the rows of a table of checksums."""
    return table.rpartition(".")[0] + _DIGESTS_SUFFIX


def upper_file(table: TableFile, uppers: Uint64s) -> tuple[SealedFile, bytes]:
    """The file beside a table with the upper halves for its rows, and its content."""
    head = _DIGESTS_HEAD.pack(_DIGESTS_MAGIC, _DIGESTS_VERSION, xxhash.xxh3_128_digest(table.data))
    body = head + uppers.astype("<u8").tobytes()
    data = body + xxhash.xxh3_128_digest(body)
    return SealedFile.of_bytes(upper_name(table.name), data), data


def read_digests(folder: Location, table: str) -> tuple[ChecksumColumns, Uint64s]:
    """The rows of a table of checksums, and the upper halves of their digests.

    Raises:
        CorruptCheckpointError: if the files are not what they should be.
        OSError: if they cannot be read.
    """
    content = location.read_bytes(folder / table, _MOST_BYTES)
    path = folder / upper_name(table)
    data = location.read_bytes(path, _MOST_BYTES)
    columns = parse_table(content, str(folder / table)).columns[0]
    with local_folder.parsing("digests cannot be read", path):
        magic, version, of_table = _DIGESTS_HEAD.unpack_from(data)
        size = _DIGESTS_HEAD.size + 8 * len(columns.keys)
        if (magic, version) != (_DIGESTS_MAGIC, _DIGESTS_VERSION) or len(
            data
        ) != size + DIGEST_BYTES:
            raise ValueError("not the digests for the rows of the table beside it")
        if of_table != xxhash.xxh3_128_digest(content):
            raise ValueError("the table beside it is another one")
        if xxhash.xxh3_128_digest(data[:size]) != data[size:]:
            raise ValueError("its own checksum differs")
        uppers = np.frombuffer(data, "<u8", len(columns.keys), _DIGESTS_HEAD.size)
    return columns, uppers
