"""Uncompressed chunks, read from wherever they lie in a file straight into the destination.

Only what is wanted of a chunk is read. Small chunks that lie close together share one read, large
ones are read by several threads, and a strided part is taken out of a mapped file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import (
    FolderReads,
    OpenFile,
    ReadLimits,
    WrongSizeError,
    open_file,
)
from dist_checkpointing.format.geometry import Window
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.windows import read_window
from dist_checkpointing.threads import in_threads, paused_collector

Array = npt.NDArray[Any]

SMALL_BYTES = 2**18
READ_WHOLE_BYTES = 2**14
"""Reading so much of a chunk in vain costs less than reading the chunk by itself, so smaller chunks
are read whole."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a chunk lies in a file, whose size is None if it holds more than this chunk."""

    folder: Location
    name: str
    offset: int
    num_bytes: int
    file_bytes: int | None = None

    @property
    def path(self) -> str:
        """Path or URL of the file, for messages."""
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkReads:
    """Where the chunks of some rows of a plan lie, as columns.

    Files are relative to the checkpoint; ``fill_files`` says that each holds one chunk and nothing
    else.
    """

    rows: Int64s
    names: Sequence[str]
    files: Int64s
    offsets: Int64s
    num_bytes: Int64s
    fill_files: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: Int64s) -> ChunkReads:
        return replace(
            self,
            rows=self.rows[positions],
            files=self.files[positions],
            offsets=self.offsets[positions],
            num_bytes=self.num_bytes[positions],
        )


def read_chunks(
    reads: ChunkReads,
    filler: Filler,
    below: FolderReads,
    *,
    report: Callable[[int], None],
) -> None:
    """Fill the rows of all reads.

    Raises:
        CorruptCheckpointError: if a file is missing or too short.
    """
    limits = below.limits
    reads = reads.take(np.lexsort((reads.offsets, reads.files)))
    firsts = _run_starts(reads, filler.num_bytes[reads.rows], limits)
    counts = np.diff(np.r_[firsts, len(reads)])
    bounds = np.stack([firsts, firsts + counts], axis=1)
    of_thread = threading.local()

    def opened(position: int) -> AbstractContextManager[OpenFile]:
        name = reads.names[int(reads.files[position])]
        end = int(reads.offsets[position] + reads.num_bytes[position])
        key = filler.table.key(int(reads.rows[position]))
        path = f"{below.folder}/{name}"
        return _opened(partial(below.open, name), path, key, end, is_all=reads.fill_files)

    def read_run(bound: Sequence[int]) -> None:
        if not hasattr(of_thread, "scratch"):
            of_thread.scratch = np.empty(limits.run_bytes + limits.small_bytes, dtype=np.uint8)
        first, end = bound
        rows, starts, sizes = (
            column[first:end] for column in (reads.rows, reads.offsets, reads.num_bytes)
        )
        begin, last = int(starts[0]), int((starts + sizes).argmax())
        with opened(first + last) as file:
            if filler.read_run(rows, file, starts, sizes):
                report(int(filler.num_bytes[rows].sum()))
                return
            num_bytes = int(starts[last] + sizes[last]) - begin
            block = file.view(begin, num_bytes, of_thread.scratch)
        report(filler.fill_run(rows, starts - begin, sizes, block))

    def read_one(position: int) -> None:
        with opened(position) as file:
            report(filler.read(int(reads.rows[position]), file, int(reads.offsets[position])))

    with paused_collector():
        in_threads(read_run, bounds[counts > 1].tolist(), limits.run_threads)
    in_threads(read_one, bounds[counts == 1, 0].tolist(), limits.threads)


def _run_starts(reads: ChunkReads, wanted_bytes: Int64s, limits: ReadLimits) -> Int64s:
    """First position of each run of reads, which are sorted: small neighbours are read together."""
    if len(reads) < 2:
        return np.arange(len(reads))
    ends = reads.offsets + reads.num_bytes
    small = _is_read_whole(reads.num_bytes, wanted_bytes, limits)
    apart = np.ones(len(reads), dtype=np.bool_)
    apart[1:] = reads.files[1:] != reads.files[:-1]
    apart[1:] |= reads.offsets[1:] - ends[:-1] > limits.gap_bytes
    apart |= ~small
    apart[1:] |= ~small[:-1]
    first = reads.offsets[np.maximum.accumulate(np.where(apart, np.arange(len(reads)), 0))]
    block = (reads.offsets - first) // limits.run_bytes
    apart[1:] |= block[1:] != block[:-1]
    return np.flatnonzero(apart)


def _is_read_whole(num_bytes: Int64s, wanted_bytes: Int64s, limits: ReadLimits) -> Bools:
    """Which chunks are read whole, with their neighbours: small ones, nearly all of them wanted."""
    most_unwanted = np.maximum(limits.most_unwanted, wanted_bytes // 10)
    whole: Bools = (num_bytes <= limits.small_bytes) & (num_bytes - wanted_bytes <= most_unwanted)
    return whole


def read_extent(extent: Extent, key: str) -> bytes:
    """All bytes of an extent.

    Raises:
        CorruptCheckpointError: if the file is missing or too short; names ``key``.
    """
    with _opened_extent(extent, key) as file:
        return file.view(extent.offset, extent.num_bytes).tobytes()


def read_part(extent: Extent, key: str, window: Window, target: Array, most_bytes: int) -> None:
    """Read a window of a chunk, see ``read_window``."""
    with _opened_extent(extent, key) as file:
        read_window(file, extent.offset, window, target, most_bytes)


def _opened_extent(extent: Extent, key: str) -> AbstractContextManager[OpenFile]:
    end = extent.offset + extent.num_bytes
    is_all = extent.file_bytes is not None
    opening = partial(open_file, extent.folder, extent.name)
    return _opened(opening, extent.path, key, end, is_all=is_all)


@contextmanager
def _opened(
    open_it: Callable[[], OpenFile], path: str, key: str, end: int, *, is_all: bool
) -> Iterator[OpenFile]:
    """An open file that ends at ``end``, if that ``is_all`` of it, or behind."""
    try:
        with open_it() as file:
            file.require(end, is_all=is_all)
            yield file
    except FileNotFoundError as error:
        raise damaged(path, key, "a chunk is missing") from error
    except WrongSizeError as error:
        problem = (
            "a chunk has the wrong size" if is_all else "the file that holds a chunk ends before it"
        )
        details = {"expected": f"{end} bytes", "found": error.found}
        raise damaged(path, key, problem, **details) from error
    except EOFError as error:
        raise damaged(path, key, str(error)) from error


def damaged(path: str, key: str, problem: str, **details: Any) -> CorruptCheckpointError:
    """The error about a stored value that is lost or not what it must be."""
    finding = Finding(problem, key, path=path, **details)
    return CorruptCheckpointError("the checkpoint is damaged", [finding])
