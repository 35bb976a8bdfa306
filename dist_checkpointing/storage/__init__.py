"""Plans in, bytes out: what a backend implements, and what drives it."""

from dist_checkpointing.planning import Metadata
from dist_checkpointing.storage.driver import read, write, write_plan
from dist_checkpointing.storage.options import (
    BaseCheck,
    Checksum,
    Durability,
    ReadMode,
    StorageOptions,
)
from dist_checkpointing.storage.progress import Progress, ProgressCallback, ProgressOption
from dist_checkpointing.storage.protocol import ChunkPlace, StorageReader, StorageWriter, done
from dist_checkpointing.storage.results import WriteResult, WriteResults

__all__ = [
    "BaseCheck",
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
    "write",
    "write_plan",
]
