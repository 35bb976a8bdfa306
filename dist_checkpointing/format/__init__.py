"""What a checkpoint folder says about itself: boxes, dtypes, index, checksums, seal, commit."""

from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME as CHECKSUMS_NAME,
    Digest as Digest,
    digest_of as digest_of,
)
from dist_checkpointing.format.commit import (
    Attempt as Attempt,
    CheckpointingConfig as CheckpointingConfig,
    StoreAttempt as StoreAttempt,
    data_folder as data_folder,
    read_commit as read_commit,
)
from dist_checkpointing.format.dtypes import ELEMENT_TYPES as ELEMENT_TYPES, FLOATING as FLOATING
from dist_checkpointing.format.geometry import (
    Box as Box,
    Pieces as Pieces,
    Window as Window,
)
from dist_checkpointing.format.index import (
    FORMAT as FORMAT,
    FORMAT_MINOR as FORMAT_MINOR,
    INDEX_NAME as INDEX_NAME,
    Index as Index,
    StoredTensor as StoredTensor,
    read_index as read_index,
    write_index as write_index,
)
from dist_checkpointing.format.removal import remove_checkpoint as remove_checkpoint
from dist_checkpointing.format.seal import (
    SEAL_NAME as SEAL_NAME,
    Seal as Seal,
    SealedFile as SealedFile,
    read_seal as read_seal,
)
