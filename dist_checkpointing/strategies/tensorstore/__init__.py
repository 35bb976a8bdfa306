"""("tensorstore", 1): zarr v3 arrays in an OCDBT database, a few large files a checkpoint.

Any TensorStore client opens a tensor by itself::

    ts.open({"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": "file:///ckpt/1000/",
                                            "path": "decoder.w/"}})
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.strategies.tensorstore.reader import (
        TensorStoreLoadShardedStrategy as TensorStoreLoadShardedStrategy,
    )
    from dist_checkpointing.strategies.tensorstore.writer import (
        TensorStoreSaveShardedStrategy as TensorStoreSaveShardedStrategy,
    )

# Imported on first use: who reads needs no writer.
_MODULES = {"TensorStoreLoadShardedStrategy": "reader", "TensorStoreSaveShardedStrategy": "writer"}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - type checkers see the imports above

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
