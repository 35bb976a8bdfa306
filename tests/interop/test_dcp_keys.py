"""Names and places: flattened by DCP, nested by us, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dist_checkpointing import CorruptCheckpointError
from dist_checkpointing.interop.torch_dcp.reader import DCP_KEYS_NAME, DCPKeys, dcp_names_in
from dist_checkpointing.storage import Durability

scalars = st.none() | st.integers() | st.text(max_size=3) | st.tuples(st.integers())
tensors = st.just(torch.zeros(1))
texts = st.text("ab0", min_size=1, max_size=2)


def nests(leaves: Any) -> Any:
    children = st.recursive(
        leaves,
        lambda child: (
            st.lists(child, min_size=1, max_size=3)
            | st.dictionaries(texts, child, min_size=1, max_size=3)
        ),
        max_leaves=8,
    )
    return st.dictionaries(texts, children, max_size=3)


def without_tensors(value: Any) -> Any:
    """What our common state keeps of it."""
    if isinstance(value, dict):
        kept = {key: without_tensors(child) for key, child in value.items()}
        return {key: child for key, child in kept.items() if child is not ...} or ...
    if isinstance(value, list):
        kept_items = [without_tensors(child) for child in value]
        if all(child is ... for child in kept_items):
            return ...
        return [None if child is ... else child for child in kept_items]
    return ... if isinstance(value, torch.Tensor) else value


@given(nests(scalars | tensors))
def test_what_dcp_flattens_is_nested_as_it_was(state: dict[str, Any]) -> None:
    flat, mappings = flatten_state_dict(state)
    values = {name: v for name, v in flat.items() if not isinstance(v, torch.Tensor)}
    keys = DCPKeys.of(flat, values, [], mappings)
    nested = keys.nest(values)
    expected = without_tensors(state)
    assert nested == ({} if expected is ... else expected)
    assert keys.values_in(nested) == values


@given(nests(scalars | tensors))
def test_names_are_those_that_dcp_gives(state: dict[str, Any]) -> None:
    flat, mappings = flatten_state_dict(state)
    expected = {name: v for name, v in flat.items() if not isinstance(v, torch.Tensor)}
    common = without_tensors(state)
    found = dcp_names_in({} if common is ... else common, flat.keys() - expected.keys())
    assert {name: value for name, (_, value) in found.items()} == expected
    assert {name: path for name, (path, _) in found.items()} == {n: mappings[n] for n in expected}


@pytest.mark.parametrize(
    "planner_data",
    [
        None,
        "something else",
        {"a": ("a",), "b.c": ("a", "c")},  # leads through a value
        {"a": ("x",), "b.c": ("x",)},  # two values at one place
        {"a": (0,), "b.c": ("b",)},  # a list and a dict at once
        {"a": (0,), "b.c": (1,)},  # all of it would be a list
        {"a": (), "b.c": (1.5,)},
    ],
)
def test_paths_that_do_not_fit_leave_names_at_the_top(planner_data: Any) -> None:
    keys = DCPKeys.of(["a", "b.c"], ["a", "b.c"], [], planner_data)
    assert keys.nest({"a": 1, "b.c": 2}) == {"a": 1, "b.c": 2}


def test_the_file(tmp_path: Path) -> None:
    assert DCPKeys.read(tmp_path) is None
    keys = DCPKeys({"a.0.b": ("a", 0, "b"), "w": ("w",)}, ("a.0.b",), ("a.0.b",))
    keys.write(tmp_path, Durability.PAGE_CACHE)
    assert DCPKeys.read(tmp_path) == keys
    (tmp_path / DCP_KEYS_NAME).write_text('{"format": "dist_checkpointing.dcp_keys"}')
    with pytest.raises(CorruptCheckpointError, match="names cannot be read"):
        DCPKeys.read(tmp_path)
