"""Who writes and who reads which box: items, plans, planner protocol, default planners."""

from dist_checkpointing.planning.balance import distribute_shards_to_ranks
from dist_checkpointing.planning.balanced_planner import BalancedSavePlanner
from dist_checkpointing.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.planning.items import (
    LocalPlans,
    MetadataIndex,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.planning.llama_recipes import (
    llama_to_megatron,
    megatron_to_llama,
    megatron_to_mixtral,
    mixtral_to_megatron,
)
from dist_checkpointing.planning.metadata import Metadata
from dist_checkpointing.planning.planners import Destinations, LoadPlanner, SavePlanner
from dist_checkpointing.planning.read_items import LoadItemType, ReadItem
from dist_checkpointing.planning.read_table import LoadPlan, ReadTable
from dist_checkpointing.planning.reads import plan_load
from dist_checkpointing.planning.recipe import Recipe
from dist_checkpointing.planning.recipe_rules import CastTo, Drop, Keep, Missing, Rename
from dist_checkpointing.planning.recipe_shapes import (
    Concat,
    Resize,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from dist_checkpointing.planning.tensor_data import TensorWriteData

__all__ = [
    "BalancedSavePlanner",
    "CastTo",
    "Concat",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "Destinations",
    "Drop",
    "Keep",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LocalPlans",
    "Metadata",
    "MetadataIndex",
    "Missing",
    "ReadItem",
    "ReadTable",
    "Recipe",
    "Rename",
    "Resize",
    "SavePlan",
    "SavePlanner",
    "Split",
    "Stack",
    "TensorWriteData",
    "Transpose",
    "Unstack",
    "WriteItem",
    "WriteItemType",
    "distribute_shards_to_ranks",
    "llama_to_megatron",
    "megatron_to_llama",
    "megatron_to_mixtral",
    "mixtral_to_megatron",
    "plan_load",
]
