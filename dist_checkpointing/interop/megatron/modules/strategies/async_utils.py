"""Saves behind a training."""

from typing import Any

from dist_checkpointing.interop.megatron.hook import left_out
from dist_checkpointing.strategies.async_calls import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]


def __getattr__(name: str) -> Any:
    callers = ("AsyncCaller", "PersistentAsyncCaller", "TemporalAsyncCaller")
    left_out("strategies.async_utils", name, callers)
