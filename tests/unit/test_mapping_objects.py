from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CheckpointingException, InvalidShardingError
from dist_checkpointing.mapping import ShardedObject


def test_field_order() -> None:
    names = [field.name for field in fields(ShardedObject)]
    assert names == ["key", "data", "global_shape", "global_offset", "replica_id"]
    assert ShardedObject("k", 1, (2,), (0,)).replica_id == 0


@pytest.mark.parametrize(("shape", "offset"), [((2,), ()), ((), (0,)), ((1, 2), (0,))])
def test_shape_and_offset_have_the_same_length(
    shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidShardingError, match="'k'"):
        ShardedObject("k", None, shape, offset)


def test_without_data_is_a_copy() -> None:
    obj = ShardedObject("k", {"a": 1}, (2,), (1,), (0, 1))
    empty = obj.without_data()
    assert empty == ShardedObject("k", None, (2,), (1,), (0, 1))
    assert obj.data == {"a": 1}


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (ShardedObject("rng_state", None, (1, 2), (0, 1)), "rng_state/shard_0.1_1.2"),
        (ShardedObject("k", None, (3,), (2,)), "k/shard_2_3"),
        (ShardedObject("k", None, (), ()), "k/shard__"),
        (ShardedObject("a/b_c.d", None, (10, 200), (3, 14)), "a/b_c.d/shard_3.14_10.200"),
    ],
)
def test_unique_key_is_the_name_on_disk(obj: ShardedObject, name: str) -> None:
    assert obj.unique_key == name
    assert ShardedObject.empty_from_unique_key(name) == obj


@given(
    st.text(min_size=1),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=3),
    st.one_of(st.integers(0, 3), st.tuples(st.integers(0, 1), st.integers(0, 1))),
)
def test_unique_key_can_be_read_back_whatever_the_key(
    key: str, cells: list[tuple[int, int]], replica_id: int | tuple[int, int]
) -> None:
    offset = tuple(o for o, _ in cells)
    shape = tuple(o + s for o, s in cells)
    obj = ShardedObject(key, None, shape, offset, replica_id)
    assert ShardedObject.empty_from_unique_key(obj.unique_key, replica_id) == obj


@pytest.mark.parametrize(
    ("name", "shape", "offset"),
    [
        ("k/shard_0.1_1", (1, -1), (0, 1)),
        ("k/shard_0.1.2_4.5", (4, 5, -1), (0, 1, 2)),
        ("a/b/shard_3.4_9", (9, -1), (3, 4)),
    ],
)
def test_the_extent_that_old_writers_lost_is_unknown(
    name: str, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    obj = ShardedObject.empty_from_unique_key(name)
    assert obj.global_shape == shape
    assert obj.global_offset == offset
    assert ShardedObject.empty_from_unique_key(obj.unique_key) == obj


@pytest.mark.parametrize(
    "name",
    [
        "",
        "k",
        "/shard_0_1",
        "shard_0_1",
        "k/",
        "k/shard",
        "k/shard_0",
        "k/shard_0_1_2",
        "k/part_0_1",
        "k/shard_a_b",
        "k/shard_0_1/",
        "k/shard_1..2_3.4.5",
        "k/shard_0_1.2",
        "k/shard_0.1.2_3",
        "k/shard_0_1.pt",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointingException):
        ShardedObject.empty_from_unique_key(name)
