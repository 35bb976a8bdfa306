"""Values shared with a base checkpoint, and data files of it that are too little used.

A value may be any range of bytes in a file: also some rows of a chunk of the base.

Only rank 0 knows how much of a file all ranks use.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.hard_links import copy_range, share_file
from dist_checkpointing.format.checksums import Digest, columns_of, digest_of_array
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import BaseCheck, Durability, StorageOptions
from dist_checkpointing.strategies.chunk_reads import Extent, read_extent
from dist_checkpointing.strategies.incremental import BaseParts, PlanDigests, open_base
from dist_checkpointing.strategies.tensorstore import database
from dist_checkpointing.strategies.tensorstore.database import DATA_FOLDER, StoredValues
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import Extents
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Tree
from dist_checkpointing.strategies.tensorstore.reader import TensorStoreReader
from dist_checkpointing.strategies.zarr_metadata import chunk_name
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
_LARGE_BYTES: Final = 2**20
_HEAD_BYTES: Final = 2**12
"""Of a large part, and of one that may lie in a larger one, so much is compared first."""
_READ_BYTES: Final = 2**22
_ANY: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class SharedValues:
    """The rows of a plan whose values lie in shared files.

    The ``steady`` rows have not changed either, but lie in files of which too little is used.
    """

    rows: Int64s
    extents: Extents
    files: tuple[SealedFile, ...] = ()
    steady: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @classmethod
    def none(cls) -> SharedValues:
        return cls(np.empty(0, dtype=np.int64), Extents(*np.empty((3, 0), dtype=np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Rows of a plan, and places in data files of the base that may hold their values.

    A nested place is a part of a larger value, so that it has no digest.
    """

    rows: Int64s
    extents: Extents
    is_nested: Bools
    files: Sequence[SealedFile]

    def take(self, positions: Bools) -> _Places:
        return replace(
            self,
            rows=self.rows[positions],
            extents=self.extents.rows(np.flatnonzero(positions)),
            is_nested=self.is_nested[positions],
        )

    def bytes_in_files(self) -> Int64s:
        sums = np.bincount(self.extents.file, self.extents.length, len(self.files))
        return sums.astype(np.int64)


def share_values(
    writer: StorageWriter, base: Path, plan: SavePlan, digests: PlanDigests, *, is_alone: bool
) -> SharedValues:
    """Share the files of a base that hold values of a plan; it is logged if that is damaged."""
    table, index = plan.table, plan.index
    assert index is not None
    try:
        parts = open_base(TensorStoreReader(base), table)
        if parts is None:
            return SharedValues.none()
        found = _Search(parts, table, index, digests)
        candidates = found.places()
        same = candidates.take(found.are_same(candidates, writer))
        sizes = np.array([file.num_bytes for file in same.files], dtype=np.int64)
        # Other ranks may use the rest of a file: what this one looks at stands for all of it.
        whole = sizes if is_alone else candidates.bytes_in_files()
        used = same.bytes_in_files()
        is_wanted = (used > 0) & (used >= writer.options.least_shared * whole)
        return _shared(same, is_wanted, parts, writer)
    except (CheckpointingException, OSError) as error:
        logger.warning("nothing is shared with %s, which cannot be used: %s", base, error)
        return SharedValues.none()


class _Search:
    """Looks for the values of a plan in a base."""

    def __init__(
        self, base: BaseParts, table: ShardTable, index: Index, digests: PlanDigests
    ) -> None:
        self._base, self._table, self._index, self._digests = base, table, index, digests
        self._sizes = table.num_bytes

    def places(self) -> _Places:
        """Where values of the same box lie in the base, and values in which others may lie."""
        base, table = self._base, self._table
        same_box = np.flatnonzero(base.same_box)
        names = database.keys_to_write(table.take(same_box), base.index)
        stored = [self._stored_bytes(row) for row in same_box.tolist()]
        nested = list(self._nested())
        names += [name.encode() for _, name, _, _ in nested]
        stored += [num_bytes for _, _, _, num_bytes in nested]
        rows = np.concatenate([same_box, np.array([row for row, *_ in nested], dtype=np.int64)])
        is_nested = np.arange(len(rows)) >= len(same_box)
        values = Tree(base.folder).find(names)
        file, offset, length = values.extents.columns
        numbers: dict[int, int] = {}
        files: list[SealedFile] = []
        for at, name in enumerate(values.files):
            sealed = base.seal.files.get(name)
            if sealed is not None and name.startswith(f"{database.DATA_FOLDER}/"):
                numbers[at] = len(files)
                files.append(sealed)
        number = np.array([numbers.get(old, -1) for old in file.tolist()], dtype=np.int64)
        expected = np.array(stored, dtype=np.int64)
        is_good = (number >= 0) & (length > 0) & ((expected == _ANY) | (expected == length))
        ends = np.array([*(sealed.num_bytes for sealed in files), 0], dtype=np.int64)
        is_good &= offset + length <= ends[number]
        begins = np.concatenate(
            [np.zeros(len(same_box), dtype=np.int64), np.array([n[2] for n in nested], np.int64)]
        )
        lengths = np.where(is_nested, self._sizes[rows], length)
        extents = Extents(number, offset + begins, lengths)
        return _Places(rows, extents, is_nested, files).take(is_good)

    def _stored_bytes(self, row: int) -> int:
        """Bytes that the value of a row must have in the base to be what would be written."""
        if self._table.is_object[row]:
            return _ANY
        key = self._table.key(row)
        chunk = self._index.chunk_shape(key)
        if chunk is None or math.prod(chunk) == math.prod(self._table.box(row).shape):
            return int(self._sizes[row])
        # At the edge of a tensor it is padded, and the padding depends on the chunk.
        if tuple(chunk) != tuple(self._base.index.chunk_shape(key) or ()):
            return 0
        return math.prod(chunk) * self._index.dtype_of(key).itemsize

    def _nested(self) -> Iterator[tuple[int, str, int, int]]:
        """Rows that lie in one piece in a larger chunk of the base.

        Yields:
            The row, the name of the chunk, first byte in it, and bytes of the chunk.
        """
        base, table = self._base, self._table
        left = base.same_dtype & ~base.same_box & ~table.is_object & (table.flat[:, 0] < 0)
        for row in np.flatnonzero(left & (self._sizes > 0)).tolist():
            key, box = table.key(row), table.box(row)
            chunk, own = base.index.chunk_shape(key), self._index.chunk_shape(key)
            if chunk is None or len(chunk) != len(box.shape):
                continue
            if own is not None and math.prod(own) != box.num_elements:
                continue  # padded
            number = tuple(o // c for o, c in zip(box.offset, chunk, strict=True))
            first = tuple(n * c for n, c in zip(number, chunk, strict=True))
            window = Window(0, tuple(chunk), box.relative_to(first))
            is_inside = Box.whole(tuple(chunk)).contains(window.box)
            run = window.contiguous_range() if is_inside else None
            if run is not None:
                size = base.index.dtype_of(key).itemsize
                name = f"{disk_name(key)}/{chunk_name(number)}"
                yield row, name, run[0] * size, window.array_size * size

    def are_same(self, places: _Places, writer: StorageWriter) -> Bools:
        """Which places hold what the rows of the plan hold."""
        rows, is_nested = places.rows, places.is_nested
        is_same = np.ones(len(rows), dtype=np.bool_)
        threads = writer.options.threads
        # What begins otherwise need not be hashed before it is written; padding is left out.
        is_large = (self._sizes[rows] >= _LARGE_BYTES) & (
            places.extents.length == self._sizes[rows]
        )
        begun = np.flatnonzero(is_nested | is_large).tolist()
        is_same[begun] = in_threads(lambda at: self._has_head(places, at), begun, threads)
        self._digests.add(rows[is_same])
        own = self._digests.columns[rows]
        is_same &= is_nested | (own == self._base.digests[rows]).all(axis=1)
        to_read = is_same.copy() if writer.options.base_check is BaseCheck.CONTENTS else is_nested
        read = np.flatnonzero(is_same & to_read).tolist()
        if read:
            found = in_threads(lambda at: self._digest_in_base(places, at), read, threads)
            is_same[read] = (columns_of(found) == own[read]).all(axis=1)
        return is_same

    def _extent(self, places: _Places, at: int) -> Extent:
        file, offset, length = (int(column[at]) for column in places.extents.columns)
        return Extent(self._base.folder, places.files[file].name, offset, length)

    def _has_head(self, places: _Places, at: int) -> bool:
        """Whether a place begins like the row, as nearly all that differ do not."""
        extent, row = self._extent(places, at), int(places.rows[at])
        size = int(self._table.itemsizes[row])
        most = min(extent.num_bytes, _HEAD_BYTES // size * size)
        head = read_extent(replace(extent, num_bytes=most), self._table.key(row))
        return self._digests.begins_with(row, head)

    def _digest_in_base(self, places: _Places, at: int) -> bytes:
        """The digest of the bytes at a place, as they are now."""
        row = int(places.rows[at])
        extent, key = self._extent(places, at), self._table.key(row)
        if not extent.num_bytes > self._sizes[row] > 0:
            return _digest_of_extent(extent, key)
        # Padding is not a part of the values.
        chunk, size = self._index.chunk_shape(key), int(self._table.itemsizes[row])
        stored = np.frombuffer(read_extent(extent, key), dtype=f"V{size}")
        whole = stored.reshape(tuple(chunk or ()))
        return digest_of_array(whole[tuple(map(slice, self._table.box(row).shape))].copy())


def _digest_of_extent(extent: Extent, key: str) -> bytes:
    digest, end = Digest(), extent.offset + extent.num_bytes
    for begin in range(extent.offset, end, _READ_BYTES):
        part = replace(extent, offset=begin, num_bytes=min(_READ_BYTES, end - begin))
        digest.update(memoryview(read_extent(part, key)))
    return digest.digest()


def _shared(
    same: _Places, is_wanted: Bools, base: BaseParts, writer: StorageWriter
) -> SharedValues:
    """Share the wanted files, and keep the places in those for which that has worked."""
    numbers = np.full(len(same.files), -1, dtype=np.int64)
    files: list[SealedFile] = []
    for number in np.flatnonzero(is_wanted).tolist():
        sealed = same.files[number]
        target = writer.checkpoint_dir / sealed.name
        target.parent.mkdir(parents=True, exist_ok=True)
        size = share_file(base.folder / sealed.name, target)
        if size == sealed.num_bytes:
            numbers[number] = len(files)
            files.append(sealed)
            continue
        problem = "it has another size than it was saved with"
        if size is None:
            problem = "it is gone" if not base.is_in_place() else "the file system cannot do that"
        else:
            target.unlink(missing_ok=True)
        logger.warning(
            "files of %s are not shared, but written: %s: %s", base.folder, sealed.name, problem
        )
        if size is None:
            break
    is_shared = numbers[same.extents.file] >= 0
    kept = same.take(is_shared)
    extents = replace(kept.extents, file=numbers[kept.extents.file])
    return SharedValues(kept.rows, extents, tuple(files), same.rows[~is_shared])


_COPIED_BYTES: Final = 2**24


def settle(
    folder: Path, stored: Sequence[StoredValues], options: StorageOptions
) -> tuple[list[StoredValues], list[SealedFile]]:
    """Decide which shared files stay, and make these durable; where all values lie then."""
    shared = {file.name: file for values in stored for file in values.shared}
    used: Counter[str] = Counter()
    for values in stored:
        sums = np.bincount(values.extents.file, values.extents.length, len(values.files))
        used.update(dict(zip(values.files, sums.astype(np.int64).tolist(), strict=True)))
    known = {name for values in stored for name in values.files}
    for path, names in local_folder.walked(folder / DATA_FOLDER):
        for name in names:
            # A rank shared it, and then found that it could not use it.
            if (path / name).relative_to(folder).as_posix() not in known:
                (path / name).unlink()
    left, copied = list(stored), []
    sparse = {n for n, file in shared.items() if used[n] < options.least_shared * file.num_bytes}
    for name in sorted(sparse):
        left, file = _copied_out(folder, left, name, options.durability)
        copied.append(file)
    kept = [file for name, file in shared.items() if name not in sparse]
    if options.durability is Durability.FSYNC:
        # The base may have been saved with less care.
        for file in kept:
            local_folder.fsync_file(folder / file.name)
    num_bytes = sum(used[file.name] for file in kept)
    logger.info("%d bytes in %d files are shared with the base", num_bytes, len(kept))
    return left, [*kept, *copied]


def _copied_out(
    folder: Path, stored: Sequence[StoredValues], name: str, durability: Durability
) -> tuple[list[StoredValues], SealedFile]:
    """Put a file in the place of another one that has what is used of it."""
    number_of = [{file: number for number, file in enumerate(v.files)} for v in stored]
    rows = [
        np.flatnonzero(values.extents.file == numbers.get(name, -1))
        for values, numbers in zip(stored, number_of, strict=True)
    ]
    parts = [v.extents.rows(own) for v, own in zip(stored, rows, strict=True)]
    offsets = np.concatenate([part.offset for part in parts])
    lengths = np.concatenate([part.length for part in parts])
    order = np.argsort(offsets, kind="stable")
    begins = np.empty_like(offsets)
    begins[order] = np.cumsum(lengths[order]) - lengths[order]
    fresh = f"{name.rpartition('/')[0]}/used-{uuid.uuid4().hex}"
    _copy(folder / name, folder / fresh, offsets[order], lengths[order], durability)
    (folder / name).unlink()
    moved, taken = [], 0
    for values, own in zip(stored, rows, strict=True):
        if not len(own):
            moved.append(values)
            continue
        file, offset = values.extents.file.copy(), values.extents.offset.copy()
        file[own], offset[own] = len(values.files), begins[taken : taken + len(own)]
        taken += len(own)
        extents = replace(values.extents, file=file, offset=offset)
        moved.append(replace(values, files=(*values.files, fresh), extents=extents))
    return moved, SealedFile(fresh, int(lengths.sum()))


def _copy(
    source: Path, target: Path, offsets: Int64s, lengths: Int64s, durability: Durability
) -> None:
    """Copy ranges of a file, sorted by their offsets, one behind the other into a new file."""
    ends = offsets + lengths
    firsts = np.flatnonzero(np.r_[True, offsets[1:] != ends[:-1]])
    lasts = np.r_[firsts[1:], len(offsets)] - 1
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for begin, end in zip(offsets[firsts].tolist(), ends[lasts].tolist(), strict=True):
                if not copy_range(read, begin, end - begin, write):
                    _copy_here(read, begin, end, write)
            if durability is Durability.FSYNC:
                os.fsync(write)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _copy_here(read: int, begin: int, end: int, write: int) -> None:
    while begin < end:
        data = os.pread(read, min(_COPIED_BYTES, end - begin), begin)
        if not data:
            raise EOFError(f"the file ends at {begin}")
        view = memoryview(data)
        while view:
            view = view[os.write(write, view) :]
        begin += len(data)
