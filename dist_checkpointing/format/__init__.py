"""What a checkpoint folder says about itself: boxes, dtypes, index, checksums, seal, commit."""

from dist_checkpointing.format.checksums import CHECKSUMS_NAME as CHECKSUMS_NAME
from dist_checkpointing.format.checksums import Digest as Digest
from dist_checkpointing.format.checksums import StoredPart as StoredPart
from dist_checkpointing.format.checksums import checksum as checksum
from dist_checkpointing.format.checksums import digest_of as digest_of
from dist_checkpointing.format.commit import Attempt as Attempt
from dist_checkpointing.format.commit import CheckpointingConfig as CheckpointingConfig
from dist_checkpointing.format.commit import StoreAttempt as StoreAttempt
from dist_checkpointing.format.commit import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
)
from dist_checkpointing.format.commit import data_folder as data_folder
from dist_checkpointing.format.commit import read_commit as read_commit
from dist_checkpointing.format.dtypes import ELEMENT_TYPES as ELEMENT_TYPES
from dist_checkpointing.format.dtypes import FLOATING as FLOATING
from dist_checkpointing.format.geometry import Box as Box
from dist_checkpointing.format.geometry import ChunkGrid as ChunkGrid
from dist_checkpointing.format.geometry import Pieces as Pieces
from dist_checkpointing.format.geometry import Window as Window
from dist_checkpointing.format.index import FORMAT as FORMAT
from dist_checkpointing.format.index import FORMAT_MINOR as FORMAT_MINOR
from dist_checkpointing.format.index import INDEX_NAME as INDEX_NAME
from dist_checkpointing.format.index import Index as Index
from dist_checkpointing.format.index import StoredTensor as StoredTensor
from dist_checkpointing.format.index import read_index as read_index
from dist_checkpointing.format.index import write_index as write_index
from dist_checkpointing.format.removal import remove_checkpoint as remove_checkpoint
from dist_checkpointing.format.seal import SEAL_NAME as SEAL_NAME
from dist_checkpointing.format.seal import Seal as Seal
from dist_checkpointing.format.seal import SealedFile as SealedFile
from dist_checkpointing.format.seal import read_seal as read_seal
