"""Large files on their way out: written from memory, on a file system or as an upload."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem.local_folder import Durability, file_system_type
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.threads import fill

Int64s = npt.NDArray[np.int64]
MOST_PARTS: Final = os.sysconf("SC_IOV_MAX")
_MAKING_ROOM: Final = frozenset({"ext4", "xfs"})
"""File systems on which to make room for a large value first takes less time than to find it block
by block: the write itself then costs two thirds."""
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OBJECT_BYTES: Final = 2**27
"""Objects of this size are put and got at full speed, and two of them can be under way at a time
without much memory."""
_writev = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t
_MEMORY: Final = memoryview((ctypes.c_char * (2**63 - 1)).from_address(0)).cast("B")
"""All memory of this process, of which only what belongs to a tensor may be read."""


def makes_room(folder: Location) -> bool:
    """Whether files in a folder are written faster if room is made for them first."""
    return isinstance(folder, Path) and file_system_type(folder) in _MAKING_ROOM


def file_bytes(folder: Location, most_bytes: int) -> int:
    """The size at which a file in a folder is large enough, if at most this is wanted."""
    return most_bytes if isinstance(folder, Path) else min(most_bytes, _OBJECT_BYTES)


def files_at_a_time(folder: Location, threads: int, file_bytes: int, buffer_bytes: int) -> int:
    """How many files are best written at a time; to put an object is mostly to wait."""
    if isinstance(folder, Path):
        return threads
    return max(threads, min(folder.store.options.parallelism, buffer_bytes // max(1, file_bytes)))


class _LocalFile:
    """A file of a mounted file system.

    Attributes:
        position: Bytes that have been written.
        block_bytes: How much of a large value is best written at a time, up to a multiple of it.
        hashed_bytes: The same for a value that is hashed on the way: so much is hashed and then
            written, while the processor has it at hand. What is written to such a block of the file
            in one call, Linux keeps in a huge page, which is mapped faster.
    """

    block_bytes = 2**26
    hashed_bytes = 2**21

    def __init__(self, folder: Path, name: str) -> None:
        path = f"{folder}/{name}"
        try:
            self._descriptor = os.open(path, _NEW, 0o666)
        except FileNotFoundError:
            for above in itertools.accumulate(name.split("/")[:-1], "{}/{}".format):
                with suppress(FileExistsError):
                    os.mkdir(f"{folder}/{above}")
            self._descriptor = os.open(path, _NEW, 0o666)
        self.position: int = 0

    def write(self, parts: Sequence[Any], num_bytes: int, *, stays: bool = False) -> None:
        """Write contiguous arrays or bytes, at most ``MOST_PARTS`` of them, ``num_bytes`` in all.

        ``stays`` says whether the memory stays as it is until the file is closed.
        """
        del stays
        written = os.writev(self._descriptor, parts)
        if written < num_bytes:
            _write_rest(self._descriptor, parts, written)
        self.position += num_bytes

    def write_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        parts = np.array([addresses, lengths], dtype=np.uintp).T.copy()
        for first in range(0, len(parts), MOST_PARTS):
            batch = parts[first : first + MOST_PARTS]
            written = _writev(self._descriptor, batch.__array_interface__["data"][0], len(batch))
            code = ctypes.get_errno() if written < 0 else 0
            if code not in (0, errno.EINTR):
                raise OSError(code, os.strerror(code))
            num_bytes = int(batch[:, 1].sum())
            if written < num_bytes:
                _write_rest(self._descriptor, memory_at(*batch.T), max(0, written))
            self.position += num_bytes

    def make_room(self, offset: int, num_bytes: int) -> None:
        """Get ready for a large value; see ``makes_room``."""
        if num_bytes:
            os.posix_fallocate(self._descriptor, offset, num_bytes)

    def close(self, *, is_durable: bool) -> str | None:
        """End the file; its ETag if it is an object."""
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return None

    def give_up(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _write_rest(descriptor: int, parts: Iterable[Any], written: int) -> None:
    """Write what a call has left out.

    That is rare: a signal came, the disk is nearly full, or it is more than Linux takes at once.
    """
    for part in parts:
        view = memoryview(part).cast("B")
        rest, written = view[written:], max(0, written - len(view))
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def memory_at(addresses: npt.NDArray[Any], num_bytes: npt.NDArray[Any]) -> list[memoryview]:
    """Runs of memory, which must stay for as long as they are used."""
    runs = zip(addresses.tolist(), (addresses + num_bytes).tolist(), strict=True)
    return [_MEMORY[start:stop] for start, stop in runs]


class _Upload:
    """An object, written like a ``_LocalFile``.

    Its parts are sent by another thread while the next ones are made. Memory that stays as it is
    goes out from where it is; of other values a few parts are copied.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.block_bytes: int = path.store.options.part_bytes
        self.hashed_bytes: int = self.block_bytes
        self.position: int = 0
        self._begun: list[Any] = []
        self._waiting: queue.Queue[Any] = queue.Queue(1)
        self._sender: threading.Thread | None = None
        self._is_given_up = False
        self._sent: Future[str | None] = Future()

    def write(self, parts: Sequence[Any], num_bytes: int, *, stays: bool = False) -> None:
        self.position += num_bytes
        if not stays and num_bytes <= self.block_bytes:
            parts, stays = [b"".join(parts)], True
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), self.block_bytes):
                block = view[start : start + self.block_bytes]
                self._add(block if stays else memoryview(bytes(block)))

    def write_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        # Small ones: to send them one by one costs more than to copy them.
        self.position += int(lengths.sum())
        ends, first = np.cumsum(lengths), 0
        while first < len(ends):
            limit = self.block_bytes + (int(ends[first - 1]) if first else 0)
            last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
            runs = memory_at(addresses[first:last], lengths[first:last])
            self._add(memoryview(b"".join(runs)))
            first = last

    def make_room(self, offset: int, num_bytes: int) -> None:
        pass

    def _add(self, view: memoryview) -> None:
        if self._sent.done():
            self._sent.result()  # raises: it ends before its last part only if it fails
        if self._sender is not None:
            self._waiting.put(view)
            return
        self._begun.append(view)
        if self.position > self.block_bytes:
            self._sender = threading.Thread(target=self._send, name="upload", daemon=True)
            self._sender.start()

    def _send(self) -> None:
        parts = iter(self._waiting.get, None)
        fill(self._sent, lambda: self._path.store.put_parts(self._path.key, self._parts(parts)))
        for _ in parts:  # nobody must wait for room
            pass

    def _parts(self, waiting: Iterator[memoryview]) -> Iterator[memoryview]:
        yield from self._begun
        self._begun = []
        for part in waiting:
            if self._is_given_up:
                break
            yield part
        if self._is_given_up:
            raise InterruptedError("the save was given up")

    def close(self, *, is_durable: bool) -> str | None:
        del is_durable  # what the store has answered is durable
        self._end()
        if self._sender is None:
            return self._path.store.put(self._path.key, b"".join(self._begun))
        return self._sent.result()

    def give_up(self) -> None:
        self._is_given_up = True  # the upload is aborted at its next part
        self._end()

    def _end(self) -> None:
        if self._sender is not None:
            self._waiting.put(None)
            self._sender.join()


NewFile = _LocalFile | _Upload
"""A file that is written from its beginning to its end, by one thread."""


def create(folder: Location, name: str) -> NewFile:
    """Begin a file that does not exist, in a folder that does; those in its name are made."""
    return _LocalFile(folder, name) if isinstance(folder, Path) else _Upload(folder / name)


def put(
    folder: Location, name: str, data: Any, durability: Durability = Durability.PAGE_CACHE
) -> str | None:
    """Write a file at once, see ``create``; its ETag if it is an object.

    It must not exist, where that is known at no cost. A power cut takes it until its folder is
    synced. What an error leaves stays: its name may be that of another save's file by then.
    """
    file = create(folder, name)
    try:
        file.write([data], len(data), stays=True)
        return file.close(is_durable=durability is Durability.FSYNC)
    except BaseException:
        file.give_up()
        raise
