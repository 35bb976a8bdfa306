"""Conversions between checkpoints of any backend, safetensors and torch.save files, by streaming.

Names are imported on first use, because they import torch.

::

    from dist_checkpointing.tools.convert import Rules, convert

    convert("ckpt/1000", "model", "safetensors", rules=Rules.parse(include=["^model"]))
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dist_checkpointing.strategies.torch_file import (
        COMMON_KEY as COMMON_KEY,
        OBJECTS_KEY as OBJECTS_KEY,
    )
    from dist_checkpointing.tools.convert.conversion import (
        Conversion as Conversion,
        convert as convert,
        targets as targets,
    )
    from dist_checkpointing.tools.convert.plan import (
        ConversionPlan as ConversionPlan,
        ConvertOptions as ConvertOptions,
        Rules as Rules,
        plan_conversion as plan_conversion,
        return_freed_memory as return_freed_memory,
    )

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
}

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"dist_checkpointing.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
