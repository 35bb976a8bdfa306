"""Plans are tables, and items are how a planner sees them: both ways, nothing is lost."""

import math
from typing import Any

import torch
from hypothesis import given, strategies as st

from dist_checkpointing.format import Box
from dist_checkpointing.mapping import DTYPES, ShardedObject, ShardedTensor
from dist_checkpointing.planning import (
    DefaultSavePlanner,
    MetadataIndex,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from states import shard

KEYS = st.text(min_size=1, max_size=8)


@st.composite
def tensor_items(draw: st.DrawFn) -> WriteItem:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, extent)) for extent in shape)
    extents = tuple(
        draw(st.integers(0, extent - start)) for start, extent in zip(offset, shape, strict=True)
    )
    flat = None
    if draw(st.booleans()):
        edges = st.integers(0, math.prod(extents))
        start, stop = sorted((draw(edges), draw(edges)))
        flat = (start, stop)
    data = TensorWriteData(Box(offset, extents), draw(st.sampled_from(DTYPES)).name, shape, flat)
    index = MetadataIndex(draw(KEYS), offset, draw(st.integers(0, 99)))
    return WriteItem(index, WriteItemType.TENSOR, data, is_main_replica=draw(st.booleans()))


@st.composite
def object_items(draw: st.DrawFn) -> WriteItem:
    grid = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    cell = tuple(draw(st.integers(0, extent - 1)) for extent in grid)
    index = MetadataIndex(draw(KEYS), cell, draw(st.integers(0, 99)))
    is_main = draw(st.booleans())
    return WriteItem(index, WriteItemType.BYTE_IO, object_cell=grid, is_main_replica=is_main)


ITEMS = st.lists(st.one_of(tensor_items(), object_items()), max_size=12)


@given(ITEMS)
def test_items_to_table_and_back(items: list[WriteItem]) -> None:
    plan = SavePlan([], planner_data="mine", storage_data=7).with_items(items)
    assert plan.items == items
    assert plan.with_items(plan.items[::-1]).items == items[::-1]
    assert (plan.planner_data, plan.storage_data) == ("mine", 7)
    sizes = [item.tensor_storage_size() for item in items]
    for item, size in zip(items, sizes, strict=True):
        assert (size is None) == (item.type is WriteItemType.BYTE_IO)
        if item.tensor_data is not None:
            data = item.tensor_data
            count = math.prod(data.chunk.shape)
            if data.flat_range is not None:
                count = len(range(*data.flat_range))
            itemsize = next(d.torch.itemsize for d in DTYPES if d.name == data.dtype)
            assert size == count * itemsize
    assert plan.num_bytes == sum(filter(None, sizes))


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
