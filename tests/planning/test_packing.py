"""Packed tables: the same rows again, in few bytes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import ShardedObject, ShardedTensor
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.mapping.objects_and_factories import ReplicaId
from dist_checkpointing.planning.shard_table import ShardTable, describe, pack, unpack
from states import shard


@st.composite
def leaves(draw: st.DrawFn) -> ShardedBase:
    key = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
    replicas: list[ReplicaId] = [0, 1, (0, 0), (0, 3)]
    replica = draw(st.sampled_from(replicas))
    shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
    if draw(st.booleans()):
        grid = tuple(extent + 1 for extent in shape) or (1,)
        return ShardedObject(key, None, grid, (0,) * len(grid), replica)
    flat = None
    if draw(st.booleans()) and len(shape) <= 1:
        size = shape[0] if shape else 1
        flat = slice(size // 3, size // 2 + size % 2)
    offset = tuple(draw(st.integers(0, 2**40)) for _ in shape)
    whole = tuple(o + n for o, n in zip(offset, shape, strict=True))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    return ShardedTensor(
        key, None, dtype, shape, whole, offset, None, replica, flattened_range=flat
    )


def assert_same(one: ShardTable, other: ShardTable) -> None:
    for field in fields(ShardTable):
        own, found = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("names", "holders"):
            assert own == found
        else:
            assert own.dtype == found.dtype, field.name
            assert np.array_equal(own, found), field.name


@given(rows=st.lists(leaves(), max_size=8), rank=st.integers(0, 100_000))
def test_every_table_comes_back(rows: list[ShardedBase], rank: int) -> None:
    table = describe(rows, rank)
    assert_same(unpack(pack(table), rank), table)


def test_a_model_takes_few_bytes_a_shard() -> None:
    model = [
        shard(
            f"decoder.layers.{i // 12}.{'abcdefghijkl'[i % 12]}.weight",
            torch.empty(64 << i % 3, 128, device="meta"),
            (0, 5, 8),
            replica_id=(0, 0, 3),
        )
        for i in range(1200)
    ]
    assert len(pack(describe(model, 0))) <= 16 * len(model)
