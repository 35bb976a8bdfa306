"""Data files, filled with values one behind the other, straight from where these are in memory."""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem.local import file_system_type
from dist_checkpointing.format.digests import Digest
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.storage.options import Durability, StorageOptions

MOST_PARTS: Final = os.sysconf("SC_IOV_MAX")
MOST_PENDING_BYTES: Final = 2**22
_HASHED_BYTES: Final = 2**21
"""Of a large value so much is hashed and then written, while the processor has it at hand. What is
written to such a block of the file in one call, Linux keeps in a huge page, which is mapped faster.
"""
_WRITTEN_BYTES: Final = 2**26
_MAKING_ROOM: Final = frozenset({"ext4", "xfs"})
"""File systems on which to make room for a large value first takes less time than to find it block
by block: the write itself then costs two thirds."""

LARGE_BYTES: Final = 2**20
"""Values below this are written many at a time."""

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

_writev = ctypes.CDLL(None, use_errno=True).writev
_writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev.restype = ctypes.c_ssize_t


class DataFiles:
    """A row of files, each begun when the one before it is full; used by one thread.

    Args:
        root: the checkpoint.
        stem: relative path of the files, but for the end of their names; its folder exists.
        options: how large files may be, and whether they must be durable.
        most_pending: bytes that may wait to be written together.
        report: called with the bytes of tensors that were written since the last call.

    Attributes:
        names: relative paths of the files.
        file: for each value, position in ``names``.
        offset: for each value, its first byte.
        length: for each value, how many bytes it has.
    """

    def __init__(
        self,
        root: Path,
        stem: str,
        options: StorageOptions,
        most_pending: int,
        report: Callable[[int], None],
    ) -> None:
        self._root = root
        self._stem = stem
        self._is_durable = options.durability is Durability.FSYNC
        # Elsewhere the C library would write zeros to make room, and fsync gains nothing by it.
        self._makes_room = not self._is_durable and file_system_type(root) in _MAKING_ROOM
        self._most_bytes = options.data_file_bytes
        self._most_pending = min(most_pending, MOST_PENDING_BYTES)
        self._report = report
        self._descriptor: int | None = None
        self._end = 0
        self._sizes: list[int] = []
        self._pending: list[Any] = []
        self._pending_bytes = self._unreported = 0
        self.names: list[str] = []
        self.file: array[int] = array("q")
        self.offset: array[int] = array("q")
        self.length: array[int] = array("q")

    def put(self, value: Any, num_bytes: int, reported: int) -> None:
        """Add a value, which is written soon and must stay as it is until then.

        Args:
            value: a contiguous array, or bytes.
            num_bytes: its size.
            reported: how many of them count as written.
        """
        self._place(num_bytes)
        if num_bytes == 0:
            return
        self._pending.append(value)
        self._pending_bytes += num_bytes
        self._unreported += reported
        if self._pending_bytes >= self._most_pending or len(self._pending) >= MOST_PARTS:
            self.flush()

    def put_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        """Add values that are somewhere in memory, and write them at once.

        Args:
            addresses: of the first byte of each.
            lengths: bytes of each.
        """
        self.flush()
        first = 0
        while first < len(lengths):
            self._require_file()
            starts = self._end + np.cumsum(lengths[first:]) - lengths[first:]
            last = first + int(np.searchsorted(starts, self._most_bytes))
            own = lengths[first:last]
            self.file.frombytes(np.full(len(own), len(self.names) - 1).tobytes())
            self.offset.frombytes(starts[: len(own)].tobytes())
            self.length.frombytes(own.tobytes())
            self._end += int(own.sum())
            assert self._descriptor is not None
            _write_memory(self._descriptor, addresses[first:last], own)
            first = last
        self._report(int(lengths.sum()))

    def put_large(self, values: Array, reported: int, digest: Digest | None) -> None:
        """Add a contiguous array and write it at once; hash it on the way."""
        self.begin_large(values.nbytes)
        self.put_block(values, reported, digest)

    def begin_large(self, num_bytes: int) -> None:
        """Add a value that comes in blocks, by ``put_block`` alone."""
        self.flush()
        self._place(num_bytes)
        if self._makes_room and self._descriptor is not None and num_bytes:
            os.posix_fallocate(self._descriptor, self.offset[-1], num_bytes)

    def put_block(self, values: Array, reported: int, digest: Digest | None) -> None:
        """Write a contiguous array at once, behind what was written last; hash it on the way."""
        assert self._descriptor is not None
        view = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        step = _HASHED_BYTES if digest is not None else _WRITTEN_BYTES
        first = step - os.lseek(self._descriptor, 0, os.SEEK_CUR) % step
        for start in range(first - step, len(view), step):
            block = view[max(start, 0) : start + step]
            if digest is not None:
                digest.update(block)
            _write_all(self._descriptor, [block], len(block))
        self._report(reported)

    def finish(self) -> list[SealedFile]:
        """Write what is left; the files are durable then, but not their names."""
        self.flush()
        self._close(is_durable=self._is_durable)
        return [SealedFile(n, size) for n, size in zip(self.names, self._sizes, strict=True)]

    def give_up(self) -> None:
        """Let go of the file that is open."""
        self._pending.clear()
        self._close(is_durable=False)

    def _place(self, num_bytes: int) -> None:
        """Note where the next value will lie."""
        self._require_file()
        self.file.append(len(self.names) - 1)
        self.offset.append(self._end)
        self.length.append(num_bytes)
        self._end += num_bytes

    def _require_file(self) -> None:
        """Begin a file if there is none, or it is full."""
        if self._descriptor is None or self._end >= self._most_bytes:
            self.flush()
            self._close(is_durable=self._is_durable)
            self._open()

    def _open(self) -> None:
        name = f"{self._stem}.{len(self.names)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self._root / name, flags, 0o666)
        self.names.append(name)
        self._end = 0

    def flush(self) -> None:
        """Write what waits."""
        if self._pending:
            assert self._descriptor is not None
            _write_all(self._descriptor, self._pending, self._pending_bytes)
            self._pending = []
            if self._unreported:
                self._report(self._unreported)
            self._pending_bytes = self._unreported = 0

    def _close(self, *, is_durable: bool) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._sizes.append(self._end)


def _write_memory(descriptor: int, addresses: Int64s, lengths: Int64s) -> None:
    """Write what lies at some addresses, one behind the other."""
    parts = np.stack([addresses, lengths], axis=1).astype(np.uintp)
    first = 0
    while first < len(parts):
        waiting = parts[first : first + MOST_PARTS]
        written = _writev(descriptor, waiting.ctypes.data, len(waiting))
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


def _write_all(descriptor: int, parts: list[Any], num_bytes: int) -> None:
    """Write parts one behind the other; they must not be too many for one call."""
    written = os.writev(descriptor, parts)
    if written < num_bytes:
        # Rare: a signal came, or the disk is nearly full.
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]
