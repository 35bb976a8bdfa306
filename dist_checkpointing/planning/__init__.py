"""Who writes and who reads which box: items, plans, planner protocol, default planners.

Recipes are imported on first use.
"""

import importlib
import typing

from dist_checkpointing.planning.chunking import (
    RowBlockLayout as RowBlockLayout,
    WholeShardLayout as WholeShardLayout,
)
from dist_checkpointing.planning.items import (
    LoadItemType as LoadItemType,
    Metadata as Metadata,
    MetadataIndex as MetadataIndex,
    ReadItem as ReadItem,
    SavePlan as SavePlan,
    TensorWriteData as TensorWriteData,
    WriteItem as WriteItem,
    WriteItemType as WriteItemType,
)
from dist_checkpointing.planning.load_plan import LoadPlan as LoadPlan, ReadTable as ReadTable
from dist_checkpointing.planning.planners import (
    DefaultLoadPlanner as DefaultLoadPlanner,
    DefaultSavePlanner as DefaultSavePlanner,
    Destinations as Destinations,
    Leaves as Leaves,
    LoadPlanner as LoadPlanner,
    SavePlanner as SavePlanner,
)
from dist_checkpointing.planning.replica_balancing import (
    BalancedSavePlanner as BalancedSavePlanner,
    distribute_shards_to_ranks as distribute_shards_to_ranks,
)
from dist_checkpointing.planning.resharding import plan_load as plan_load

if typing.TYPE_CHECKING:
    from dist_checkpointing.planning.model_recipes import (
        llama_to_megatron as llama_to_megatron,
        megatron_to_llama as megatron_to_llama,
        megatron_to_mixtral as megatron_to_mixtral,
        mixtral_to_megatron as mixtral_to_megatron,
    )
    from dist_checkpointing.planning.quantization import (
        Dequantize as Dequantize,
        Quantize as Quantize,
    )
    from dist_checkpointing.planning.recipe import (
        Derivation as Derivation,
        Recipe as Recipe,
        derive as derive,
    )
    from dist_checkpointing.planning.recipe_rules import (
        CastTo as CastTo,
        Concat as Concat,
        Drop as Drop,
        Keep as Keep,
        Missing as Missing,
        Rename as Rename,
        Resize as Resize,
        Rule as Rule,
        Split as Split,
        Stack as Stack,
        Transpose as Transpose,
        Unstack as Unstack,
    )

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        modules = ("recipe", "recipe_rules", "quantization", "model_recipes")
        for module in () if name.startswith("_") else modules:
            found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
            # Not what the module itself has imported.
            if getattr(found, "__module__", "").startswith(f"{__name__}."):
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
