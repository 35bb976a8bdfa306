"""Who writes and who reads which box: items, plans, planner protocol, default planners.

Recipes are imported on first use.
"""

import importlib
import typing

from dist_checkpointing.planning.chunking import RowBlockLayout, WholeShardLayout
from dist_checkpointing.planning.items import (
    LoadItemType,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.planning.load_plan import LoadPlan, ReadTable
from dist_checkpointing.planning.planners import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Destinations,
    Leaves,
    LoadPlanner,
    SavePlanner,
)
from dist_checkpointing.planning.replica_balancing import (
    BalancedSavePlanner,
    distribute_shards_to_ranks,
)
from dist_checkpointing.planning.resharding import plan_load

if typing.TYPE_CHECKING:
    from dist_checkpointing.planning.model_recipes import (
        llama_to_megatron,
        megatron_to_llama,
        megatron_to_mixtral,
        mixtral_to_megatron,
    )
    from dist_checkpointing.planning.quantization_rules import Dequantize
    from dist_checkpointing.planning.recipe import Derivation, Recipe, derive
    from dist_checkpointing.planning.recipe_rules import (
        CastTo,
        Concat,
        Drop,
        Keep,
        Missing,
        Rename,
        Resize,
        Rule,
        Split,
        Stack,
        Transpose,
        Unstack,
    )

__all__ = [
    "BalancedSavePlanner",
    "CastTo",
    "Concat",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "Dequantize",
    "Derivation",
    "Destinations",
    "Drop",
    "Keep",
    "Leaves",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "Missing",
    "ReadItem",
    "ReadTable",
    "Recipe",
    "Rename",
    "Resize",
    "RowBlockLayout",
    "Rule",
    "SavePlan",
    "SavePlanner",
    "Split",
    "Stack",
    "TensorWriteData",
    "Transpose",
    "Unstack",
    "WholeShardLayout",
    "WriteItem",
    "WriteItemType",
    "derive",
    "distribute_shards_to_ranks",
    "llama_to_megatron",
    "megatron_to_llama",
    "megatron_to_mixtral",
    "mixtral_to_megatron",
    "plan_load",
]

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        for module in ("recipe", "recipe_rules", "quantization_rules", "model_recipes"):
            found = vars(importlib.import_module(f"{__name__}.{module}")) if name in __all__ else {}
            if name in found:
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
