"""How to change what is saved and loaded: subclass a default planner, and pass it to a strategy.

A planner works on *items*: on save, ``build_local_plan`` says what this rank brings, and
``get_data`` answers for one item; on load, ``configure_planner`` is given what is wanted, and
``apply_tensor`` puts one item where it belongs.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import Index
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Leaves,
    ReadItem,
    SavePlan,
    WriteItem,
)
from dist_checkpointing.strategies import (
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    StrategyAction,
    get_default_strategy,
)
from dist_checkpointing.testing import assert_same_bits, run_ranks
from states import flat, rows, shard, wholes

BACKENDS = pytest.mark.parametrize("backend", [("zarr", 1), ("tensorstore", 1)])


def saver(backend: tuple[str, int], planner: DefaultSavePlanner) -> PlannedSaveStrategy:
    strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)
    return type(strategy)(planner=planner)  # type: ignore[no-any-return]


def loader(backend: tuple[str, int], planner: DefaultLoadPlanner) -> PlannedLoadStrategy:
    strategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
    return type(strategy)(planner=planner)  # type: ignore[no-any-return]


WEIGHT = torch.linspace(-3, 3, 24).reshape(4, 6)
BIAS = torch.arange(4.0)
TWINS = {"weight": "twin"}


# --- rename a key -------------------------------------------------------------------------------


class SaveUnder(DefaultSavePlanner):
    """Saves under other names: old key -> new key."""

    def __init__(self, new_names: dict[str, str]) -> None:
        super().__init__()
        self.new_names = new_names

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items(self.renamed(item) for item in plan.items)

    def renamed(self, item: WriteItem) -> WriteItem:
        key = self.new_names.get(item.index.fqn, item.index.fqn)
        return replace(item, index=replace(item.index, fqn=key))


@BACKENDS
def test_save_under_another_name(tmp_path: Path, backend: tuple[str, int]) -> None:
    def one(comm: Comm) -> None:
        state = {"w": rows("weight", WEIGHT, comm), "b": rows("bias", BIAS, comm)}
        strategy = saver(backend, SaveUnder({"weight": "decoder.weight"}))
        dc.save(state, tmp_path / "c", strategy, comm=comm)
        assert state["w"].key == "weight"
        # Two keys cannot become one.
        state["t"], strategy = rows("twin", WEIGHT, comm), saver(backend, SaveUnder(TWINS))
        with pytest.raises(dc.InvalidShardingError, match="2 shards hold this part"):
            dc.save(state, tmp_path / "d", strategy, comm=comm)

    run_ranks(2, one)
    saved = dc.load_plain_tensors(tmp_path / "c")
    assert saved.keys() == {"decoder.weight", "bias"}
    assert torch.equal(saved["decoder.weight"], WEIGHT)
    assert torch.equal(saved["bias"], BIAS)
    assert not (tmp_path / "d").exists()


class LoadFrom(DefaultLoadPlanner):
    """Loads from other names: key in the template -> key in the checkpoint.

    What is ``kept`` stays in memory as it is.
    """

    def __init__(self, stored_names: dict[str, str], kept: Sequence[str] = ()) -> None:
        super().__init__()
        self.stored_names, self.kept = stored_names, kept

    def configure_planner(
        self, state_dict: Leaves, metadata: Index, *, is_coordinator: bool, rank: int
    ) -> None:
        wanted: Any = {
            path: replace(leaf, key=self.stored_names.get(leaf.key, leaf.key))  # type: ignore[type-var]
            for path, leaf in state_dict.items()
            if leaf.key not in self.kept
        }
        super().configure_planner(wanted, metadata, is_coordinator=is_coordinator, rank=rank)


@BACKENDS
def test_load_from_another_name_and_without_some_keys(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    dc.save(wholes({"old.weight": WEIGHT, "b": BIAS}), tmp_path / "c", backend)

    def one(comm: Comm) -> Any:
        strategy = loader(backend, LoadFrom({"new.weight": "old.weight"}, kept=["b"]))
        wanted = rows("new.weight", torch.zeros(4, 6), comm)
        bias = shard("b", torch.full((4,), 7.0))
        result: Any = dc.load({"w": wanted, "b": bias}, tmp_path / "c", strategy, comm=comm)
        assert result["w"] is wanted.data
        assert result["b"].tolist() == [7.0] * 4
        return wanted.data

    assert torch.equal(torch.cat(run_ranks(2, one)), WEIGHT)
    strategy = loader(backend, LoadFrom({"new.weight": "old.weight"}))
    result = strategy.load({"w": shard("new.weight", torch.zeros(4, 6))}, tmp_path / "c")
    assert torch.equal(result["w"], WEIGHT)
    absent = loader(backend, LoadFrom({"new.weight": "older.weight"}))
    with pytest.raises(dc.StateMismatchError, match=r"older\.weight|new\.weight"):
        dc.load({"w": shard("new.weight", torch.zeros(4, 6))}, tmp_path / "c", absent)


# --- skip a key ---------------------------------------------------------------------------------


class SaveWithout(DefaultSavePlanner):
    """Leaves out all keys that begin with a prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items(
            item for item in plan.items if not item.index.fqn.startswith(self.prefix)
        )


@BACKENDS
def test_save_without_some_keys(
    tmp_path: Path, backend: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    data = torch.arange(18.0).reshape(6, 3)

    def one(comm: Comm) -> None:
        keys = ("model.w", "cache.k", "cache.v")
        # All that the third rank holds is left out.
        state = {key: rows(key, data, comm) for key in keys[comm.rank // 2 :]}
        dc.save(state, tmp_path / "c", saver(backend, SaveWithout("cache.")), comm=comm)

    caplog.set_level(logging.INFO, "dist_checkpointing")
    with pytest.raises(dc.InvalidShardingError, match=r"'model\.w': no shard holds this part"):
        run_ranks(3, one)  # the third rank's rows of model.w are really missing
    assert not (tmp_path / "c").exists()
    run_ranks(2, one)
    saved = dc.load_plain_tensors(tmp_path / "c")
    assert saved.keys() == {"model.w"}
    assert torch.equal(saved["model.w"], data)
    assert "left out by the planner: cache.k, cache.v" in caplog.text


# --- change a dtype -----------------------------------------------------------------------------


class SaveAsBfloat16(DefaultSavePlanner):
    """Saves float32 tensors in half the space."""

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items(self.smaller(item) for item in plan.items)

    def smaller(self, item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or data.dtype != "float32":
            return item
        return replace(item, tensor_data=replace(data, dtype="bfloat16"))

    def get_data(self, item: WriteItem) -> Any:
        data = super().get_data(item)
        if item.tensor_data is not None and item.tensor_data.dtype == "bfloat16":
            assert isinstance(data, torch.Tensor)
            return data.to(torch.bfloat16)
        return data


@BACKENDS
def test_save_in_another_dtype(tmp_path: Path, backend: tuple[str, int]) -> None:
    steps = torch.arange(4)

    def one(comm: Comm) -> None:
        state = {"w": rows("w", WEIGHT, comm), "steps": rows("steps", steps, comm)}
        state["f"] = flat("f", WEIGHT, *((0, 5), (5, 24))[comm.rank])
        dc.save(state, tmp_path / "c", saver(backend, SaveAsBfloat16()), comm=comm)
        assert state["w"].dtype == torch.float32

    run_ranks(2, one)
    saved = dc.load_plain_tensors(tmp_path / "c")
    assert_same_bits(saved["w"], WEIGHT.to(torch.bfloat16), "w")
    assert_same_bits(saved["f"], WEIGHT.to(torch.bfloat16), "f")
    assert_same_bits(saved["steps"], steps, "steps")
    # For the way back no planner is needed: ``cast`` says that the difference is meant.
    result = dc.load({"w": shard("w", torch.zeros(4, 6))}, tmp_path / "c", cast="widen")
    assert torch.equal(result["w"], WEIGHT.to(torch.bfloat16).float())


def test_a_method_may_be_put_on_the_planner_itself(tmp_path: Path) -> None:
    to_save, to_load = DefaultSavePlanner(), DefaultLoadPlanner()

    def doubled(item: WriteItem) -> Any:
        data: Any = DefaultSavePlanner.get_data(to_save, item)
        return data * 2

    def halved(item: ReadItem, tensor: torch.Tensor) -> None:
        DefaultLoadPlanner.apply_tensor(to_load, item, tensor)
        DefaultLoadPlanner.acquire_tensor(to_load, item).div_(2)

    to_save.get_data, to_load.apply_tensor = doubled, halved  # type: ignore[method-assign]
    dc.save({"w": shard("w", WEIGHT)}, tmp_path / "c", saver(("zarr", 2), to_save))
    wanted = {"w": shard("w", torch.zeros(4, 6))}
    assert torch.equal(dc.load(wanted, tmp_path / "c")["w"], WEIGHT * 2)
    result = dc.load(wanted, tmp_path / "c", loader(("zarr", 2), to_load))
    assert torch.equal(result["w"], WEIGHT)


# --- objects -----------------------------------------------------------------------------------


def test_objects_can_be_renamed_and_skipped_too(tmp_path: Path) -> None:
    """Where the backend stores ShardedObjects itself, they are items like any other."""
    backend = ("tensorstore", 1)

    def objects() -> dict[str, Any]:
        return {key: dc.ShardedObject(key, [key], (1,), (0,)) for key in ("rng", "log.a")}

    dc.save(objects(), tmp_path / "a", saver(backend, SaveUnder({"rng": "random"})))
    wanted = {"rng": dc.ShardedObject("random", None, (1,), (0,))}
    assert dc.load(wanted, tmp_path / "a") == {"rng": ["rng"]}
    dc.save(objects(), tmp_path / "b", saver(backend, SaveWithout("log.")))
    with pytest.raises(dc.StateMismatchError, match=r"log\.a"):
        dc.load(objects(), tmp_path / "b")
    assert dc.load({"rng": objects()["rng"]}, tmp_path / "b") == {"rng": ["rng"]}


class AddsATensor(DefaultSavePlanner):
    """Rank 1 has something to add, although its state dict is empty."""

    def configure_planner(self, state_dict: Leaves, *, rank: int, **rest: Any) -> None:
        extra: Any = {}
        if rank == 1:
            extra = {("extra",): shard("extra", BIAS)}
        super().configure_planner({**state_dict, **extra}, rank=rank, **rest)

    def build_local_plan(self) -> SavePlan:
        """Takes all items out, and puts them back in a second step: they belong to their rank."""
        plan = super().build_local_plan()
        return plan.with_items([]).with_items(plan.items)


def test_a_planner_may_add_leaves(tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        state: dict[str, Any] = {"w": shard("w", WEIGHT)} if comm.rank == 0 else {}
        state["o"] = dc.ShardedObject("o", [1], (1,), (0,), replica_id=comm.rank)
        dc.save(state, tmp_path / "c", saver(("tensorstore", 1), AddsATensor()), comm=comm)

    run_ranks(2, one)
    saved = dc.load_plain_tensors(tmp_path / "c")
    assert torch.equal(saved["extra"], BIAS)
    assert torch.equal(saved["w"], WEIGHT)
