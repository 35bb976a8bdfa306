"""Conversions between checkpoints of any backend, safetensors and torch.save files, by streaming.

::

    from dist_checkpointing.tools.convert import Rules, convert

    convert("ckpt/1000", "model", "safetensors", rules=Rules.parse(include=["^model"]))
"""

from dist_checkpointing.strategies.torch_file import COMMON_KEY, OBJECTS_KEY
from dist_checkpointing.tools.convert.convert import (
    Conversion,
    ConvertOptions,
    convert,
    targets,
)
from dist_checkpointing.tools.convert.plan import (
    ConversionPlan,
    Rules,
    plan_conversion,
    return_freed_memory,
)
from dist_checkpointing.tools.inspect.opening import open_source

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
