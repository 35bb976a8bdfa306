"""Where the bytes of a checkpoint live: paths, atomic and durable writes, locks."""

from dist_checkpointing.filesystem.locks import LOCK_NAME, FolderLock, Holder, Kind, holder_of
from dist_checkpointing.filesystem.object_store import (
    Location,
    ObjectPath,
    ObjectStore,
    ObjectStoreOptions,
)

__all__ = [
    "LOCK_NAME",
    "FolderLock",
    "Holder",
    "Kind",
    "Location",
    "ObjectPath",
    "ObjectStore",
    "ObjectStoreOptions",
    "holder_of",
]
