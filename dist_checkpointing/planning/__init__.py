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

if typing.TYPE_CHECKING:  # what ``__getattr__`` finds: all that these define
    from dist_checkpointing.planning.model_recipes import *  # noqa: F403
    from dist_checkpointing.planning.quantization import *  # noqa: F403
    from dist_checkpointing.planning.recipe import *  # noqa: F403
    from dist_checkpointing.planning.recipe_rules import *  # noqa: F403
else:

    def __getattr__(name: str) -> typing.Any:
        modules = ("recipe", "recipe_rules", "quantization", "model_recipes")
        for module in () if name.startswith("_") else modules:
            found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
            # Not what the module itself has imported.
            if getattr(found, "__module__", "").startswith(f"{__name__}."):
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
