"""A checkpoint that is overwritten while it is loaded: an error, and never a mixture."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CorruptCheckpointError, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import LoadPlan, LoadPlanner
from dist_checkpointing.strategies import (
    TorchCommonLoadStrategy,
    Zarr3LoadShardedStrategy,
    ZarrV3Reader,
)
from dist_checkpointing.testing import run_ranks
from states import shard


def state(value: float) -> dict[str, Any]:
    return {"w": shard("w", torch.full((4,), value)), "step": value}


@pytest.mark.parametrize("when", ["before", "after"])
def test_between_the_common_state_and_the_end(tmp_path: Path, when: str) -> None:
    class Reader(ZarrV3Reader):
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            if when == "before":
                save(state(2.0), tmp_path, "zarr", overwrite=True)
            done = super().read_data(plan, planner)
            if when == "after":
                save(state(2.0), tmp_path, "zarr", overwrite=True)
            return done

    class Strategy(Zarr3LoadShardedStrategy):
        reader_type = Reader

    save(state(1.0), tmp_path, "zarr")
    with pytest.raises(CorruptCheckpointError, match="overwritten while it was read"):
        load(state(0.0), tmp_path, Strategy())


def test_while_another_save_clears_the_folder(tmp_path: Path) -> None:
    """A rank of a third save may write then what is read here; tests/models found that."""

    class Reader(ZarrV3Reader):
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            (tmp_path / "metadata.json").unlink()
            return super().read_data(plan, planner)

    class Strategy(Zarr3LoadShardedStrategy):
        reader_type = Reader

    save(state(1.0), tmp_path, "zarr")
    with pytest.raises(CorruptCheckpointError, match="overwritten while it was read"):
        load(state(0.0), tmp_path, Strategy())


def test_between_two_ranks(tmp_path: Path) -> None:
    """Before anything is read."""
    save(state(1.0), tmp_path)
    overwritten = threading.Event()

    class Common(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
            common = super().load_common(checkpoint_dir)
            if not overwritten.is_set():
                save(state(2.0), tmp_path, overwrite=True)
                overwritten.set()
            return common

    def one(comm: Comm) -> None:
        if comm.rank == 1:
            assert overwritten.wait(30)
        wanted = state(0.0)
        with pytest.raises(CorruptCheckpointError, match="overwritten while it was read"):
            load(wanted, tmp_path, common_strategy=Common(), comm=comm)
        assert (wanted["w"].data == 0).all()

    run_ranks(2, one)
