"""How much of the memory each part of a conversion may take."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.storage.options import StorageOptions

DEFAULT_MEMORY_BYTES: Final = 2 * 2**30

_LEAST_REST_BYTES = 192 * 2**20
_SLACK_BYTES = 96 * 2**20
"""For what comes with the work: modules, plans, threads, what the allocator keeps."""

_M_MMAP_THRESHOLD = -3

_COPIES = 3
"""Of a box at a time: as it was read, as it was cast, on its way into the file."""

_MOST_BOX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Budget:
    """How many threads work on how much at a time.

    Attributes:
        threads: Threads that read and write.
        box_bytes: Bytes of the box that one of them holds.
        buffer_bytes: Bytes that a writer may collect.
        mapped_bytes: Bytes to read of mapped files before they are mapped again.
    """

    threads: int
    box_bytes: int
    buffer_bytes: int
    mapped_bytes: int


def resident_bytes() -> int:
    """Memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def budget_of(memory_bytes: int, threads: int | None = None) -> Budget:
    """Divide what the budget leaves among threads and buffers.

    Args:
        memory_bytes: bytes that the whole process may have, including what it has already.
        threads: number of threads; by default as StorageOptions.

    Raises:
        CheckpointingException: if that is too little to begin.
    """
    used = resident_bytes()
    rest = memory_bytes - used
    if rest < _LEAST_REST_BYTES:
        least = -(-(used + _LEAST_REST_BYTES) // 2**20)
        finding = Finding(
            "the program itself takes most of it",
            expected=f"at least {least} MiB",
            found=f"{memory_bytes // 2**20} MiB",
            remedy=f"Allow more: --memory {least}MiB.",
        )
        raise CheckpointingException("the memory budget is too small", [finding])
    rest -= _SLACK_BYTES
    count = threads or StorageOptions().threads
    box_bytes = max(2**20, min(_MOST_BOX_BYTES, rest // (2 * _COPIES * count)))
    return Budget(count, box_bytes, max(2**20, rest // 4), max(2**23, rest // 8))


def return_freed_memory() -> None:
    """Let the allocator of this process give large blocks back as soon as they are freed.

    glibc otherwise learns from the first one to keep them, in every thread, which at the end is
    more than what is in use. For programs that have nothing else to do: it costs page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none, and do not keep them
        mallopt(_M_MMAP_THRESHOLD, 2**20)
