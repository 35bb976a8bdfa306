"""The zarr backends: ("zarr", 1) is zarr v2 as Megatron writes it, ("zarr", 2) is zarr v3.

Importing this package also teaches zarr-python bfloat16 and the 8-bit floats, so that plain
``zarr.open`` reads every array written here.
"""

from dist_checkpointing.strategies.zarr.v2 import (
    ZarrLoadShardedStrategy as ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy as ZarrSaveShardedStrategy,
)
from dist_checkpointing.strategies.zarr.v3 import (
    Zarr3LoadShardedStrategy as Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy as Zarr3SaveShardedStrategy,
)
