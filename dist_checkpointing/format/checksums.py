"""The part table: key, box, rank, checksum and 128-bit digest of each stored part; its files.

A hash covers the values of a write item in C order, whatever the format makes of them on disk, so
one table format and one way to verify serve every backend. Rows are sorted by key and cut into
tables of a limited size, so that a rank opens only the tables that speak of what it loads.

The table of checksums has the lower half of each digest: xxh3_64, which is also the lower half of
xxh3_128 for more than 240 bytes. The upper half, that of xxh3_128, lies in a file beside the table.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dist_checkpointing.filesystem import file_writer, local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, FlatRange, Int64s, Ints, renumbered
from dist_checkpointing.format.seal import UNVERIFIED, known_files

CHECKSUMS_NAME = ".dckpt/checksums"
_SUFFIX: Final = ".bin"
_MAGIC: Final = b"DCKPTSUM"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIIQI")
"""Magic, version, bytes of the names, rows, axes."""
_MAX_TABLE_BYTES: Final = 1 << 31
_MAX_AXES: Final = 1 << 10
_ROWS_A_TABLE: Final = 1 << 16
_DTYPES: Final = ("<u4", "<u4", "<u4", "<u4", "<i8", "<i8", "<i8", "<u8")
"""Of the columns of a table, as they are in ``ChecksumColumns``."""
Array = npt.NDArray[Any]
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


def bytes_of(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def checksum_of(blocks: Iterable[Array]) -> int:
    """xxh3_64 of a C-contiguous array that is given in blocks, one after the other."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        # Unlike the one-shot function this lets other threads run.
        digest.update(bytes_of(block))
    return digest.intdigest()


def checksums_at(addresses: Int64s, num_bytes: Int64s) -> Uint64s:
    """xxh3_64 of small runs of memory, which must stay for as long as this takes."""
    runs = file_writer.memory_at(addresses, num_bytes)
    return np.array([*map(xxhash.xxh3_64_intdigest, runs)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, or a cell of an object, with its hash and the rank that wrote it.

    Both are None for a part without a checksum.
    """

    key: str
    box: Box
    flat_range: FlatRange
    digest: int | None = None
    rank: int | None = None

    @property
    def num_elements(self) -> int:
        if self.flat_range is None:
            return self.box.num_elements
        return self.flat_range[1] - self.flat_range[0]

    def lies_in(self, shape: Ints) -> bool:
        """Whether a tensor of this shape can have it."""
        box = self.box
        if len(box.shape) != len(shape) or min((*box.offset, *box.shape, 0)) < 0:
            return False
        start, stop = self.flat_range or (0, 0)
        return Box.whole(shape).contains(box) and 0 <= start <= stop <= box.num_elements


class ChecksumColumns(NamedTuple):
    """What all ranks wrote, sorted by key; row ``i`` of every array describes one part or object.

    ``keys`` are positions in ``names``. Offsets (of an object: the cell) and shapes are ``[rows,
    axes]``, flattened ranges ``[rows, 2]``, -1 where there is none. A digest is xxh3_64 of the
    values, or of the bytes of the object.
    """

    names: Sequence[str]
    keys: Array
    ranks: Array
    ndim: Array
    is_object: Array
    offsets: Array
    shapes: Array
    flat: Array
    digests: Array

    def renamed(self, rows: Array | slice, names: Sequence[str], keys: Array) -> ChecksumColumns:
        """Some rows, whose keys are positions in other names."""
        return ChecksumColumns(names, keys, *(column[rows] for column in self[2:]))

    def parts_at(self, rows: Array) -> list[StoredPart]:
        """Some rows, one by one; the offset of the box of an object is its cell."""
        taken = [column[rows].tolist() for column in self[1:]]
        return [
            StoredPart(
                self.names[key],
                Box(tuple(offset[:ndim]), tuple(shape[:ndim])),
                None if flat[0] < 0 else (flat[0], flat[1]),
                digest,
                rank,
            )
            for key, rank, ndim, _, offset, shape, flat, digest in zip(*taken, strict=True)
        ]

    def parts(self, keys: Container[str] | None = None) -> list[StoredPart]:
        """The rows of all tensors, or of those with some keys."""
        chosen = self.is_object == 0
        if keys is not None:
            chosen &= np.array([name in keys for name in self.names], dtype=np.bool_)[self.keys]
        return self.parts_at(np.flatnonzero(chosen))

    def objects(self) -> list[StoredPart]:
        return self.parts_at(np.flatnonzero(self.is_object))

    def to_bytes(self) -> bytes:
        text = json.dumps(self.names).encode()
        columns = zip(self[1:], _DTYPES, strict=True)
        body = [column.astype(dtype).tobytes() for column, dtype in columns]
        head = _HEAD.pack(_MAGIC, _VERSION, len(text), len(self.keys), self.offsets.shape[1])
        data = b"".join([head, text, *body])
        return data + xxhash.xxh3_128_digest(data)


def make_tables(
    columns: ChecksumColumns, uppers: Uint64s | None = None
) -> Iterator[tuple[dict[str, bytes], tuple[str, str]]]:
    """The files of each table by name, the table first, and its smallest and largest key.

    With ``uppers``, the upper halves of the digests, each has a file of those beside it.
    """
    for number, start in enumerate(range(0, len(columns.keys), _ROWS_A_TABLE)):
        rows = slice(start, start + _ROWS_A_TABLE)
        used, (keys,) = renumbered(len(columns.names), columns.keys[rows])
        names = [columns.names[position] for position in used]
        name = f"{CHECKSUMS_NAME}/{number:05d}{_SUFFIX}"
        files = {name: columns.renamed(rows, names, keys).to_bytes()}
        if uppers is not None:
            of_table = xxhash.xxh3_128_digest(files[name])
            body = _DIGESTS_HEAD.pack(_DIGESTS_MAGIC, _DIGESTS_VERSION, of_table)
            body += uppers[rows].astype("<u8").tobytes()
            files[upper_name(name)] = body + xxhash.xxh3_128_digest(body)
        yield files, (names[0], names[-1])


def checksum_files(folder: Location) -> list[Location]:
    """The tables of a checkpoint, in the order of their keys."""
    found = location.names_in(folder / CHECKSUMS_NAME)
    names = [f"{CHECKSUMS_NAME}/{name}" for name in found if name.endswith(_SUFFIX)]
    return [folder / name for name in filter(known_files(folder), names)]


def read_tables(folder: Location, names: Iterable[str] | None = None) -> list[ChecksumColumns]:
    paths = checksum_files(folder) if names is None else [folder / name for name in names]
    return list(map(read_table, paths))


def read_table(path: Location) -> ChecksumColumns:
    """One table; CorruptCheckpointError if the file is not what it should be."""
    return parse_table(location.read_bytes(path, _MAX_TABLE_BYTES), str(path))


def parse_table(data: bytes, path: str) -> ChecksumColumns:
    with local_folder.parsing("checksums cannot be read", path, remedy=UNVERIFIED):
        magic, version, names_size, rows, width = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("not a table of checksums")
        if version != _VERSION:
            raise ValueError(f"version {version} of the table is not known")
        single, wide = (rows,), (rows, width)
        shapes = (single, single, single, single, wide, wide, (rows, 2), single)
        stored = [*zip(shapes, _DTYPES, strict=True)]
        sizes = (math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in stored)
        *starts, size = itertools.accumulate(sizes, initial=_HEAD.size + names_size)
        if width > _MAX_AXES or size + DIGEST_BYTES != len(data):
            raise ValueError(f"{len(data)} bytes, where {size + DIGEST_BYTES} are expected")
        if xxhash.xxh3_128_digest(data[:size]) != data[size:]:
            raise ValueError("the checksum of the table itself differs")
        names = local_folder.parse_json(data[_HEAD.size : _HEAD.size + names_size])
        if not isinstance(names, list) or not {str}.issuperset(map(type, names)):
            raise ValueError("expected a list of keys")
        columns = (
            np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
            for start, (shape, dtype) in zip(starts, stored, strict=True)
        )
        table = ChecksumColumns(names, *columns)
        if rows and (int(table.keys.max()) >= len(names) or int(table.ndim.max()) > width):
            raise ValueError("a row names no key, or has more axes than there are")
    return table


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
    if num_bytes <= _SHORT_BYTES:
        return xxhash.xxh3_128_digest(data)[:8] + xxhash.xxh3_64_digest(data)
    if num_bytes < _LARGE_BYTES:
        return xxhash.xxh3_128_digest(data)
    digest = xxhash.xxh3_128()
    digest.update(data)
    return digest.digest()


def digests_at(addresses: Int64s, num_bytes: Int64s) -> Uint64s:
    """``[runs, 2]``: the digests of small runs of memory, which must stay while this works."""
    runs = file_writer.memory_at(addresses, num_bytes)
    columns = columns_of([*map(xxhash.xxh3_128_digest, runs)])
    short = num_bytes <= _SHORT_BYTES
    columns[short, 1] = checksums_at(addresses[short], num_bytes[short])
    return columns


def columns_of(digests: Sequence[bytes]) -> Uint64s:
    """``[digests, 2]``: the upper half and the checksum of each."""
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def upper_name(table: str) -> str:
    """Name of the file with the upper halves for the rows of a table of checksums."""
    return table.rpartition(".")[0] + _DIGESTS_SUFFIX


def read_digests(folder: Location, table: str) -> tuple[ChecksumColumns, Uint64s]:
    """The rows of a table of checksums, and the upper halves of their digests.

    If the files are not what they should be, a CorruptCheckpointError.
    """
    content = location.read_bytes(folder / table, _MAX_TABLE_BYTES)
    path = folder / upper_name(table)
    data = location.read_bytes(path, _MAX_TABLE_BYTES)
    columns = parse_table(content, str(folder / table))
    with local_folder.parsing("digests cannot be read", path):
        magic, version, of_table = _DIGESTS_HEAD.unpack_from(data)
        size = _DIGESTS_HEAD.size + 8 * len(columns.keys)
        is_one = (magic, version) == (_DIGESTS_MAGIC, _DIGESTS_VERSION)
        if not is_one or len(data) != size + DIGEST_BYTES:
            raise ValueError("not the digests for the rows of the table beside it")
        if of_table != xxhash.xxh3_128_digest(content):
            raise ValueError("the table beside it is another one")
        if xxhash.xxh3_128_digest(data[:size]) != data[size:]:
            raise ValueError("its own checksum differs")
        uppers = np.frombuffer(data, "<u8", len(columns.keys), _DIGESTS_HEAD.size)
    return columns, uppers
