"""Ranges of files, read into memory: of a mounted file system, or by requests to a store."""

from __future__ import annotations

import errno
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.threads import in_threads

Array = npt.NDArray[Any]
READ_WHOLE_BYTES: Final = 2**14
"""Reading so much of a chunk in vain costs less than reading the chunk by itself."""
_MOST_STORE_GAP_BYTES: Final = 2**20
"""Reading over so much takes a store as long as one more request."""


class WrongSizeError(EOFError):
    """A file does not have the size that it must have.

    Attributes:
        found: Its size in bytes.
    """

    def __init__(self, found: int) -> None:
        super().__init__(f"the file ends at byte {found}")
        self.found = found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How files are best read where they are.

    Attributes:
        threads: Reads at a time.
        most_bytes: Memory of each of them for what cannot be read in place.
        maps_files: Whether strided parts are read through a mapping.
        small_bytes: Chunks up to this size are read together with their neighbours.
        run_bytes: About so much is read together.
        gap_bytes: So much between small chunks is read over.
        strided_gap: Bytes between the runs of a strided part that are read over; None where that
            depends on the length of the runs.
        most_unwanted: So much of a small chunk is read in vain rather than by a read of its own.
        run_threads: Reads of small neighbours at a time. Where a read takes no waiting, many small
            copies are work for the interpreter, and threads would only take turns.
    """

    threads: int
    most_bytes: int
    maps_files: bool = False
    small_bytes: int = 2**18
    run_bytes: int = 2**22
    gap_bytes: int = 2**16
    strided_gap: int | None = None
    most_unwanted: int = READ_WHOLE_BYTES
    run_threads: int = 1


class OpenFile(ABC):
    """A file to read from.

    Attributes:
        path: Its path or URL, for messages.
        descriptor: Descriptor of a local file; -1 for one that has none.
        most_gap: Bytes between the runs of a strided part that are read over; None where that
            depends on the length of the runs.
    """

    path: str
    descriptor: int = -1
    most_gap: int | None = None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the file."""

    @abstractmethod
    def require(self, num_bytes: int, *, is_all: bool) -> None:
        """Make sure that the file is so long, and no longer if that ``is_all`` of it.

        Raises:
            WrongSizeError: if it is not; of a store that may come with the next read.
        """

    @abstractmethod
    def read_into(self, target: Array, position: int) -> None:
        """Fill a C-contiguous array.

        Raises:
            EOFError: if the file ends before.
        """

    @abstractmethod
    def view(self, position: int, num_bytes: int, scratch: Array | None = None) -> Array:
        """Some bytes of the file, in ``scratch`` if that is of use; may be read-only.

        Raises:
            EOFError: if the file ends before.
        """

    @abstractmethod
    def read_runs(self, runs: Sequence[tuple[Array, int]]) -> None:
        """Fill C-contiguous arrays, each from its position."""

    def expect(self, position: int, num_bytes: int) -> None:  # noqa: B027 - a hook
        """Get ready for many small reads of these bytes, where each would be a request."""

    def is_cached(self, target: Array, position: int) -> bool:
        """Whether a read takes no waiting; also False where that is not known.

        ``target`` may be filled.
        """
        del target, position
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - an object has nothing to close
        """End the use of the file."""


def _require_size(size: int, num_bytes: int, *, is_all: bool) -> None:
    if size < num_bytes or (is_all and size != num_bytes):
        raise WrongSizeError(size)


class LocalFile(OpenFile):
    """A file of a mounted file system."""

    __slots__ = ("_num_bytes", "descriptor", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            self.close()
            raise
        self._num_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def require(self, num_bytes: int, *, is_all: bool) -> None:
        # A mapped file that is too short would kill the process instead of raising.
        _require_size(self._num_bytes, num_bytes, is_all=is_all)

    def read_into(self, target: Array, position: int) -> None:
        pread(self.descriptor, target, position)

    def view(self, position: int, num_bytes: int, scratch: Array | None = None) -> Array:
        block = np.empty(num_bytes, dtype=np.uint8) if scratch is None else scratch[:num_bytes]
        pread(self.descriptor, block, position)
        return block

    def read_runs(self, runs: Sequence[tuple[Array, int]]) -> None:
        descriptor = self.descriptor
        if not self.is_cached(*runs[0]):
            for target, position in runs:
                os.posix_fadvise(descriptor, position, target.nbytes, os.POSIX_FADV_WILLNEED)
        for target, position in runs:
            pread(descriptor, target, position)

    def is_cached(self, target: Array, position: int) -> bool:
        try:
            count = os.preadv(self.descriptor, [target], position, os.RWF_NOWAIT)  # type: ignore[list-item]
        except OSError:
            return False
        return count == target.nbytes

    def close(self) -> None:
        os.close(self.descriptor)


def pread(descriptor: int, target: Array, position: int) -> None:
    """Fill a C-contiguous array from a file.

    Raises:
        EOFError: if the file ends before.
    """
    count = os.preadv(descriptor, [target], position)  # type: ignore[list-item]
    if count == target.nbytes:
        return
    rest = target.reshape(-1).view(np.uint8)
    while count < len(rest):
        rest, position = rest[count:], position + count
        count = os.preadv(descriptor, [rest], position)  # type: ignore[list-item]
        if count == 0:
            raise EOFError("the file ended early")


class StoreFile(OpenFile):
    """An object of a store. It is asked for with the first read."""

    most_gap = _MOST_STORE_GAP_BYTES

    def __init__(self, path: ObjectPath, reads: FolderReads) -> None:
        self.path = str(path)
        self._object, self._reads = path, reads
        self._required, self._is_all = 0, False
        self._ahead, self._ahead_at = np.empty(0, dtype=np.uint8), 0

    @property
    def num_bytes(self) -> int:
        known = self._reads.sizes.get(self._object.key)
        if known is None:
            info = self._object.store.head(self._object.key)
            if info is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
            known = self._reads.sizes[self._object.key] = info.num_bytes
        return known

    def require(self, num_bytes: int, *, is_all: bool) -> None:
        self._required, self._is_all = num_bytes, is_all
        if self._object.key in self._reads.sizes:
            _require_size(self.num_bytes, num_bytes, is_all=is_all)

    def read_into(self, target: Array, position: int) -> None:
        whole = target.reshape(-1).view(np.uint8)
        step = self._reads.limits.most_bytes

        def read_part(start: int) -> None:
            part = whole[start : start + step]
            part[...] = self.view(position + start, len(part))

        in_threads(read_part, range(0, len(whole), step), self._reads.limits.threads)

    def expect(self, position: int, num_bytes: int) -> None:
        if num_bytes <= self._reads.limits.most_bytes:
            self._ahead, self._ahead_at = self._get(position, num_bytes), position

    def view(self, position: int, num_bytes: int, scratch: Array | None = None) -> Array:
        del scratch  # the answer of the store is in memory of its own
        start = position - self._ahead_at
        if 0 <= start <= start + num_bytes <= len(self._ahead):
            return self._ahead[start : start + num_bytes]
        data = self._get(position, num_bytes)
        if len(data) != num_bytes:
            raise EOFError("the file ended early")
        return data

    def _get(self, position: int, num_bytes: int) -> Array:
        """Bytes of the object; fewer where it ends."""
        store, key = self._object.store, self._object.key
        if num_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            with self._reads.slots:
                data, size = store.get_range(key, position, num_bytes)
        except FileNotFoundError:
            raise
        except OSError:
            # A range behind the end is refused, in the words of each store.
            if self.num_bytes > position:
                raise
            data, size = memoryview(b""), self.num_bytes
        self._reads.sizes[key] = size
        _require_size(size, self._required, is_all=self._is_all)
        return np.frombuffer(data, dtype=np.uint8)

    def read_runs(self, runs: Sequence[tuple[Array, int]]) -> None:
        in_threads(lambda run: self.read_into(*run), runs, self._reads.limits.threads)


class FolderReads:
    """Reads the files of one folder.

    Attributes:
        folder: Folder of the files.
        limits: How they are best read.
        open: Opens a file by its name relative to the folder. Raises ``FileNotFoundError``, in a
            store with the first read.
        slots: Requests that may be made now, of a store.
        sizes: Sizes of its objects that are known, by key.
    """

    def __init__(self, folder: Location, limits: ReadLimits) -> None:
        self.folder = folder
        self.limits = limits
        self.open: Callable[[str], OpenFile]
        if isinstance(folder, Path):
            root = f"{folder}/"
            self.open = lambda name: LocalFile(root + name)
        else:
            self.slots = threading.Semaphore(limits.threads)
            self.sizes: dict[str, int] = {}
            self.open = lambda name: StoreFile(folder / name, self)

    def __reduce__(self) -> tuple[type[FolderReads], tuple[Location, ReadLimits]]:
        # A copy in another process has requests of its own.
        return FolderReads, (self.folder, self.limits)

    def size_of(self, name: str) -> int | None:
        """Size of a file; None if it is not there."""
        try:
            with self.open(name) as file:
                return file.num_bytes
        except FileNotFoundError:
            return None


def reads_below(
    folder: Location, threads: int, buffer_bytes: int, maps_files: Callable[[Path], bool]
) -> FolderReads:
    """How the files of a folder are read, with so many threads and so much memory at a time."""
    if isinstance(folder, Path):
        part_bytes = max(1, buffer_bytes // threads)
        limits = ReadLimits(threads=threads, most_bytes=part_bytes, maps_files=maps_files(folder))
        return FolderReads(folder, limits)
    options = folder.store.options
    part_bytes = max(1, min(options.part_bytes, buffer_bytes))
    at_a_time = max(1, min(options.parallelism, buffer_bytes // part_bytes))
    limits = ReadLimits(
        threads=at_a_time,
        most_bytes=part_bytes,
        small_bytes=part_bytes // 4,
        run_bytes=part_bytes - part_bytes // 4,
        gap_bytes=_MOST_STORE_GAP_BYTES,
        strided_gap=_MOST_STORE_GAP_BYTES,
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
