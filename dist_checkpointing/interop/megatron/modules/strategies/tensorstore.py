"""The strategy that loads zarr through TensorStore."""

from dist_checkpointing.interop.megatron.import_hook import forwarding

__getattr__ = forwarding(
    __name__,
    "dist_checkpointing.strategies.tensorstore",
    without_effect=("register_default_tensorstore_strategies",),
)
