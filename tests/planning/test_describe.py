"""Leaves as columns: checked all at once, with what is found of each by itself."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import InvalidShardingError, ShardedObject, ShardedTensor
from dist_checkpointing.errors import Finding
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.planning import shard_table as module
from dist_checkpointing.planning.shard_table import COLUMNS, describe

Spoil = Callable[[ShardedTensor], object]


def _set(**fields: object) -> Spoil:
    def spoil(leaf: ShardedTensor) -> None:
        for name, value in fields.items():
            setattr(leaf, name, value)

    return spoil


SPOILT: dict[str, Spoil] = {
    "nothing": _set(),
    "no text": _set(key=5),
    "no key": _set(key=""),
    "a key that is no text": _set(key="\ud800"),
    "another dtype": _set(dtype=torch.int32),
    "a dtype that is not stored": _set(dtype=torch.quint8, data=None),
    "a list for a shape": _set(local_shape=[4, 6]),
    "a bool for an extent": _set(global_shape=(True, 6), data=None),
    "a float for an extent": _set(global_offset=(0.0, 0)),
    "numpy for an extent": _set(global_offset=(np.int64(4), 0)),
    "a negative offset": _set(global_offset=(-4, 0)),
    "an axis more": _set(global_shape=(8, 6, 1)),
    "an offset less": _set(global_offset=(0,)),
    "an extent over 64 bits": _set(global_shape=(10**30, 6)),
    "a prepended axis more": _set(prepend_axis_num=1),
    "a negative number of axes": _set(prepend_axis_num=-1),
    "a shard that sticks out": _set(global_offset=(8, 0)),
    "one that may": _set(global_offset=(8, 0), allow_shape_mismatch=True),
    "a replica that is a list": _set(replica_id=[0, 1]),
    "a replica that is text": _set(replica_id="0"),
    "a replica of a float": _set(replica_id=(0.5,)),
    "off the grid": _set(global_offset=(2, 0), global_shape=(9, 6)),
    "uneven, and that is said": _set(
        global_offset=(2, 0), global_shape=(9, 6), axis_fragmentations=None
    ),
    "a grid of another length": _set(axis_fragmentations=(2,)),
    "a grid of nothing": _set(axis_fragmentations=(0, 1)),
    "a range with a step": _set(flattened_range=slice(0, 24, 1)),
    "a range without an end": _set(flattened_range=slice(0, None)),
    "a range outside": _set(flattened_range=slice(20, 30), data=None),
    "a range backwards": _set(flattened_range=slice(9, 8), data=None),
    "a range of other data": _set(flattened_range=slice(0, 5)),
    "a right range": _set(flattened_range=slice(0, 5), data=torch.zeros(5)),
    "data of another shape": _set(data=torch.zeros(6, 4)),
    "data that is no tensor": _set(data=np.zeros((4, 6), dtype=np.float32)),
    "no data": _set(data=None),
}


def leaf(key: str = "w") -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(4, 6), (0, 1, 2), replica_id=(0, 1))


def outcome(leaves: list[ShardedBase]) -> list[Finding] | dict[str, object]:
    try:
        table = describe(leaves, 3)
    except InvalidShardingError as error:
        return list(error.findings)
    columns = {name: getattr(table, name).tolist() for name in COLUMNS}
    return columns | {"keys": table.key_column, "dtypes": table.dtype_column}


def one_by_one(leaves: list[ShardedBase]) -> list[Finding] | dict[str, object]:
    with patch.object(module, "_columns", lambda *_: None):
        return outcome(leaves)


@pytest.mark.parametrize("name", SPOILT)
def test_each_leaf_is_as_right_or_wrong_as_by_itself(name: str) -> None:
    spoilt = leaf()
    SPOILT[name](spoilt)
    leaves = [leaf("a"), spoilt, ShardedObject("o", None, (2, 2), (1, 0)), leaf("z")]
    try:
        expected = one_by_one(leaves)
    except OverflowError:
        with pytest.raises(OverflowError):
            outcome(leaves)
        return
    assert outcome(leaves) == expected


@given(st.lists(st.sampled_from([*SPOILT]), max_size=4))
def test_all_that_is_wrong_is_said_at_once(names: list[str]) -> None:
    leaves: list[ShardedBase] = []
    for name in names:
        leaves.append(leaf(f"w{len(leaves)}"))
        if name != "an extent over 64 bits":
            SPOILT[name](leaves[-1])  # type: ignore[arg-type]
    assert outcome(leaves) == one_by_one(leaves)


def test_a_right_state_is_not_looked_at_one_by_one() -> None:
    leaves: list[ShardedBase] = [leaf("a"), ShardedObject("o", None, (2,), (1,)), leaf("b")]
    flat = ShardedTensor.from_rank_offsets_flat(
        "f", torch.zeros(3), (4, 6), (0, 0, 7), prepend_axis_num=1, flattened_range=slice(2, 5)
    )
    with patch.object(module, "_row", side_effect=AssertionError):
        table = describe([*leaves, flat], 1)
    assert table.key_column == ["a", "o", "b", "f"]
    assert table.shapes[3].tolist() == [1, 4, 6]
    assert table.sources.tolist() == [0, 1, 2, 3]
