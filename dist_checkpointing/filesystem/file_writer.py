"""Large files on their way out: written from memory, on a file system or as an upload."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem.local_folder import file_system_type
from dist_checkpointing.filesystem.object_store import Location, ObjectPath

Int64s = npt.NDArray[np.int64]
MOST_PARTS: Final = os.sysconf("SC_IOV_MAX")
_HASHED_BYTES: Final = 2**21
"""Of a large value so much is hashed and then written, while the processor has it at hand. What is
written to such a block of the file in one call, Linux keeps in a huge page, which is mapped faster.
"""
_WRITTEN_BYTES: Final = 2**26
_MAKING_ROOM: Final = frozenset({"ext4", "xfs"})
"""File systems on which to make room for a large value first takes less time than to find it block
by block: the write itself then costs two thirds."""
_OBJECT_BYTES: Final = 2**27
"""Objects of this size are put and got at full speed, and two of them can be under way at a time
without much memory."""
_WAITING_PARTS: Final = 1
_writev = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t
_MEMORY: Final = memoryview((ctypes.c_char * (2**63 - 1)).from_address(0)).cast("B")


class NewFile(ABC):
    """A file that is written from its beginning to its end, by one thread.

    Attributes:
        position: Bytes that have been written.
    """

    position = 0

    @abstractmethod
    def write(self, parts: Sequence[Any], num_bytes: int, *, stays: bool = False) -> None:
        """Write contiguous arrays or bytes, at most ``MOST_PARTS`` of them, ``num_bytes`` in all.

        ``stays`` says whether the memory stays as it is until the file is closed.
        """

    @abstractmethod
    def write_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        """Write what lies at some addresses, one behind the other."""

    @abstractmethod
    def block_bytes(self, *, is_hashed: bool) -> int:
        """How much of a large value is best written at a time, up to a multiple of so much."""

    def make_room(self, offset: int, num_bytes: int) -> None:  # noqa: B027 - a hook
        """Get ready for a large value."""

    @abstractmethod
    def close(self, *, is_durable: bool) -> str | None:
        """End the file; its ETag if it is an object."""

    @abstractmethod
    def give_up(self) -> None:
        """Close a file that is not complete."""


def create(path: Location, *, makes_room: bool = False) -> NewFile:
    """Begin a file that does not exist, in a folder that does; see ``makes_room``."""
    return _LocalFile(path, makes_room=makes_room) if isinstance(path, Path) else _Upload(path)


def put(folder: Location, name: str, data: Any, *, is_new: bool = True) -> str | None:
    """Write a file, in a folder that exists, at once; its ETag if it is an object.

    If it ``is_new``, it must not exist, where that can be told at no cost.
    """
    if isinstance(folder, ObjectPath):
        file = _Upload(folder / name)
        try:
            file.write([data], len(data), stays=True)
            return file.close(is_durable=True)
        except BaseException:
            file.give_up()
            raise
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else os.O_TRUNC)
    descriptor = os.open(f"{folder}/{name}", flags, 0o666)
    try:
        _write_all(descriptor, memoryview(data))
    finally:
        os.close(descriptor)
    return None


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def makes_room(folder: Location) -> bool:
    """Whether files in a folder are written faster if room is made for them first."""
    return isinstance(folder, Path) and file_system_type(folder) in _MAKING_ROOM


def file_bytes(folder: Location, most_bytes: int) -> int:
    """The size at which a file in a folder is large enough, if at most this is wanted."""
    return most_bytes if isinstance(folder, Path) else min(most_bytes, _OBJECT_BYTES)


class _LocalFile(NewFile):
    """A file of a mounted file system."""

    def __init__(self, path: Path, *, makes_room: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._makes_room = makes_room

    def write(self, parts: Sequence[Any], num_bytes: int, *, stays: bool = False) -> None:
        del stays
        written = os.writev(self._descriptor, parts)
        if written < num_bytes:
            # Rare: a signal came, the disk is nearly full, or it is more than Linux takes at once.
            for part in parts:
                view = memoryview(part).cast("B")
                _write_all(self._descriptor, view[written:])
                written = max(0, written - len(view))
        self.position += num_bytes

    def write_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        parts = np.stack([addresses, lengths], axis=1).astype(np.uintp)
        first = 0
        while first < len(parts):
            waiting = parts[first : first + MOST_PARTS]
            written = _writev(self._descriptor, waiting.ctypes.data, len(waiting))
            if written < 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                raise OSError(code, os.strerror(code))
            ends = np.cumsum(waiting[:, 1])
            whole = int(np.searchsorted(ends, written, side="right"))
            first += whole
            if whole < len(waiting):
                # Rare: a signal came, or the disk is nearly full.
                begun = written - (int(ends[whole - 1]) if whole else 0)
                parts[first] += np.array([begun, -begun]).astype(np.uintp)
        self.position += int(lengths.sum())

    def block_bytes(self, *, is_hashed: bool) -> int:
        return _HASHED_BYTES if is_hashed else _WRITTEN_BYTES

    def make_room(self, offset: int, num_bytes: int) -> None:
        if self._makes_room and num_bytes:
            os.posix_fallocate(self._descriptor, offset, num_bytes)

    def close(self, *, is_durable: bool) -> str | None:
        try:
            if is_durable:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
        return None

    def give_up(self) -> None:
        os.close(self._descriptor)


class _Upload(NewFile):
    """An object. Its parts are sent by another thread while the next ones are made.

    Memory that stays as it is goes out from where it is; of other values a few parts are copied.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._part_bytes = path.store.options.part_bytes
        self._waiting: queue.Queue[Any] = queue.Queue(_WAITING_PARTS)
        self._begun: list[Any] = []
        self._begun_bytes = 0
        self._sender: threading.Thread | None = None
        self._is_ended = self._is_given_up = False
        self._etag: str | None = None
        self._error: BaseException | None = None

    def write(self, parts: Sequence[Any], num_bytes: int, *, stays: bool = False) -> None:
        self.position += num_bytes
        if not stays and num_bytes <= self._part_bytes:
            parts = [b"".join(parts)]
            stays = True
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), self._part_bytes):
                block = view[start : start + self._part_bytes]
                self._add(block if stays else memoryview(bytes(block)))

    def write_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        # Small ones: to send them one by one costs more than to copy them.
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            limit = self._part_bytes + (int(ends[first - 1]) if first else 0)
            last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
            runs = zip(addresses[first:last].tolist(), lengths[first:last].tolist(), strict=True)
            self._add(memoryview(b"".join([_MEMORY[a : a + n] for a, n in runs])))
            first = last
        self.position += int(lengths.sum())

    def block_bytes(self, *, is_hashed: bool) -> int:
        del is_hashed
        return self._part_bytes

    def _add(self, view: memoryview) -> None:
        if self._error is not None:
            raise self._error
        if self._sender is not None:
            self._waiting.put(view)
            return
        self._begun.append(view)
        self._begun_bytes += len(view)
        if self._begun_bytes > self._part_bytes:
            self._sender = threading.Thread(target=self._send, name="upload", daemon=True)
            self._sender.start()

    def _send(self) -> None:
        try:
            self._etag = self._path.store.put_parts(self._path.key, self._parts())
        except BaseException as error:  # noqa: BLE001 - raised where the parts are made
            self._error = error
            while not self._is_ended:  # nobody must wait for room
                self._is_ended = self._waiting.get() is None

    def _parts(self) -> Iterator[Any]:
        yield from self._begun
        self._begun = []
        while not self._is_ended:
            part = self._waiting.get()
            self._is_ended = part is None
            if self._is_given_up:
                raise InterruptedError("the save was given up")
            if part is not None:
                yield part

    def close(self, *, is_durable: bool) -> str | None:
        del is_durable  # what the store has answered is durable
        if self._sender is None:
            return self._path.store.put(self._path.key, b"".join(self._begun))
        self._waiting.put(None)
        self._sender.join()
        if self._error is not None:
            raise self._error
        return self._etag

    def give_up(self) -> None:
        self._is_given_up = True  # the upload is aborted at its next part
        if self._sender is not None:
            self._waiting.put(None)
            self._sender.join()
