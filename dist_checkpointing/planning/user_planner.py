"""Calls of methods that users override with as many parameters as they need."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_hook(hook: Callable[..., Any], *args: Any, **facts: Any) -> Any:
    """Call a method with what it must have, and with those of the facts that it has names for."""
    # What is no method may hold on to memory of its user.
    function = getattr(hook, "__func__", None)
    names = _names(hook) if function is None else _names_of_method(function)
    if names is not None:
        facts = {name: fact for name, fact in facts.items() if name in names}
    return hook(*args, **facts)


def _names(hook: Callable[..., Any]) -> frozenset[str] | None:
    """The parameters that have names; None if it takes any keyword."""
    parameters = inspect.signature(hook).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)


_names_of_method = lru_cache(maxsize=64)(_names)
