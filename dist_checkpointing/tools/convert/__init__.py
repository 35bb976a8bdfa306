"""Conversions between checkpoints of any backend, safetensors and torch.save files, by streaming.

::

    from dist_checkpointing.tools.convert import Rules, convert

    convert("ckpt/1000", "model", "safetensors", rules=Rules.parse(include=["^model"]))
"""

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
)
