"""Names and places: flattened by DCP, nested by us, and back."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dist_checkpointing import load_common_state_dict, save
from dist_checkpointing.interop import DCPReader, DCPWriter, shard_state_dict
from tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

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


@examples(40)
@given(nests(scalars | tensors), st.booleans())
def test_names_and_paths_are_those_of_dcp(state: dict[str, Any], by_dcp: bool) -> None:
    flat, mappings = flatten_state_dict(state)
    names = {name for name, value in flat.items() if isinstance(value, torch.Tensor)}
    expected = without_tensors(state)
    with tempfile.TemporaryDirectory() as folder:
        if by_dcp:
            dcp_save(state, storage_writer=DCPWriter(folder, ("zarr", 2)))
        else:
            save(shard_state_dict(state), folder, ("zarr", 2))
            mappings |= {name: (name,) for name in names}
        found = DCPReader(folder).read_metadata()
        assert load_common_state_dict(folder) == ({} if expected is ... else expected)
    described = found.state_dict_metadata
    assert names == {n for n, d in described.items() if isinstance(d, TensorStorageMetadata)}
    assert found.planner_data == mappings


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
def test_paths_that_do_not_fit_leave_names_at_the_top(planner_data: Any, tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=planner_data)

    state = {"a": 1, "b.c": 2}
    dcp_save(state, storage_writer=DCPWriter(tmp_path, ("zarr", 2)), planner=Planner())
    assert load_common_state_dict(tmp_path) == state
