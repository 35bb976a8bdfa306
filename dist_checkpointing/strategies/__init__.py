"""Backends: each reads and writes one format, and is found through the registry by name.

Names are imported on first use: a backend may need packages that are missing.
"""

import importlib
import typing

if __name__ != "dist_checkpointing.strategies":
    # The link at the top level of the repository is for browsing; through it every class here
    # would exist twice, and isinstance would fail in ways that nobody understands.
    raise ImportError(
        f"import dist_checkpointing.strategies, not {__name__!r}: the top-level 'strategies' is "
        "only a link to that folder"
    )

if typing.TYPE_CHECKING:
    from dist_checkpointing.strategies.async_calls import AsyncCallsQueue as AsyncCallsQueue
    from dist_checkpointing.strategies.async_calls import AsyncRequest as AsyncRequest
    from dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy as AsyncSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.base import LoadCommonStrategy as LoadCommonStrategy
    from dist_checkpointing.strategies.base import LoadShardedStrategy as LoadShardedStrategy
    from dist_checkpointing.strategies.base import LoadStrategyBase as LoadStrategyBase
    from dist_checkpointing.strategies.base import PathOrStr as PathOrStr
    from dist_checkpointing.strategies.base import (
        PlannedLoadStrategy as PlannedLoadStrategy,
    )
    from dist_checkpointing.strategies.base import (
        PlannedSaveStrategy as PlannedSaveStrategy,
    )
    from dist_checkpointing.strategies.base import SaveCommonStrategy as SaveCommonStrategy
    from dist_checkpointing.strategies.base import SaveShardedStrategy as SaveShardedStrategy
    from dist_checkpointing.strategies.base import SaveStrategyBase as SaveStrategyBase
    from dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor as CheckpointableShardedTensor,
    )
    from dist_checkpointing.strategies.checkpointable import (
        LocalShardsContainer as LocalShardsContainer,
    )
    from dist_checkpointing.strategies.common import (
        TorchCommonLoadStrategy as TorchCommonLoadStrategy,
    )
    from dist_checkpointing.strategies.common import (
        TorchCommonSaveStrategy as TorchCommonSaveStrategy,
    )
    from dist_checkpointing.strategies.data_files import DataFiles as DataFiles
    from dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper as FullyParallelLoadStrategyWrapper,
    )
    from dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper as FullyParallelSaveStrategyWrapper,
    )
    from dist_checkpointing.strategies.registry import StrategyAction as StrategyAction
    from dist_checkpointing.strategies.registry import available_strategies as available_strategies
    from dist_checkpointing.strategies.registry import default_strategies as default_strategies
    from dist_checkpointing.strategies.registry import get_default_strategy as get_default_strategy
    from dist_checkpointing.strategies.registry import (
        register_default_strategy as register_default_strategy,
    )
    from dist_checkpointing.strategies.tensorstore import (
        TensorStoreLoadShardedStrategy as TensorStoreLoadShardedStrategy,
    )
    from dist_checkpointing.strategies.tensorstore import (
        TensorStoreSaveShardedStrategy as TensorStoreSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.tensorstore.reader import (
        TensorStoreReader as TensorStoreReader,
    )
    from dist_checkpointing.strategies.tensorstore.writer import (
        TensorStoreWriter as TensorStoreWriter,
    )
    from dist_checkpointing.strategies.torch_dist import (
        TorchDistCommonLoadStrategy as TorchDistCommonLoadStrategy,
    )
    from dist_checkpointing.strategies.torch_dist import (
        TorchDistLoadShardedStrategy as TorchDistLoadShardedStrategy,
    )
    from dist_checkpointing.strategies.torch_dist import (
        TorchDistSaveShardedStrategy as TorchDistSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.torch_dist.metadata import (
        read_dcp_metadata as read_dcp_metadata,
    )
    from dist_checkpointing.strategies.zarr import (
        Zarr3LoadShardedStrategy as Zarr3LoadShardedStrategy,
    )
    from dist_checkpointing.strategies.zarr import (
        Zarr3SaveShardedStrategy as Zarr3SaveShardedStrategy,
    )
    from dist_checkpointing.strategies.zarr import (
        ZarrLoadShardedStrategy as ZarrLoadShardedStrategy,
    )
    from dist_checkpointing.strategies.zarr import (
        ZarrSaveShardedStrategy as ZarrSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.zarr.v2 import ZarrV2Writer as ZarrV2Writer
    from dist_checkpointing.strategies.zarr.v3 import ZarrV3Reader as ZarrV3Reader
    from dist_checkpointing.strategies.zarr.v3 import ZarrV3Writer as ZarrV3Writer

_NAMES_BY_MODULE = {
    "async_calls": ("AsyncCallsQueue", "AsyncRequest"),
    "base": (
        "AsyncSaveShardedStrategy",
        "LoadCommonStrategy",
        "LoadShardedStrategy",
        "LoadStrategyBase",
        "PathOrStr",
        "PlannedLoadStrategy",
        "PlannedSaveStrategy",
        "SaveCommonStrategy",
        "SaveShardedStrategy",
        "SaveStrategyBase",
    ),
    "checkpointable": ("CheckpointableShardedTensor", "LocalShardsContainer"),
    "common": ("TorchCommonLoadStrategy", "TorchCommonSaveStrategy"),
    "data_files": ("DataFiles",),
    "fully_parallel": ("FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"),
    "registry": (
        "StrategyAction",
        "available_strategies",
        "default_strategies",
        "get_default_strategy",
        "register_default_strategy",
    ),
    "tensorstore": ("TensorStoreLoadShardedStrategy", "TensorStoreSaveShardedStrategy"),
    "tensorstore.reader": ("TensorStoreReader",),
    "tensorstore.writer": ("TensorStoreWriter",),
    "torch_dist": (
        "TorchDistCommonLoadStrategy",
        "TorchDistLoadShardedStrategy",
        "TorchDistSaveShardedStrategy",
    ),
    "torch_dist.metadata": ("read_dcp_metadata",),
    "zarr": (
        "Zarr3LoadShardedStrategy",
        "Zarr3SaveShardedStrategy",
        "ZarrLoadShardedStrategy",
        "ZarrSaveShardedStrategy",
    ),
    "zarr.v2": ("ZarrV2Writer",),
    "zarr.v3": ("ZarrV3Reader", "ZarrV3Writer"),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
