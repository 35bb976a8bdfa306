"""Plans in, bytes out: what a backend implements, and what drives it."""

from dist_checkpointing.planning import Metadata as Metadata
from dist_checkpointing.storage.driver import read as read, write_plan as write_plan
from dist_checkpointing.storage.interface import (
    ChunkPlace as ChunkPlace,
    StorageReader as StorageReader,
    StorageWriter as StorageWriter,
    WriteResult as WriteResult,
    WriteResults as WriteResults,
    done as done,
)
from dist_checkpointing.storage.options import (
    Checksum as Checksum,
    Durability as Durability,
    ReadMode as ReadMode,
    StorageOptions as StorageOptions,
)
from dist_checkpointing.storage.progress import (
    Progress as Progress,
    ProgressCallback as ProgressCallback,
    ProgressOption as ProgressOption,
)
