"""What a checkpoint folder says about itself: boxes, dtypes, index, checksums, seal, commit."""

from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME,
    Digest,
    StoredPart,
    checksum,
    digest_of,
)
from dist_checkpointing.format.commit import (
    Attempt,
    CheckpointingConfig,
    StoreAttempt,
    check_is_distributed_checkpoint,
    data_folder,
    read_commit,
)
from dist_checkpointing.format.dtypes import ELEMENT_TYPES, FLOATING
from dist_checkpointing.format.geometry import Box, ChunkGrid, Pieces, Window
from dist_checkpointing.format.index import (
    FORMAT,
    FORMAT_MINOR,
    INDEX_NAME,
    Index,
    StoredTensor,
    read_index,
    write_index,
)
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.format.seal import SEAL_NAME, Seal, SealedFile, read_seal

__all__ = [
    "CHECKSUMS_NAME",
    "ELEMENT_TYPES",
    "FLOATING",
    "FORMAT",
    "FORMAT_MINOR",
    "INDEX_NAME",
    "SEAL_NAME",
    "Attempt",
    "Box",
    "CheckpointingConfig",
    "ChunkGrid",
    "Digest",
    "Index",
    "Pieces",
    "Seal",
    "SealedFile",
    "StoreAttempt",
    "StoredPart",
    "StoredTensor",
    "Window",
    "check_is_distributed_checkpoint",
    "checksum",
    "data_folder",
    "digest_of",
    "read_commit",
    "read_index",
    "read_seal",
    "remove_checkpoint",
    "write_index",
]
