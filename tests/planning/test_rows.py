"""Writers and readers of ours work on rows; items are made for planners of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import ShardedObject, ShardedTensor, load, save
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    MetadataIndex,
    ReadItem,
    ReadTable,
    WriteItem,
    items,
)
from dist_checkpointing.planning.shard_table import describe
from dist_checkpointing.storage import WriteResult, WriteResults
from dist_checkpointing.strategies.base import StrategyAction, get_default_strategy

BACKENDS = pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2), ("torch_dist", 1)])


def state(fill: float | None = None) -> dict[str, Any]:
    """Tensors of several ranks of axes, a prepended axis, one that requires gradients."""

    def tensor(*shape: int) -> torch.Tensor:
        values = torch.arange(float(np.prod(shape))).reshape(shape)
        return values if fill is None else torch.full(shape, fill)

    parts = {name: tensor(*shape) for name, shape in SHAPES.items()}
    parts["grad"].requires_grad_()
    leaves: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(name, data) for name, data in parts.items()
    }
    leaves["o"] = ShardedObject("o", "old" if fill is None else None, (1,), (0,))
    return leaves


SHAPES = {"scalar": (), "row": (5,), "matrix": (3, 4), "grad": (2, 2, 2)}


def no_items(*_: object) -> Any:
    raise AssertionError("an item was made")


@BACKENDS
def test_plain_saves_and_loads_make_no_items(
    tmp_path: Path, backend: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "_item", no_items)
    monkeypatch.setattr(ReadTable, "item", no_items)
    save(state(), tmp_path / "c", backend)
    template = state(fill=-1.0)
    loaded = load(template, tmp_path / "c")
    assert isinstance(loaded, dict)
    for name, leaf in state().items():
        if name == "o":
            assert loaded[name] == "old"
        else:
            assert loaded[name] is template[name].data
            assert torch.equal(loaded[name], leaf.data)


@BACKENDS
@pytest.mark.parametrize("on_the_object", [True, False])
def test_a_method_of_the_users_own_is_asked(
    tmp_path: Path, backend: tuple[str, int], on_the_object: bool
) -> None:
    """Of a subclass, or put on the planner itself."""

    class Doubling(DefaultSavePlanner):
        def get_data(self, item: WriteItem) -> Any:
            data = DefaultSavePlanner.get_data(self, item)
            return data.detach() * 2 if isinstance(data, torch.Tensor) else data

    class Halving(DefaultLoadPlanner):
        def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
            DefaultLoadPlanner.apply_tensor(self, item, tensor)
            DefaultLoadPlanner.acquire_tensor(self, item).div_(2)

    saver: DefaultSavePlanner = Doubling()
    loader: DefaultLoadPlanner = Halving()
    if on_the_object:
        saver, loader = DefaultSavePlanner(), DefaultLoadPlanner()
        saver.get_data = Doubling.get_data.__get__(saver)  # type: ignore[method-assign]
        loader.apply_tensor = Halving.apply_tensor.__get__(loader)  # type: ignore[method-assign]
    strategies = []
    for action, planner in (
        (StrategyAction.SAVE_SHARDED, saver),
        (StrategyAction.LOAD_SHARDED, loader),
    ):
        strategies.append(type(get_default_strategy(action, *backend))(planner=planner))
    save(state(), tmp_path / "c", strategies[0])
    doubled: Any = load(state(fill=-1.0), tmp_path / "c")
    halved: Any = load(state(fill=-1.0), tmp_path / "c", strategies[1])
    for name in SHAPES:
        own = state()[name].data.detach()
        assert torch.equal(doubled[name], own * 2)
        assert torch.equal(halved[name], own)


def test_items_of_a_users_own_kind_are_kept() -> None:
    """A plan gives back the very items that it was made of, and reads what they say."""
    table = LoadPlan([]).table
    assert (len(table), LoadPlan(table).items) == (0, ())

    class Marked(ReadItem):
        """An item with more to it."""

    from dist_checkpointing.format.geometry import Box, Window
    from dist_checkpointing.planning import LoadItemType

    window = Window(2, (3, 4), Box((1, 0), (1, 4)))
    own = Marked(
        LoadItemType.TENSOR, MetadataIndex("w"), window, MetadataIndex("w", (3, 4)), window
    )
    plan = LoadPlan([own]).with_items([own, own])
    assert plan.items == (own, own)
    assert all(type(item) is Marked for item in plan.items)
    assert plan.table.storage(1) == window
    assert plan.num_elements == 8


def test_results_of_a_whole_plan_look_like_results_of_its_items() -> None:
    leaves = [ShardedTensor.from_rank_offsets(key, torch.ones(2, 2)) for key in ("a", "b")]
    table = describe(leaves, rank=0)
    sums = np.array([5, 2**63 + 1], dtype=np.uint64)
    files = (SealedFile("f", 7),)
    results = WriteResults(table, table.num_bytes, sums, np.array([False, True]), files, "mine")
    first = WriteResult(MetadataIndex("a", (0, 0), 0), 16)
    second = WriteResult(MetadataIndex("b", (0, 0), 1), 16, None, 2**63 + 1)
    rest = WriteResult(MetadataIndex(""), 32, "mine", None, files)
    assert list(results) == [first, second, rest]
    assert results[::-1] == [rest, second, first]
    assert results[-1] == rest
    assert list(WriteResults(table, table.num_bytes)) == [first, WriteResult(second.index, 16)]
