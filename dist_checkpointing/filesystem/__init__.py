"""Where the bytes of a checkpoint live: paths, atomic and durable writes, locks."""

from dist_checkpointing.filesystem.locks import (
    LOCK_NAME as LOCK_NAME,
    FolderLock as FolderLock,
    Holder as Holder,
    Kind as Kind,
    holder_of as holder_of,
)
from dist_checkpointing.filesystem.object_store import (
    ObjectPath as ObjectPath,
    ObjectStoreOptions as ObjectStoreOptions,
)
