"""Items are how a planner sees the rows of a plan."""

from typing import Any

import torch

from dist_checkpointing.format import Box
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.planning import (
    DefaultSavePlanner,
    MetadataIndex,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from states import shard


def test_what_a_leaf_looks_like_as_an_item() -> None:
    tensor = shard(
        "w", torch.zeros(3, 4), (0, 1, 2), (1, 2, 3), prepend_axis_num=1, replica_id=(0, 1)
    )
    flat = ShardedTensor.from_rank_offsets_flat(
        "f", torch.zeros(5, dtype=torch.int8), (3, 4), (1, 1, 2), flattened_range=slice(2, 7)
    )
    cell = ShardedObject("o", {}, (2, 3), (1, 2))
    planner, state = DefaultSavePlanner(), dict[Any, Any](enumerate([tensor, flat, cell]))
    planner.configure_planner(state, is_coordinator=False, rank=4)
    one, two, three = planner.build_local_plan().items
    assert one == WriteItem(
        MetadataIndex("w", (1, 6, 0), 0),
        WriteItemType.TENSOR,
        TensorWriteData(Box((1, 6, 0), (1, 3, 4)), "float32", (2, 9, 4)),
        None,
        is_main_replica=False,
    )
    assert two.tensor_data == TensorWriteData(Box((0, 4), (3, 4)), "int8", (3, 8), (2, 7))
    assert two.tensor_storage_size() == 5
    assert three == WriteItem(
        MetadataIndex("o", (1, 2), 2), WriteItemType.BYTE_IO, object_cell=(2, 3)
    )
