"""The classes of strategies, and the registry."""

import importlib
from typing import Any

from dist_checkpointing.interop.megatron.import_hook import forwarding
from dist_checkpointing.strategies import base

__getattr__ = forwarding(__name__, "dist_checkpointing.strategies.base")


def get_default_strategy(action: base.StrategyAction, backend: str, version: int) -> Any:
    """A strategy; for torch_dist one with the attributes that Megatron's training sets."""
    found = base.get_default_strategy(action, backend, version)
    with_attributes = importlib.import_module(f"{__package__}.torch").WITH_ATTRIBUTES
    return with_attributes.get(type(found), lambda: found)()
