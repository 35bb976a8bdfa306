"""What a planner of one's own gets wrong is an error on all ranks, and never a wrong checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import (
    CheckpointingException,
    InvalidShardingError,
    load_plain_tensors,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import DefaultSavePlanner, Leaves, SavePlan, WriteItem
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import rows, shard

WEIGHT = torch.linspace(-3, 3, 24).reshape(4, 6)
BIAS = torch.arange(4.0)


class DropsRows(DefaultSavePlanner):
    """A bug: one rank leaves a shard out that nobody else has."""

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items(plan.items[:-1] if self._rank == 1 else plan.items)


def test_a_planner_that_makes_a_gap_is_refused(tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        strategy = Zarr3SaveShardedStrategy(planner=DropsRows())
        save(
            {"w": rows("w", WEIGHT, comm)},
            tmp_path / "c",
            strategy,
            comm=comm,
        )

    with pytest.raises(InvalidShardingError, match="no shard holds this part"):
        run_ranks(2, one)
    assert not (tmp_path / "c").exists()


class Breaks(DefaultSavePlanner):
    def get_data(self, item: WriteItem) -> Any:
        raise RuntimeError(f"no data for {item.index.fqn}")


def test_a_planner_that_raises_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        planner = Breaks() if comm.rank == 1 else DefaultSavePlanner()
        strategy = Zarr3SaveShardedStrategy(planner=planner)
        with pytest.raises(CheckpointingException, match="no data for w"):
            save(
                {"w": rows("w", WEIGHT, comm)},
                tmp_path / "c",
                strategy,
                comm=comm,
            )

    run_ranks(2, one)


class AddsATensor(DefaultSavePlanner):
    """Rank 1 has something to add, although its state dict is empty."""

    def configure_planner(self, state_dict: Leaves, *, rank: int, **rest: Any) -> None:
        extra: Any = {}
        if rank == 1:
            extra = {("extra",): shard("extra", BIAS)}
        super().configure_planner({**state_dict, **extra}, rank=rank, **rest)


def test_a_planner_may_add_leaves(tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        state = {"w": shard("w", WEIGHT)} if comm.rank == 0 else {}
        save(state, tmp_path / "c", Zarr3SaveShardedStrategy(planner=AddsATensor()), comm=comm)

    run_ranks(2, one)
    saved = load_plain_tensors(tmp_path / "c")
    assert torch.equal(saved["extra"], BIAS)
    assert torch.equal(saved["w"], WEIGHT)


def test_items_added_to_an_empty_plan_belong_to_their_rank(tmp_path: Path) -> None:
    class Late(DefaultSavePlanner):
        """Takes all items out, and puts them back in a second step."""

        def build_local_plan(self) -> SavePlan:
            plan = super().build_local_plan()
            return plan.with_items([]).with_items(plan.items)

    def one(comm: Comm) -> None:
        strategy = Zarr3SaveShardedStrategy(planner=Late())
        save(
            {"w": rows("w", WEIGHT, comm)},
            tmp_path / "c",
            strategy,
            comm=comm,
        )

    run_ranks(2, one)
    assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], WEIGHT)
