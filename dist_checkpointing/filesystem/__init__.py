"""Where the bytes of a checkpoint live: paths, atomic and durable writes, locks."""

from dist_checkpointing.filesystem.locks import LOCK_NAME as LOCK_NAME
from dist_checkpointing.filesystem.locks import FolderLock as FolderLock
from dist_checkpointing.filesystem.locks import Holder as Holder
from dist_checkpointing.filesystem.locks import Kind as Kind
from dist_checkpointing.filesystem.locks import holder_of as holder_of
from dist_checkpointing.filesystem.object_store import Location as Location
from dist_checkpointing.filesystem.object_store import ObjectPath as ObjectPath
from dist_checkpointing.filesystem.object_store import ObjectStore as ObjectStore
from dist_checkpointing.filesystem.object_store import ObjectStoreOptions as ObjectStoreOptions
