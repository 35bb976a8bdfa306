"""Places that numpy has computed: everything with ``__index__`` is an integer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dist_checkpointing as dc

FULL = torch.arange(24.0).reshape(4, 6)


class Three:
    """An integer of somebody else."""

    def __index__(self) -> int:
        return 3


def assert_plain(leaf: Any, **expected: Any) -> None:
    for name, value in expected.items():
        found = getattr(leaf, name)
        assert found == value, name
        flat = found if isinstance(found, tuple) else (found,)
        assert all(type(own) is int for own in flat), name


def test_the_fields_of_a_tensor_become_plain_ints() -> None:
    shard = dc.ShardedTensor(
        "w",
        torch.zeros(2),
        torch.float32,
        np.array([3, 3]),  # type: ignore[arg-type]
        (np.int8(1), Three(), np.uint64(6)),  # type: ignore[arg-type]
        [np.int32(0), 0, torch.tensor(3)],  # type: ignore[arg-type]
        np.array([1, 1, 2]),  # type: ignore[arg-type]
        replica_id=(np.int64(0), Three()),  # type: ignore[arg-type]
        prepend_axis_num=np.int16(1),  # type: ignore[arg-type]
        flattened_range=slice(np.int64(1), Three()),
    )
    plain = {"local_shape": (3, 3), "global_shape": (1, 3, 6), "global_offset": (0, 0, 3)}
    plain |= {"axis_fragmentations": (1, 1, 2), "replica_id": (0, 3)}
    assert_plain(shard, **plain, prepend_axis_num=1, flat_range=(1, 3))
    said = ", ".join(f"{name}={value}" for name, value in plain.items())
    assert said in repr(shard)
    assert repr(shard).endswith("flattened_range=slice(1, 3, None))")


def test_rank_offsets_may_come_from_numpy() -> None:
    dp, tp = np.unravel_index(3, (2, 2))
    offset = (0, tp, np.int64(2))
    numbers: Any = {"replica_id": np.int64(0), "prepend_axis_num": np.int64(1)}
    shard = dc.ShardedTensor.from_rank_offsets(
        "w", FULL[2:], offset, (np.int8(1), dp - 1, Three()), replica_id=numbers["replica_id"]
    )
    assert_plain(
        shard, global_shape=(4, 18), global_offset=(2, 0), axis_fragmentations=(2, 3), replica_id=0
    )
    stacked = dc.ShardedTensor.from_rank_offsets("w", FULL, offset, **numbers)
    assert_plain(stacked, global_shape=(2, 4, 6))
    ranges = slice(np.int64(4), np.int64(7))
    shape: Any = np.array([2, 6])
    flat = dc.ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(3), shape, offset, flattened_range=ranges
    )
    assert_plain(flat, local_shape=(2, 6), global_offset=(2, 0), flat_range=(4, 7))


def test_the_fields_of_an_object_and_of_a_factory_become_plain_ints() -> None:
    cell = dc.ShardedObject("o", 1, np.array([2, 3]), (np.int64(1), Three()), np.int64(0))  # type: ignore[arg-type]
    assert cell.unique_key == "o/shard_1.3_2.3"
    assert_plain(cell, global_shape=(2, 3), global_offset=(1, 3), replica_id=0)
    replica_id: Any = (np.int64(1), 0)
    factory = dc.ShardedTensorFactory(
        "f", FULL, lambda *_: {}, lambda x: x, replica_id, slice(np.int8(0), Three())
    )
    assert factory.flattened_range == slice(0, 3)
    assert_plain(factory, replica_id=(1, 0))


@pytest.mark.parametrize("wrong", [None, 0.0, "0", (0, 1.5), np.float64(0)])
def test_what_is_no_integer_is_named_with_its_key(wrong: Any) -> None:
    makers: list[Callable[[], object]] = [
        lambda: dc.ShardedTensor.from_rank_offsets("my.key", FULL, replica_id=wrong),
        lambda: dc.ShardedTensor.from_rank_offsets("my.key", FULL, (0, wrong, 2)),
        lambda: dc.ShardedObject("my.key", 1, (1,), (0,), wrong),
        lambda: dc.ShardedTensorFactory("my.key", FULL, lambda *_: {}, lambda x: x, wrong),
    ]
    for make in makers:
        with pytest.raises(dc.InvalidShardingError, match="integers") as caught:
            make()
        assert [finding.key for finding in caught.value.findings] == ["my.key"]


def test_a_rank_offset_has_three_entries_and_an_array_is_no_tensor() -> None:
    wrong: Any = (0, 1)
    with pytest.raises(dc.CheckpointingException, match=r"found \(0, 1\)"):
        dc.ShardedTensor.from_rank_offsets("w", FULL, wrong)
    array: Any = FULL.numpy()
    with pytest.raises(dc.InvalidShardingError, match=r"torch tensor; found numpy\.ndarray"):
        dc.ShardedTensor.from_rank_offsets("w", array)
