"""Who writes and who reads which box: items, plans, planner protocol, default planners."""

from dist_checkpointing.planning.balance import distribute_shards_to_ranks
from dist_checkpointing.planning.balanced_planner import BalancedSavePlanner
from dist_checkpointing.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.planning.items import (
    LocalPlans,
    MetadataIndex,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.planning.planners import Destinations, LoadPlanner, SavePlanner
from dist_checkpointing.planning.read_table import LoadItemType, LoadPlan, ReadItem, ReadTable
from dist_checkpointing.planning.reads import plan_load

__all__ = [
    "BalancedSavePlanner",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "Destinations",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LocalPlans",
    "MetadataIndex",
    "ReadItem",
    "ReadTable",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "distribute_shards_to_ranks",
    "plan_load",
]
