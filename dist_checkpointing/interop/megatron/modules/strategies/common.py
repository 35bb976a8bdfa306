"""The strategies of the common state."""

from dist_checkpointing.interop.megatron.import_hook import forwarding

__getattr__ = forwarding(
    __name__,
    "dist_checkpointing.strategies.common",
    without_effect=("register_default_common_strategies",),
)
