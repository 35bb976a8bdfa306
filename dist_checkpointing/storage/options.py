"""Knobs of the storage backends, in one place, with units and defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.local_folder import Durability, is_local

__all__ = ["Checksum", "Durability", "ReadMode", "StorageOptions"]


class Checksum(Enum):
    """What is kept beside each chunk to find flipped bits with ``load(..., verify=...)``."""

    XXH3 = "xxh3"
    NONE = "none"


class ReadMode(Enum):
    """How local files are read."""

    AUTO = "auto"
    """MEMMAP on file systems known to be local, PREAD elsewhere."""

    MEMMAP = "memmap"
    """Mapped into memory: the fastest on local disks, very slow on network file systems."""

    PREAD = "pread"
    """Read into buffers."""


def _threads_of_a_rank() -> int:
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(ranks) if ranks.isdecimal() else 1
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # of Linux
    return min(max(1, 2 * (len(usable(0)) // max(1, sharing))), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How a backend does its I/O. The defaults are for large training jobs on any file system.

    Attributes:
        threads: Threads of this process that write or read at a time; by default two for each core
            that this rank has to itself, at most 4 (torchrun's LOCAL_WORLD_SIZE tells how many
            ranks share the machine). ``torch_dist`` writes with at most 8.
        buffer_bytes: Memory, beyond the state itself, for copies of what cannot be written or read
            in place: tensors on a GPU, strided ones, edge chunks, other dtypes.
        data_file_bytes: A data file of the tensorstore backend is closed once it is this large; one
            of safetensors holds at most so many bytes of values, or one tensor.
        durability: When a save may call itself finished.
        checksum: What is kept beside each chunk.
        read_mode: How local files are read.

    Example:
        >>> from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
        >>> options = StorageOptions(threads=2, buffer_bytes=2**24)
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", TensorStoreSaveShardedStrategy(options=options))
    """

    threads: int = field(default_factory=_threads_of_a_rank)
    buffer_bytes: int = 128 * 2**20
    data_file_bytes: int = 4 * 2**30
    durability: Durability = Durability.FSYNC
    checksum: Checksum = Checksum.XXH3
    read_mode: ReadMode = ReadMode.AUTO

    def __post_init__(self) -> None:
        counts = ("threads", "buffer_bytes", "data_file_bytes")
        findings = [
            Finding(f"{name} must be at least 1", found=getattr(self, name))
            for name in counts
            if getattr(self, name) < 1
        ]
        CheckpointingException.raise_if(findings, "invalid storage options")

    def maps_files(self, folder: Path) -> bool:
        """Whether files in ``folder`` are read through a mapping."""
        if self.read_mode is ReadMode.AUTO:
            return is_local(folder)
        return self.read_mode is ReadMode.MEMMAP
