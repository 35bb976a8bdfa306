"""Doors to torch (DTensor state dicts, and DCP storages both ways), and to Megatron's own code.

Names are imported on first use: ``torch.distributed.checkpoint`` takes as long as half of torch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.interop.data_position import (
        DataPosition as DataPosition,
        FilePositions as FilePositions,
    )
    from dist_checkpointing.interop.dtensor_state_dict import (
        shard_state_dict as shard_state_dict,
        unshard_state_dict as unshard_state_dict,
    )
    from dist_checkpointing.interop.torch_dcp.reader import DCPReader as DCPReader
    from dist_checkpointing.interop.torch_dcp.storage_strategy import (
        DCPStorageLoadStrategy as DCPStorageLoadStrategy,
        DCPStorageSaveStrategy as DCPStorageSaveStrategy,
    )
    from dist_checkpointing.interop.torch_dcp.writer import DCPWriter as DCPWriter
    from dist_checkpointing.interop.torch_state import TorchState as TorchState

_NAMES_BY_MODULE = {
    "data_position": "DataPosition FilePositions",
    "dtensor_state_dict": "shard_state_dict unshard_state_dict",
    "torch_dcp.reader": "DCPReader",
    "torch_dcp.storage_strategy": "DCPStorageLoadStrategy DCPStorageSaveStrategy",
    "torch_dcp.writer": "DCPWriter",
    "torch_state": "TorchState",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - type checkers see the imports above

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
