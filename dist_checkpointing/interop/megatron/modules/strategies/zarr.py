"""The strategies of zarr."""

from dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy

__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "register_default_zarr_strategies",
]


def register_default_zarr_strategies() -> None:
    """Do nothing: the registry finds them."""
