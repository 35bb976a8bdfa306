"""Doors to torch (DTensor state dicts, and DCP storages both ways), and to Megatron's own code."""

from dist_checkpointing.interop.data_position import DataPosition, FilePositions
from dist_checkpointing.interop.dtensor_state_dict import shard_state_dict, unshard_state_dict
from dist_checkpointing.interop.torch_dcp.reader import DCPReader
from dist_checkpointing.interop.torch_dcp.storage_strategy import (
    DCPStorageLoadStrategy,
    DCPStorageSaveStrategy,
)
from dist_checkpointing.interop.torch_dcp.writer import DCPWriter
from dist_checkpointing.interop.torch_state import TorchState

__all__ = [
    "DCPReader",
    "DCPStorageLoadStrategy",
    "DCPStorageSaveStrategy",
    "DCPWriter",
    "DataPosition",
    "FilePositions",
    "TorchState",
    "shard_state_dict",
    "unshard_state_dict",
]
