"""Conversions between checkpoints of any backend, safetensors and files of torch.save."""

from dist_checkpointing.tools.convert.conversion import Conversion as Conversion, convert as convert
from dist_checkpointing.tools.convert.plan import (
    ConversionPlan as ConversionPlan,
    ConvertOptions as ConvertOptions,
    plan_conversion as plan_conversion,
)
