"""Calls of methods that users override with as many parameters as they need."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_hook(hook: Callable[..., Any], *args: Any, **facts: Any) -> Any:
    """Call a method with what it must have, and with those of the facts that it has names for."""
    parameters = inspect.signature(hook).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
        facts = {name: fact for name, fact in facts.items() if name in named}
    return hook(*args, **facts)
