"""Saves behind a training."""

from dist_checkpointing.interop.megatron.import_hook import forwarding

__getattr__ = forwarding(
    __name__,
    "dist_checkpointing.strategies.async_calls",
    left_out=("AsyncCaller", "PersistentAsyncCaller", "TemporalAsyncCaller"),
)
