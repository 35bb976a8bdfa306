"""Ranges of files, read into memory: of a mounted file system, or by requests to a store."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.threads import in_threads

Array = npt.NDArray[Any]
READ_WHOLE_BYTES: Final = 2**14
"""Reading so much of a chunk in vain costs less than reading the chunk by itself."""
_MOST_OPEN: Final = 8
_MOST_AT_ONCE: Final = 2**30
"""macOS refuses to read 2 GiB by one call."""
_MOST_STORE_GAP_BYTES: Final = 2**20
"""Reading over so much takes a store as long as one more request."""


class WrongSizeError(EOFError):
    def __init__(self, found: int) -> None:
        super().__init__(f"the file ends at byte {found}")
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How files are best read where they are.

    Attributes:
        threads: Reads at a time.
        most_bytes: Memory of each of them for what cannot be read in place.
        small_bytes: Chunks up to this size are read together with their neighbours.
        run_bytes: About so much is read together.
        gap_bytes: So much between small chunks is read over.
        most_unwanted: So much of a small chunk is read in vain rather than by a read of its own.
        run_threads: Reads of small neighbours at a time. Where a read takes no waiting, many small
            copies are work for the interpreter, and threads would only take turns.
    """

    threads: int
    most_bytes: int
    small_bytes: int = 2**18
    run_bytes: int = 2**22
    gap_bytes: int = 2**16
    most_unwanted: int = READ_WHOLE_BYTES
    run_threads: int = 1


class LocalFile(AbstractContextManager["LocalFile"]):
    """A file of a mounted file system, to read from.

    Its ``descriptor`` is -1 for an object of a store, ``num_bytes`` 0 if it is no regular file, and
    ``most_gap`` the bytes between the runs of a strided part that are read over; None where that
    depends on the length of the runs.
    """

    most_gap: int | None = None

    def __init__(self, path: str, *, stays_open: bool = False) -> None:
        self.descriptor: int = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            os.close(self.descriptor)
            raise
        self.num_bytes: int = status.st_size if stat.S_ISREG(status.st_mode) else 0
        self._close = weakref.finalize(self, os.close, self.descriptor) if stays_open else None

    def __exit__(self, *_: object) -> None:
        if self._close is None:  # else when nobody knows it any more
            os.close(self.descriptor)

    def require(self, num_bytes: int, *, is_all: bool) -> None:
        """Raise WrongSizeError unless the file is so long, and no longer if that ``is_all`` of it.

        Of a store that may come with the next read.
        """
        # A mapped file that is too short would kill the process instead of raising.
        _require_size(self.num_bytes, num_bytes, is_all=is_all)

    def read_into(self, target: Array, position: int) -> None:
        """Fill a C-contiguous array; EOFError if the file ends before."""
        pread(self.descriptor, target, position)

    def read_runs(self, runs: Sequence[tuple[Array, int]]) -> None:
        if hasattr(os, "posix_fadvise") and not is_cached(self.descriptor, *runs[0]):
            for target, position in runs:
                os.posix_fadvise(self.descriptor, position, target.nbytes, os.POSIX_FADV_WILLNEED)
        for target, position in runs:
            pread(self.descriptor, target, position)

    def view(self, position: int, num_bytes: int, scratch: Array | None = None) -> Array:
        """Some bytes of the file, in ``scratch`` if that is of use; may be read-only."""
        block = np.empty(num_bytes, dtype=np.uint8) if scratch is None else scratch[:num_bytes]
        pread(self.descriptor, block, position)
        return block

    def expect(self, position: int, num_bytes: int) -> None:
        """Get ready for many small reads of these bytes, where each would be a request."""


def pread(descriptor: int, target: Array, position: int) -> None:
    """Fill a C-contiguous array from a file; EOFError if it ends before."""
    count = 0
    if target.nbytes <= _MOST_AT_ONCE:
        count = os.preadv(descriptor, [target], position)  # type: ignore[list-item]
    if count == target.nbytes:
        return
    rest = target.reshape(-1).view(np.uint8)
    while count < len(rest):
        rest, position = rest[count:], position + count
        count = os.preadv(descriptor, [rest[:_MOST_AT_ONCE]], position)  # type: ignore[list-item]
        if count == 0:
            raise EOFError("the file ended early")


def is_cached(descriptor: int, target: Array, position: int) -> bool:
    """Whether a read takes no waiting; False where that is not known. ``target`` may be filled."""
    try:
        count = os.preadv(descriptor, [target], position, os.RWF_NOWAIT)  # type: ignore[list-item]
    except (AttributeError, OSError):  # the former where the system has no such read
        return False
    return count == target.nbytes


def _require_size(size: int, num_bytes: int, *, is_all: bool) -> None:
    if size < num_bytes or (is_all and size != num_bytes):
        raise WrongSizeError(size)


class StoreFile(AbstractContextManager["StoreFile"]):
    """An object of a store, read like a ``LocalFile``. It is asked for with the first read."""

    descriptor = -1
    most_gap = _MOST_STORE_GAP_BYTES

    def __init__(self, path: ObjectPath, name: str, reads: FolderReads) -> None:
        self._path, self._name, self._reads = path, name, reads
        self._required, self._is_all = 0, False
        self._ahead, self._ahead_at = np.empty(0, dtype=np.uint8), 0

    def __exit__(self, *_: object) -> None:
        pass

    def require(self, num_bytes: int, *, is_all: bool) -> None:
        self._required, self._is_all = num_bytes, is_all
        known = self._reads.sizes.get(self._name)
        if known is not None:
            _require_size(known, num_bytes, is_all=is_all)

    def read_into(self, target: Array, position: int) -> None:
        whole = target.reshape(-1).view(np.uint8)
        step = self._reads.limits.most_bytes

        def read_part(start: int) -> None:
            part = whole[start : start + step]
            part[...] = self.view(position + start, len(part))

        in_threads(read_part, range(0, len(whole), step), self._reads.limits.threads)

    def read_runs(self, runs: Sequence[tuple[Array, int]]) -> None:
        in_threads(lambda run: self.read_into(*run), runs, self._reads.limits.threads)

    def view(self, position: int, num_bytes: int, scratch: Array | None = None) -> Array:
        del scratch  # the answer of the store is in memory of its own
        start = position - self._ahead_at
        if 0 <= start <= start + num_bytes <= len(self._ahead):
            return self._ahead[start : start + num_bytes]
        data = self._get(position, num_bytes)
        if len(data) != num_bytes:
            raise EOFError("the file ended early")
        return data

    def expect(self, position: int, num_bytes: int) -> None:
        if num_bytes <= self._reads.limits.most_bytes:
            self._ahead, self._ahead_at = self._get(position, num_bytes), position

    def _get(self, position: int, num_bytes: int) -> Array:
        """Bytes of the object; fewer where it ends."""
        if num_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            with self._reads.slots:
                data, size = self._path.store.get_range(self._path.key, position, num_bytes)
        except OSError as error:
            # A range behind the end is refused, in the words of each store.
            is_there = not isinstance(error, FileNotFoundError)
            known = self._reads.size_of(self._name) if is_there else None
            if known is None or known > position:
                raise
            data, size = memoryview(b""), known
        self._reads.sizes[self._name] = size
        _require_size(size, self._required, is_all=self._is_all)
        return np.frombuffer(data, dtype=np.uint8)


OpenFile = LocalFile | StoreFile


class FolderReads:
    """Reads the files of one folder; ``slots`` and the known ``sizes`` are of objects."""

    keeps_open = False
    """Whether the last files stay open. Network file systems see changes where one is opened."""

    def __init__(
        self, folder: Location, limits: ReadLimits, can_map: Callable[[Any], bool] | None = None
    ) -> None:
        self.folder: Location = folder
        self.limits: ReadLimits = limits
        self._can_map = can_map
        self.slots: threading.Semaphore = threading.Semaphore(limits.threads)
        self.sizes: dict[str, int] = {}
        self._open: dict[tuple[int, int, int], LocalFile] = {}

    def __reduce__(self) -> tuple[type[FolderReads], tuple[Any, ...]]:
        # A copy in another process has requests of its own.
        return FolderReads, (self.folder, self.limits, self._can_map)

    @cached_property
    def maps_files(self) -> bool:
        """Whether strided parts are read through a mapping."""
        return self._can_map is not None and self._can_map(self.folder)

    def open(self, name: str) -> OpenFile:
        """Open a file; FileNotFoundError if it is not there, in a store with the first read."""
        if not isinstance(self.folder, Path):
            return StoreFile(self.folder / name, name, self)
        path = f"{self.folder}/{name}"
        if not self.keeps_open:
            return LocalFile(path)
        status = os.stat(path)
        known = status.st_dev, status.st_ino, status.st_size
        if (file := self._open.get(known)) is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.clear()
            try:
                file = self._open[known] = LocalFile(path, stays_open=True)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._open.clear()
                return LocalFile(path)
        return file

    def size_of(self, name: str) -> int | None:
        if isinstance(self.folder, Path):
            try:
                with LocalFile(f"{self.folder}/{name}") as file:
                    return file.num_bytes
            except FileNotFoundError:
                return None
        size = self.sizes.get(name)
        if size is None and (size := location.size_of(self.folder / name)) is not None:
            self.sizes[name] = size
        return size


def reads_below(
    folder: Location, threads: int, buffer_bytes: int, can_map: Callable[[Path], bool]
) -> FolderReads:
    """How the files of a folder are read, with so many threads and so much memory at a time."""
    if isinstance(folder, Path):
        limits = ReadLimits(threads=threads, most_bytes=max(1, buffer_bytes // threads))
        return FolderReads(folder, limits, can_map)
    options = folder.store.options
    part_bytes = max(1, min(options.part_bytes, buffer_bytes))
    at_a_time = max(1, min(options.parallelism, buffer_bytes // part_bytes))
    limits = ReadLimits(
        threads=at_a_time,
        most_bytes=part_bytes,
        small_bytes=part_bytes // 4,
        run_bytes=part_bytes - part_bytes // 4,
        gap_bytes=_MOST_STORE_GAP_BYTES,
        most_unwanted=_MOST_STORE_GAP_BYTES,
        run_threads=at_a_time,
    )
    return FolderReads(folder, limits)


def open_file(folder: Location, name: str) -> OpenFile:
    """A file to read a few bytes from."""
    if isinstance(folder, Path):
        return LocalFile(f"{folder}/{name}")
    options = folder.store.options
    limits = ReadLimits(threads=options.parallelism, most_bytes=options.part_bytes)
    return FolderReads(folder, limits).open(name)
