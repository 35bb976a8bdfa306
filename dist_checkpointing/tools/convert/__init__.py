"""Conversions between checkpoints of any backend, safetensors and torch.save files, by streaming.

Names are imported on first use, because they import torch.

::

    from dist_checkpointing.tools.convert import Rules, convert

    convert("ckpt/1000", "model", "safetensors", rules=Rules.parse(include=["^model"]))
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.strategies.torch_file import COMMON_KEY, OBJECTS_KEY
    from dist_checkpointing.tools.convert.conversion import Conversion, convert, targets
    from dist_checkpointing.tools.convert.plan import (
        ConversionPlan,
        ConvertOptions,
        Rules,
        plan_conversion,
        return_freed_memory,
    )
    from dist_checkpointing.tools.opening import open_source

__all__ = [
    "COMMON_KEY",
    "OBJECTS_KEY",
    "Conversion",
    "ConversionPlan",
    "ConvertOptions",
    "Rules",
    "convert",
    "open_source",
    "plan_conversion",
    "return_freed_memory",
    "targets",
]

_MODULES = {
    "strategies.torch_file": ("COMMON_KEY", "OBJECTS_KEY"),
    "tools.convert.conversion": ("Conversion", "convert", "targets"),
    "tools.convert.plan": (
        "ConversionPlan",
        "ConvertOptions",
        "Rules",
        "plan_conversion",
        "return_freed_memory",
    ),
    "tools.opening": ("open_source",),
}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"dist_checkpointing.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
