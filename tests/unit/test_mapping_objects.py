from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CheckpointingException, InvalidShardingError
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    logger,
)


def test_the_module_has_the_logger_of_megatrons() -> None:
    assert logger.name == "dist_checkpointing.mapping"


def test_the_order_of_fields() -> None:
    names = [field.name for field in fields(ShardedObject)]
    assert names == ["key", "data", "global_shape", "global_offset", "replica_id"]
    assert ShardedObject("k", 1, (2,), (0,)).replica_id == 0
    names = [field.name for field in fields(ShardedTensorFactory)]
    assert names == ["key", "data", "build_fn", "merge_fn", "replica_id", "flattened_range"]


@pytest.mark.parametrize(("shape", "offset"), [((2,), ()), ((), (0,))])
def test_shape_and_offset_have_the_same_length(
    shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidShardingError, match="'k'"):
        ShardedObject("k", None, shape, offset)


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


OTHER_NAMES = (
    " k /shard_0_1 shard_0_1 k/ k/shard k/shard_0 k/shard_0_1_2 k/part_0_1 k/shard_a_b "
    "k/shard_0_1/ k/shard_1..2_3.4.5 k/shard_0_1.2 k/shard_0.1.2_3 k/shard_0_1.pt"
)


@pytest.mark.parametrize("name", OTHER_NAMES.split(" "))
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointingException):
        ShardedObject.empty_from_unique_key(name)


def halves(key: str, data: torch.Tensor, replica_id: Any, flat: slice | None) -> list[Any]:
    assert flat is None
    return [
        ShardedTensor.from_rank_offsets(f"{key}.{i}", half, replica_id=replica_id)
        for i, half in enumerate(data.chunk(2))
    ]


def factory(
    key: str = "w", build: Callable[..., Any] = halves, merge: Callable[[Any], Any] = torch.cat
) -> ShardedTensorFactory:
    return ShardedTensorFactory(key, torch.arange(4.0), build, merge)


def doubling() -> ShardedTensorFactory:
    return factory(merge=lambda value: value * 2)


def test_without_data_and_validation() -> None:
    made = factory()
    empty = made.without_data()
    assert vars(empty) == {**vars(made), "data": None}
    assert made.data is not None
    made.validate_metadata_integrity()


def test_apply_factories_in_place() -> None:
    inner: list[Any] = [factory("a"), 1, {"b": factory("b")}]
    plain, local = object(), LocalNonpersistentObject(1)
    state: dict[str, Any] = {"l": inner, "p": plain, "n": local, 3: factory("c"), "e": {}}  # type: ignore[dict-item]
    apply_factories(state)
    assert state["l"] is inner
    assert [tensor.key for tensor in inner[0]] == ["a.0", "a.1"]
    assert inner[1] == 1
    assert [tensor.key for tensor in inner[2]["b"]] == ["b.0", "b.1"]
    assert state["p"] is plain
    assert state["n"] is local
    assert state[3][0].key == "c.0"  # type: ignore[index]
    assert state["e"] == {}
    assert list(state) == ["l", "p", "n", 3, "e"]


def test_lists_meet_lists_and_dicts_with_positions() -> None:
    inner = [1, 2]
    assert apply_factory_merges([1, inner], [doubling(), [doubling(), doubling()]]) == [2, [2, 4]]
    assert inner == [2, 4]
    assert apply_factory_merges([1, 2, 3], {2: doubling(), 0: doubling()}) == [2, 2, 6]
    assert apply_factory_merges({1: 1, "1": 2}, {1: doubling()}) == {1: 2, "1": 2}
    assert apply_factory_merges({"a": [1, {"b": 2}]}, {"a": {1: {"b": doubling()}}}) == {
        "a": [1, {"b": 4}]
    }


@pytest.mark.parametrize(
    ("loaded", "factories"),
    [
        ({"a": 1}, {"b": doubling()}),
        ({1: 1}, {"1": doubling()}),
        ([1], [doubling(), doubling()]),
        ([1, 2], {2: doubling()}),
        ([1, 2], {-1: doubling()}),
        ([1, 2], {1.0: doubling()}),
        ({0: 1}, [doubling()]),
        (5, {"a": doubling()}),
        ((1,), {0: doubling()}),
    ],
)
def test_places_that_do_not_exist(loaded: Any, factories: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot merge|not among"):
        apply_factory_merges(loaded, factories)


def test_the_error_names_the_place() -> None:
    with pytest.raises(ValueError, match=r"(?s)'model', 0.*gone|gone.*'model', 0"):
        apply_factory_merges({"model": [{"a": 1}]}, {"model": {0: {"gone": doubling()}}})
