"""Uncompressed chunks, read from wherever they lie in a file straight into the destination.

Only what is wanted of a chunk is read. Small chunks that lie close together share one read, large
ones are read by several threads, and a strided part is taken out of a mapped file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Window
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.windows import pread, read_window

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int) -> list[R]:
    """``work`` done for all tasks, a few at a time; the first error ends it.

    This thread works too, and each takes the next task when it is done with one: an executor
    takes longer to hand over a task than a small file takes to write.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    left = deque(range(len(tasks)))

    def run() -> None:
        while left and not errors:
            try:
                number = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = work(tasks[number])
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                errors[number] = error

    others = [Thread(target=run, name="chunk-io") for _ in range(min(threads, len(tasks)) - 1)]
    try:
        for thread in others:
            thread.start()
        run()
    finally:
        left.clear()
        for thread in others:
            if thread.ident is not None:
                thread.join()
    if errors:
        # Tasks begin in order, so this is the same one each time.
        raise errors[min(errors)]
    return [results[number] for number in range(len(tasks))]


Array = npt.NDArray[Any]

SMALL_BYTES = 2**18
_RUN_BYTES = 2**22
_GAP_BYTES = 2**16
"""Reading over a gap of this size costs no more than another read."""
READ_WHOLE_BYTES = 2**14
"""Reading so much of a chunk in vain costs less than reading the chunk by itself, so smaller chunks
are read whole."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a chunk lie.

    Attributes:
        path: of the file.
        offset: of the first byte.
        num_bytes: of the whole chunk.
        file_bytes: size that the file must have; None if it holds more than this chunk.
    """

    path: str
    offset: int
    num_bytes: int
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkReads:
    """Where the chunks of some rows of a plan lie, as columns.

    Attributes:
        rows: rows of the plan's table, in any order.
        paths: files; ``files`` are positions in it.
        files: file of each chunk.
        offsets: first byte of each chunk in its file.
        num_bytes: bytes of each whole chunk.
        fill_files: whether every file holds one chunk and nothing else.
    """

    rows: Int64s
    paths: Sequence[str]
    files: Int64s
    offsets: Int64s
    num_bytes: Int64s
    fill_files: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: Int64s) -> ChunkReads:
        """Some of them."""
        return replace(
            self,
            rows=self.rows[positions],
            files=self.files[positions],
            offsets=self.offsets[positions],
            num_bytes=self.num_bytes[positions],
        )

    def extent(self, position: int) -> Extent:
        """One of them."""
        num_bytes = int(self.num_bytes[position])
        path = self.paths[int(self.files[position])]
        file_bytes = num_bytes if self.fill_files else None
        return Extent(path, int(self.offsets[position]), num_bytes, file_bytes)


def read_chunks(
    reads: ChunkReads,
    filler: Filler,
    options: StorageOptions,
    *,
    report: Callable[[int], None],
) -> None:
    """Fill the rows of all reads.

    Args:
        reads: where the chunks lie.
        filler: of the plan.
        options: how many threads.
        report: called with the number of bytes that have arrived since the last call.

    Raises:
        CorruptCheckpointError: if a file is missing or too short.
    """
    reads = reads.take(np.lexsort((reads.offsets, reads.files)))
    firsts = _run_starts(reads, filler.num_bytes[reads.rows])
    counts = np.diff(np.r_[firsts, len(reads)])
    bounds = np.stack([firsts, firsts + counts], axis=1)
    # Many small copies are work for the interpreter: threads would only take turns.
    together = bounds[counts > 1].tolist()
    scratch = np.empty(_RUN_BYTES + SMALL_BYTES if together else 0, dtype=np.uint8)
    for first, end in together:
        with paused_collector():
            num_bytes = _read_run(reads, first, end, filler, scratch)
        report(num_bytes)
    rows = reads.rows.tolist()

    def read_one(position: int) -> None:
        extent = reads.extent(position)
        with _opened(extent, filler.table.key(rows[position])) as descriptor:
            report(filler.read(rows[position], descriptor, extent.offset))

    in_threads(read_one, bounds[counts == 1, 0].tolist(), options.threads)


def _run_starts(reads: ChunkReads, wanted_bytes: Int64s) -> Int64s:
    """First position of each run of reads, which are sorted: small neighbours are read together."""
    if len(reads) < 2:
        return np.arange(len(reads))
    ends = reads.offsets + reads.num_bytes
    small = _is_read_whole(reads.num_bytes, wanted_bytes)
    apart = np.ones(len(reads), dtype=np.bool_)
    apart[1:] = reads.files[1:] != reads.files[:-1]
    apart[1:] |= reads.offsets[1:] - ends[:-1] > _GAP_BYTES
    apart |= ~small
    apart[1:] |= ~small[:-1]
    first = reads.offsets[np.maximum.accumulate(np.where(apart, np.arange(len(reads)), 0))]
    block = (reads.offsets - first) // _RUN_BYTES
    apart[1:] |= block[1:] != block[:-1]
    return np.flatnonzero(apart)


def _is_read_whole(num_bytes: Int64s, wanted_bytes: Int64s) -> Bools:
    """Which chunks are read whole, with their neighbours: small ones, nearly all of them wanted."""
    most_unwanted = np.maximum(READ_WHOLE_BYTES, wanted_bytes // 10)
    whole: Bools = (num_bytes <= SMALL_BYTES) & (num_bytes - wanted_bytes <= most_unwanted)
    return whole


def _read_run(reads: ChunkReads, first: int, end: int, filler: Filler, scratch: Array) -> int:
    starts, sizes = reads.offsets[first:end], reads.num_bytes[first:end]
    begin = int(starts[0])
    last = int((starts + sizes).argmax())
    block: Array = scratch[: int(starts[last] + sizes[last]) - begin]
    rows = reads.rows[first:end]
    with _opened(reads.extent(first + last), filler.table.key(int(rows[last]))) as descriptor:
        if filler.read_run(rows, descriptor, starts, sizes):
            return int(filler.num_bytes[rows].sum())
        pread(descriptor, block, begin)
    return filler.fill_run(rows, starts - begin, sizes, block)


def read_extent(extent: Extent, key: str) -> bytes:
    """All bytes of an extent.

    Raises:
        CorruptCheckpointError: if the file is missing or too short; names ``key``.
    """
    with _opened(extent, key) as descriptor:
        data = np.empty(extent.num_bytes, dtype=np.uint8)
        pread(descriptor, data, extent.offset)
    return data.tobytes()


def read_part(extent: Extent, key: str, window: Window, target: Array, most_bytes: int) -> None:
    """Read a window of a chunk, see ``read_window``.

    Raises:
        CorruptCheckpointError: if the file is missing or too short; names ``key``.
    """
    with _opened(extent, key) as descriptor:
        read_window(descriptor, extent.offset, window, target, most_bytes)


@contextmanager
def _opened(extent: Extent, key: str) -> Iterator[int]:
    try:
        descriptor = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _corrupt(extent, key, "a chunk is missing") from error
    try:
        # A mapped file that is too short would kill the process instead of raising.
        size = os.fstat(descriptor).st_size
        needed = extent.offset + extent.num_bytes
        if size < needed or extent.file_bytes not in (None, size):
            raise _corrupt(
                extent,
                key,
                "a chunk has the wrong size"
                if extent.file_bytes is not None
                else "the file that holds a chunk ends before it",
                expected=f"{needed} bytes",
                found=size,
            )
        try:
            yield descriptor
        except EOFError as error:
            raise _corrupt(extent, key, str(error)) from error
    finally:
        os.close(descriptor)


def _corrupt(extent: Extent, key: str, problem: str, **details: Any) -> CorruptCheckpointError:
    finding = Finding(problem, key, path=extent.path, **details)
    return CorruptCheckpointError("the checkpoint is damaged", [finding])
