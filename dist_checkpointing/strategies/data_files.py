"""Data files that hold many values: filled by threads, each with files of its own."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import Digest, bytes_of
from dist_checkpointing.format.geometry import Window
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.chunk_reads import axes_apart, run_positions
from dist_checkpointing.threads import in_threads

MOST_PENDING_BYTES: Final = 2**22

Array = npt.NDArray[Any]
Share = TypeVar("Share")


class DataFiles:
    """A row of files, each begun when the one before it is full; used by one thread.

    Their names begin with ``stem``, in a folder that exists. At most ``most_pending`` bytes wait to
    be written together. ``report`` gets the bytes of tensors written since the last call.

    Attributes:
        names: Relative paths of the files.
        extents: For each value the position of its file in ``names``, its first byte, its bytes.
        end: Bytes of the file that is open.
        sealed: The files that are complete.
        stays: Whether the memory of what waits stays as it is until its file is complete.
    """

    def __init__(
        self,
        root: Location,
        stem: str,
        options: StorageOptions,
        most_pending: int,
        report: Callable[[int], None],
    ) -> None:
        self._root, self._stem = root, stem
        self._is_durable = options.durability is Durability.FSYNC
        self.most_bytes: int = file_writer.file_bytes(root, options.data_file_bytes)
        self._most_pending = min(most_pending, MOST_PENDING_BYTES)
        self._report = report
        self._open_file: file_writer.NewFile | None = None
        self.end: int = 0
        self.sealed: list[SealedFile] = []
        self.stays: bool = False
        self._pending: list[Any] = []
        self._pending_bytes = self._unreported = 0
        self.names: list[str] = []
        self.extents: array[int] = array("q")

    @cached_property
    def _makes_room(self) -> bool:
        # Elsewhere the C library would write zeros to make room, and fsync gains nothing by it.
        return not self._is_durable and file_writer.makes_room(self._root)

    def put(self, value: Any, num_bytes: int, reported: int) -> None:
        """Add a value, an array or bytes, which must stay as it is until it is written soon.

        Of its bytes those in ``reported`` count as written.
        """
        self._place(num_bytes)
        if num_bytes == 0:
            return
        self._pending.append(value)
        self._pending_bytes += num_bytes
        self._unreported += reported
        is_full = self._pending_bytes >= self._most_pending
        if is_full or len(self._pending) >= file_writer.MOST_PARTS:
            self.flush()

    def put_memory(self, addresses: Int64s, lengths: Int64s) -> None:
        """Add values at some addresses in memory, and write them at once."""
        self.flush()
        first = 0
        while first < len(lengths):
            file = self._required_file()
            starts = self.end + lengths[first:].cumsum() - lengths[first:]
            last = first + int(starts.searchsorted(self.most_bytes))
            own = lengths[first:last]
            extents = np.full((len(own), 3), len(self.names) - 1)
            extents[:, 1], extents[:, 2] = starts[: len(own)], own
            self.extents.frombytes(extents.tobytes())
            self.end += int(own.sum())
            file.write_memory(addresses[first:last], own)
            first = last
        self._report(int(lengths.sum()))

    def put_large(self, values: Array, reported: int, digest: Digest | None) -> None:
        """Add a contiguous array, which must stay as it is; hash it on the way."""
        self.begin_large(values.nbytes)
        self.put_block(values, reported, digest, stays=True)

    def begin_large(self, num_bytes: int) -> None:
        """Add a value that comes in blocks, by ``put_block`` alone."""
        self.flush()
        file = self._place(num_bytes)
        if self._makes_room:
            file.make_room(self.end - num_bytes, num_bytes)

    def put_block(
        self, values: Array, reported: int, digest: Digest | None, *, stays: bool = False
    ) -> None:
        """Write a contiguous array at once, behind what was written last; hash it on the way."""
        file = self._open_file
        assert file is not None
        view = bytes_of(values)
        step = file.block_bytes if digest is None else file.hashed_bytes
        first = step - file.position % step
        for start in range(first - step, len(view), step):
            block = view[max(start, 0) : start + step]
            if digest is not None:
                digest.update(block)
            file.write([block], len(block), stays=stays)
        self._report(reported)

    def give_up(self) -> None:
        """Let go of the file that is open."""
        self._pending.clear()
        file, self._open_file = self._open_file, None
        if file is not None:
            file.give_up()

    def _place(self, num_bytes: int) -> file_writer.NewFile:
        """Note where the next value will lie."""
        file = self._required_file()
        self.extents.extend((len(self.names) - 1, self.end, num_bytes))
        self.end += num_bytes
        return file

    def _required_file(self) -> file_writer.NewFile:
        """The file that is open; begins one if there is none, or it is full."""
        if self._open_file is not None and self.end >= self.most_bytes:
            self.finish()
        if self._open_file is None:
            self.names.append(self.next_name())
            self._open_file = file_writer.create(self._root, self.names[-1])
            self.end = 0
        return self._open_file

    def next_name(self) -> str:
        """Relative path of the file to begin."""
        return f"{self._stem}.{len(self.names)}"

    def flush(self) -> None:
        """Write what waits."""
        if self._pending:
            assert self._open_file is not None
            self._open_file.write(self._pending, self._pending_bytes, stays=self.stays)
            self._pending = []
            if self._unreported:
                self._report(self._unreported)
            self._pending_bytes = self._unreported = 0

    def finish(self) -> list[SealedFile]:
        """Write what is left; the files are durable then, but not their names."""
        self.flush()
        file, self._open_file = self._open_file, None
        if file is not None:
            etag = file.close(is_durable=self._is_durable)
            self.sealed.append(SealedFile(self.names[-1], self.end, etag=etag))
        return self.sealed


def write_window(descriptor: int, start: int, window: Window, values: Array) -> None:
    """Write a window of an array that begins at byte ``start`` of a file; others write the rest.

    ``values`` must be C-contiguous. Byte ranges of different writers never overlap, so no lock is
    needed.
    """
    axes = axes_apart(window, values.itemsize, maps_files=False, most_gap=0)
    positions = (start + run_positions(window, axes, values.itemsize)).tolist()
    whole, size = bytes_of(values), values.nbytes // max(1, len(positions))
    blocks = (whole[first : first + size] for first in range(0, len(whole), max(1, size)))
    for block, position in zip(blocks, positions, strict=True):
        done = os.pwrite(descriptor, block, position)
        while done < len(block):
            done += os.pwrite(descriptor, block[done:], position + done)


def balanced(rows: Int64s, sizes: Int64s, count: int) -> list[Int64s]:
    """Some rows in so many parts of about the same bytes; ``sizes`` are those of all rows."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for row, size in zip(rows.tolist(), sizes[rows].tolist(), strict=True):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += size
    return [np.array(part, dtype=np.int64) for part in parts]


Files = TypeVar("Files", bound=DataFiles)


def write_shares(
    shares: Sequence[Share],
    open_files: Callable[[Share, Callable[[int], None]], Files],
    fill: Callable[[Share, Files], None],
    report: Callable[[int], None],
    threads: int,
) -> list[Files]:
    """Write each share to files of its own, on a thread; all stop when one has failed.

    ``open_files`` makes the files of a share, which report what is written.
    """
    failures: list[BaseException] = []

    def report_or_stop(num_bytes: int) -> None:
        if failures:
            raise failures[0]  # the others stop at what they write next
        report(num_bytes)

    def write(share: Share) -> Files:
        files = open_files(share, report_or_stop)
        try:
            fill(share, files)
            files.finish()
        except BaseException as error:
            failures.append(error)
            files.give_up()
            raise
        return files

    return in_threads(write, shares, threads)
