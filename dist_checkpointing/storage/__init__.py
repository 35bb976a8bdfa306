"""Plans in, bytes out: what a backend implements, and what drives it."""

from dist_checkpointing.planning import Metadata
from dist_checkpointing.storage.driver import read, write_plan
from dist_checkpointing.storage.interface import (
    ChunkPlace,
    StorageReader,
    StorageWriter,
    WriteResult,
    WriteResults,
    done,
)
from dist_checkpointing.storage.options import (
    Checksum,
    Durability,
    ReadMode,
    StorageOptions,
)
from dist_checkpointing.storage.progress import Progress, ProgressCallback, ProgressOption

__all__ = [
    "Checksum",
    "ChunkPlace",
    "Durability",
    "Metadata",
    "Progress",
    "ProgressCallback",
    "ProgressOption",
    "ReadMode",
    "StorageOptions",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
    "WriteResults",
    "done",
    "read",
    "write_plan",
]
