"""Data files, filled with values one behind the other, straight from where these are in memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import Digest
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.storage.options import Durability, StorageOptions

MOST_PENDING_BYTES: Final = 2**22
LARGE_BYTES: Final = 2**20
"""Values below this are written many at a time."""

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


class DataFiles:
    """A row of files, each begun when the one before it is full; used by one thread.

    Args:
        root: the checkpoint.
        stem: relative path of the files, but for the end of their names; its folder exists.
        options: how large files may be, and whether they must be durable.
        most_pending: bytes that may wait to be written together.
        report: called with the bytes of tensors that were written since the last call.

    Attributes:
        names: Relative paths of the files.
        file: For each value the position of its file in ``names``.
        offset: For each value its first byte.
        length: For each value its bytes.
    """

    def __init__(
        self,
        root: Location,
        stem: str,
        options: StorageOptions,
        most_pending: int,
        report: Callable[[int], None],
    ) -> None:
        self._root = root
        self._stem = stem
        self._is_durable = options.durability is Durability.FSYNC
        # Elsewhere the C library would write zeros to make room, and fsync gains nothing by it.
        self._makes_room = not self._is_durable and file_writer.makes_room(root)
        self._most_bytes = file_writer.file_bytes(root, options.data_file_bytes)
        self._most_pending = min(most_pending, MOST_PENDING_BYTES)
        self._report = report
        self._open_file: file_writer.NewFile | None = None
        self._end = 0
        self._sealed: list[SealedFile] = []
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
        if (
            self._pending_bytes >= self._most_pending
            or len(self._pending) >= file_writer.MOST_PARTS
        ):
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
            file = self._required_file()
            starts = self._end + np.cumsum(lengths[first:]) - lengths[first:]
            last = first + int(np.searchsorted(starts, self._most_bytes))
            own = lengths[first:last]
            self.file.frombytes(np.full(len(own), len(self.names) - 1).tobytes())
            self.offset.frombytes(starts[: len(own)].tobytes())
            self.length.frombytes(own.tobytes())
            self._end += int(own.sum())
            file.write_memory(addresses[first:last], own)
            first = last
        self._report(int(lengths.sum()))

    def put_large(self, values: Array, reported: int, digest: Digest | None) -> None:
        """Add a contiguous array, which must stay as it is; hash it on the way."""
        self.begin_large(values.nbytes)
        self._put_block(values, reported, digest, stays=True)

    def begin_large(self, num_bytes: int) -> None:
        """Add a value that comes in blocks, by ``put_block`` alone."""
        self.flush()
        self._place(num_bytes).make_room(self.offset[-1], num_bytes)

    def put_block(self, values: Array, reported: int, digest: Digest | None) -> None:
        """Write a contiguous array at once, behind what was written last; hash it on the way."""
        self._put_block(values, reported, digest, stays=False)

    def _put_block(
        self, values: Array, reported: int, digest: Digest | None, *, stays: bool
    ) -> None:
        file = self._open_file
        assert file is not None
        view = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        step = file.block_bytes(is_hashed=digest is not None)
        first = step - file.position % step
        for start in range(first - step, len(view), step):
            block = view[max(start, 0) : start + step]
            if digest is not None:
                digest.update(block)
            file.write([block], len(block), stays=stays)
        self._report(reported)

    def finish(self) -> list[SealedFile]:
        """Write what is left; the files are durable then, but not their names."""
        self.flush()
        self._close(is_durable=self._is_durable)
        return self._sealed

    def give_up(self) -> None:
        """Let go of the file that is open."""
        self._pending.clear()
        file, self._open_file = self._open_file, None
        if file is not None:
            file.give_up()

    def _place(self, num_bytes: int) -> file_writer.NewFile:
        """Note where the next value will lie."""
        file = self._required_file()
        self.file.append(len(self.names) - 1)
        self.offset.append(self._end)
        self.length.append(num_bytes)
        self._end += num_bytes
        return file

    def _required_file(self) -> file_writer.NewFile:
        """The file that is open; begins one if there is none, or it is full."""
        if self._open_file is None or self._end >= self._most_bytes:
            self.flush()
            self._close(is_durable=self._is_durable)
            name = f"{self._stem}.{len(self.names)}"
            self._open_file = file_writer.create(self._root / name, makes_room=self._makes_room)
            self.names.append(name)
            self._end = 0
        return self._open_file

    def flush(self) -> None:
        """Write what waits."""
        if self._pending:
            assert self._open_file is not None
            self._open_file.write(self._pending, self._pending_bytes)
            self._pending = []
            if self._unreported:
                self._report(self._unreported)
            self._pending_bytes = self._unreported = 0

    def _close(self, *, is_durable: bool) -> None:
        file, self._open_file = self._open_file, None
        if file is not None:
            etag = file.close(is_durable=is_durable)
            self._sealed.append(SealedFile(self.names[-1], self._end, etag=etag))
