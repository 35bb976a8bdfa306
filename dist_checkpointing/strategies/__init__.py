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
    from dist_checkpointing.strategies.async_calls import (
        AsyncCallsQueue as AsyncCallsQueue,
        AsyncRequest as AsyncRequest,
    )
    from dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy as AsyncSaveShardedStrategy,
        LoadCommonStrategy as LoadCommonStrategy,
        LoadShardedStrategy as LoadShardedStrategy,
        LoadStrategyBase as LoadStrategyBase,
        PathOrStr as PathOrStr,
        PlannedLoadStrategy as PlannedLoadStrategy,
        PlannedSaveStrategy as PlannedSaveStrategy,
        SaveCommonStrategy as SaveCommonStrategy,
        SaveShardedStrategy as SaveShardedStrategy,
        SaveStrategyBase as SaveStrategyBase,
    )
    from dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor as CheckpointableShardedTensor,
        LocalShardsContainer as LocalShardsContainer,
    )
    from dist_checkpointing.strategies.common import (
        TorchCommonLoadStrategy as TorchCommonLoadStrategy,
        TorchCommonSaveStrategy as TorchCommonSaveStrategy,
    )
    from dist_checkpointing.strategies.data_files import DataFiles as DataFiles
    from dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper as FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper as FullyParallelSaveStrategyWrapper,
    )
    from dist_checkpointing.strategies.registry import (
        StrategyAction as StrategyAction,
        available_strategies as available_strategies,
        default_strategies as default_strategies,
        get_default_strategy as get_default_strategy,
        register_default_strategy as register_default_strategy,
    )
    from dist_checkpointing.strategies.safetensors import (
        SafetensorsLoadShardedStrategy as SafetensorsLoadShardedStrategy,
        SafetensorsSaveShardedStrategy as SafetensorsSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.tensorstore import (
        TensorStoreLoadShardedStrategy as TensorStoreLoadShardedStrategy,
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
        TorchDistLoadShardedStrategy as TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy as TorchDistSaveShardedStrategy,
    )
    from dist_checkpointing.strategies.torch_dist.metadata import (
        read_dcp_metadata as read_dcp_metadata,
    )
    from dist_checkpointing.strategies.zarr import (
        Zarr3LoadShardedStrategy as Zarr3LoadShardedStrategy,
        Zarr3SaveShardedStrategy as Zarr3SaveShardedStrategy,
        ZarrLoadShardedStrategy as ZarrLoadShardedStrategy,
        ZarrSaveShardedStrategy as ZarrSaveShardedStrategy,
        ZarrV2Writer as ZarrV2Writer,
        ZarrV3Reader as ZarrV3Reader,
        ZarrV3Writer as ZarrV3Writer,
    )

_NAMES_BY_MODULE = {
    "async_calls": "AsyncCallsQueue AsyncRequest",
    "base": (
        "AsyncSaveShardedStrategy LoadCommonStrategy LoadShardedStrategy LoadStrategyBase "
        "PathOrStr PlannedLoadStrategy PlannedSaveStrategy SaveCommonStrategy "
        "SaveShardedStrategy SaveStrategyBase"
    ),
    "checkpointable": "CheckpointableShardedTensor LocalShardsContainer",
    "common": "TorchCommonLoadStrategy TorchCommonSaveStrategy",
    "data_files": "DataFiles",
    "fully_parallel": "FullyParallelLoadStrategyWrapper FullyParallelSaveStrategyWrapper",
    "registry": (
        "StrategyAction available_strategies default_strategies get_default_strategy "
        "register_default_strategy"
    ),
    "safetensors": "SafetensorsLoadShardedStrategy SafetensorsSaveShardedStrategy",
    "tensorstore": "TensorStoreLoadShardedStrategy TensorStoreSaveShardedStrategy",
    "tensorstore.reader": "TensorStoreReader",
    "tensorstore.writer": "TensorStoreWriter",
    "torch_dist": (
        "TorchDistCommonLoadStrategy TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy"
    ),
    "torch_dist.metadata": "read_dcp_metadata",
    "zarr": (
        "Zarr3LoadShardedStrategy Zarr3SaveShardedStrategy ZarrLoadShardedStrategy "
        "ZarrSaveShardedStrategy ZarrV2Writer ZarrV3Reader ZarrV3Writer"
    ),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
