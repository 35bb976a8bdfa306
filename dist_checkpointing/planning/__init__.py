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
from dist_checkpointing.planning.metadata import Metadata
from dist_checkpointing.planning.planners import Destinations, LoadPlanner, SavePlanner
from dist_checkpointing.planning.read_items import LoadItemType, ReadItem
from dist_checkpointing.planning.read_table import LoadPlan, ReadTable
from dist_checkpointing.planning.reads import plan_load
from dist_checkpointing.planning.tensor_data import TensorWriteData

__all__ = [
    "BalancedSavePlanner",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "Destinations",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LocalPlans",
    "Metadata",
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
