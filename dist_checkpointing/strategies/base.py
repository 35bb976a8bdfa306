"""Everything that a strategy is made of, under the names that users and backends import."""

from __future__ import annotations

from typing import Any

from dist_checkpointing.strategies.abstract import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    PathOrStr,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
)
from dist_checkpointing.strategies.async_calls import AsyncCallsQueue
from dist_checkpointing.strategies.planned import PlannedLoadStrategy, PlannedSaveStrategy
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)

__all__ = [
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
    "StrategyAction",
    "default_strategies",
    "get_default_strategy",
    "register_default_strategy",
]


def __getattr__(name: str) -> Any:
    # The queue that Megatron scripts share; made on first use, since most have none.
    if name != "async_calls":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    queue = globals()[name] = AsyncCallsQueue()
    return queue
