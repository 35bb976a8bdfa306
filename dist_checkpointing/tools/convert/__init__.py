"""Conversions between checkpoints of any backend, safetensors and torch.save files, by streaming.

::

    from dist_checkpointing.planning import Keep, Recipe
    from dist_checkpointing.tools.convert import convert

    convert("ckpt/1000", "model", "safetensors", recipe=Recipe(Keep("model.{x*}")))
"""

from dist_checkpointing.tools.convert.conversion import (
    Conversion as Conversion,
    convert as convert,
    targets as targets,
)
from dist_checkpointing.tools.convert.plan import (
    ConversionPlan as ConversionPlan,
    ConvertOptions as ConvertOptions,
    plan_conversion as plan_conversion,
)
