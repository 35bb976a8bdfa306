"""The classes of strategies, and the registry."""

from __future__ import annotations

import importlib
from typing import Any

from dist_checkpointing.strategies import base
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
    default_strategies,
    register_default_strategy,
)

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "default_strategies",
    "get_default_strategy",
    "register_default_strategy",
]


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """A new strategy; for torch_dist one with the attributes that Megatron's training sets."""
    found = base.get_default_strategy(action, backend, version)
    with_attributes = importlib.import_module(f"{__package__}.torch").WITH_ATTRIBUTES
    return with_attributes.get(type(found), lambda: found)()


def __getattr__(name: str) -> Any:
    return getattr(base, name)
