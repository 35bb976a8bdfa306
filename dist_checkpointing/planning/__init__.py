"""Who writes and who reads which box: items, plans, planner protocol, default planners."""

from dist_checkpointing.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.planning.items import (
    LoadItemType,
    LoadPlan,
    LocalPlans,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dist_checkpointing.planning.planners import LoadPlanner, SavePlanner
from dist_checkpointing.planning.reads import plan_load

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LocalPlans",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "plan_load",
]
