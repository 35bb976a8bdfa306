"""What a leaf became after it was made is checked when it is saved, of all leaves at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import CheckpointingException, InvalidShardingError, ShardedTensor, save
from dist_checkpointing.errors import Finding
from states import shard

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"key": 5}, "must be a string that is not empty"),
    ({"key": ""}, "must be a string that is not empty"),
    ({"key": "\ud800"}, "text that UTF-8 can hold"),
    ({"dtype": torch.int32}, "another dtype"),
    ({"dtype": torch.quint8, "data": None}, "is None"),
    ({"global_offset": (0.0, 0)}, "must hold integers"),
    ({"global_offset": (-4, 0)}, "must hold ints >= 0"),
    ({"global_shape": (8, 6, 1)}, "one entry for each axis"),
    ({"global_offset": (0,)}, "one entry for each axis"),
    ({"prepend_axis_num": 1}, "must add up"),
    ({"prepend_axis_num": -1}, "must not be negative"),
    ({"global_offset": (8, 0)}, "sticks out"),
    ({"global_offset": (5, 0), "axis_fragmentations": None}, "sticks out"),
    ({"global_shape": (7, 6)}, "sticks out"),
    (
        {
            "global_shape": (7, 8, 6),
            "global_offset": (7, 4, 0),  # on prepended axes an index
            "axis_fragmentations": (7, 2, 1),
            "prepend_axis_num": 1,
        },
        "sticks out",
    ),
    ({"replica_id": "0"}, "replica_id must hold integers"),
    ({"replica_id": (0.5,)}, "replica_id must hold integers"),
    ({"global_offset": (2, 0), "global_shape": (9, 6)}, "a multiple of the local shape"),
    ({"axis_fragmentations": (2,)}, "one entry for each global axis"),
    ({"axis_fragmentations": (0, 1)}, "must be at least 1"),
    ({"flattened_range": slice(0, 24, 1)}, "must not have a step"),
    ({"flattened_range": slice(0, None)}, "must lie inside the local tensor"),
    ({"flattened_range": slice(20, 30), "data": torch.zeros(10)}, "must lie inside"),
    ({"flattened_range": slice(9, 8), "data": torch.zeros(0)}, "must lie inside"),
    ({"flattened_range": slice(0, 5)}, "has another shape"),
    ({"data": torch.zeros(6, 4)}, "has another shape"),
    ({"data": None}, "is None"),
]
RIGHT: list[dict[str, Any]] = [
    {"local_shape": [4, 6]},
    {"global_offset": (np.int64(4), 0)},
    {"replica_id": [0, 1]},
    {"global_offset": (2, 0), "global_shape": (9, 6), "axis_fragmentations": None},
    {"flattened_range": slice(0, 24), "data": torch.zeros(24)},
]


def spoilt(key: str, fields: dict[str, Any]) -> ShardedTensor:
    """Half of a tensor with other values of some fields."""
    leaf = shard(key, torch.zeros(4, 6), (0, 1, 2))
    for name, value in fields.items():
        setattr(leaf, name, value)
    return leaf


def found(folder: Path, leaves: list[ShardedTensor]) -> list[Finding]:
    with pytest.raises(InvalidShardingError) as raised:
        save({"leaves": [shard("a", torch.zeros(4)), *leaves]}, folder / "c")
    assert not (folder / "c").exists()
    return list(raised.value.findings)


@pytest.mark.parametrize(("fields", "problem"), WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    (finding,) = found(tmp_path, [spoilt("w", fields)])
    assert problem in finding.problem
    assert finding.key == (None if "key" in fields else "w")
    if "key" not in fields and fields.get("data", 0) is not None:  # nor is such a leaf made
        with pytest.raises(InvalidShardingError, match=problem) as raised:
            replace(shard("w", torch.zeros(4, 6), (0, 1, 2)), **fields)
        assert "'w'" in str(raised.value)
        if "shape" in problem and "data" in fields:
            assert "expected (4, 6); found (6, 4)" in str(raised.value)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    own = [fields for fields, problem in WRONG if "key" not in fields and "None" not in problem]
    leaves = [spoilt(f"w{number}", fields) for number, fields in enumerate([*RIGHT, *own])]
    wrong = [leaf.key for leaf in leaves[len(RIGHT) :]]
    assert [finding.key for finding in found(tmp_path, leaves)] == wrong


@pytest.mark.parametrize(
    "fields", [{"global_shape": (10**30, 6)}, {"data": np.zeros((4, 6), dtype=np.float32)}]
)
def test_what_is_no_shape_or_no_tensor_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException):
        save({"w": spoilt("w", fields)}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
