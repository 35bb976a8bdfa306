"""What a planner of one's own gets wrong is an error on all ranks, and never a wrong checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointingException, load_plain_tensors, save
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


class Breaks(DefaultSavePlanner):
    def get_data(self, item: WriteItem) -> Any:
        if self._rank == 1:
            raise RuntimeError(f"no data for {item.index.fqn}")
        return super().get_data(item)


class Late(DefaultSavePlanner):
    """Takes all items out, and puts them back in a second step: they belong to their rank."""

    def build_local_plan(self) -> SavePlan:
        plan = super().build_local_plan()
        return plan.with_items([]).with_items(plan.items)


@pytest.mark.parametrize(
    ("planner", "said"),
    [(DropsRows, "no shard holds this part"), (Breaks, "no data for w"), (Late, None)],
)
def test_what_a_planner_gets_wrong_fails_on_all_ranks(
    tmp_path: Path, planner: type[DefaultSavePlanner], said: str | None
) -> None:
    def one(comm: Comm) -> None:
        strategy = Zarr3SaveShardedStrategy(planner=planner())
        with nullcontext() if said is None else pytest.raises(CheckpointingException, match=said):
            save({"w": rows("w", WEIGHT, comm)}, tmp_path / "c", strategy, comm=comm)

    run_ranks(2, one)
    assert planner is not DropsRows or not (tmp_path / "c").exists()
    if said is None:
        assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], WEIGHT)


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
