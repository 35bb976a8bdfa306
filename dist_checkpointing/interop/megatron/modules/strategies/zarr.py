"""The strategies of zarr."""

from dist_checkpointing.interop.megatron.import_hook import forwarding

__getattr__ = forwarding(
    __name__,
    "dist_checkpointing.strategies.zarr",
    without_effect=("register_default_zarr_strategies",),
)
