"""torch DCP in both directions: our backends as DCP storages, DCP storages as our strategies."""

from dist_checkpointing.interop.torch_dcp.reader import DCPReader
from dist_checkpointing.interop.torch_dcp.storage_strategy import (
    DCPStorageLoadStrategy,
    DCPStorageSaveStrategy,
)
from dist_checkpointing.interop.torch_dcp.writer import DCPWriter

__all__ = ["DCPReader", "DCPStorageLoadStrategy", "DCPStorageSaveStrategy", "DCPWriter"]
