"""On load a rank knows what is stored of the tensors that it asks for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import ShardedObject, load
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import Index
from dist_checkpointing.planning import DefaultLoadPlanner, Leaves
from dist_checkpointing.strategies import TensorStoreLoadShardedStrategy, TensorStoreReader
from dist_checkpointing.testing import run_ranks
from states import save_on, shard

RANKS = 3


def template(rank: int) -> dict[str, Any]:
    """One tensor of its own, one that all ranks share, a cell of an object."""
    own = shard(f"own{rank}", torch.full((4,), float(rank)))
    shared = shard("all", torch.arange(2) + 2 * rank, (0, rank, RANKS))
    return {"own": own, "all": shared, "rng": ShardedObject("rng", rank, (RANKS,), (rank,))}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_on(RANKS, lambda comm: template(comm.rank), tmp_path / "c")
    return tmp_path / "c"


def test_a_rank_is_told_of_what_it_asks_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, Index] = {}
    real = TensorStoreReader.set_up_storage_reader

    def spy(reader: Any, metadata: Index, *, rank: int, world_size: int) -> None:
        seen[rank] = metadata
        real(reader, metadata, rank=rank, world_size=world_size)

    monkeypatch.setattr(TensorStoreReader, "set_up_storage_reader", spy)

    def one(comm: Comm) -> None:
        found: Any = load(template(comm.rank), checkpoint, comm=comm)
        assert found["own"].tolist() == [comm.rank] * 4
        assert found["all"].tolist() == [2 * comm.rank, 2 * comm.rank + 1]
        assert found["rng"] == comm.rank

    run_ranks(RANKS, one)
    assert {rank: sorted(index) for rank, index in seen.items()} == {
        rank: ["all", f"own{rank}"] for rank in range(RANKS)
    }
    assert all([*index.objects] == ["rng"] for index in seen.values())


class SeesAll(DefaultLoadPlanner):
    """Keeps what it is told."""

    def configure_planner(
        self, state_dict: Leaves, metadata: Index, *, is_coordinator: bool, rank: int
    ) -> None:
        self.seen = sorted(metadata)
        super().configure_planner(state_dict, metadata, is_coordinator=is_coordinator, rank=rank)


def test_a_planner_of_the_users_own_is_told_everything(checkpoint: Path) -> None:
    def one(comm: Comm) -> list[str]:
        planner = SeesAll()
        strategy = TensorStoreLoadShardedStrategy(planner=planner)
        load(template(comm.rank), checkpoint, strategy, comm=comm)
        return planner.seen

    assert run_ranks(RANKS, one) == [["all", "own0", "own1", "own2"]] * RANKS
