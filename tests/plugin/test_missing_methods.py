"""What the class of a third party lacks is found before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    TorchCommonSaveStrategy,
)
from dist_checkpointing.testing import run_ranks
from states import shard


class CommonOnly(SaveCommonStrategy):
    """Takes the common state, and has not heard of objects."""

    def __init__(self) -> None:
        super().__init__("torch", 1)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Any) -> None:
        TorchCommonSaveStrategy().save_common(common_state_dict, checkpoint_dir)


class Unfinished(SaveShardedStrategy):
    """Has not heard of ``super().__init__``."""

    def __init__(self) -> None:
        pass

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        raise AssertionError(f"must not be reached: {sharded_state_dict} {checkpoint_dir}")


class WriterLess(PlannedSaveStrategy):
    writes = ("mine", 1)


class ReaderLess(PlannedLoadStrategy):
    reads = frozenset({("tensorstore", 1)})


class ObjectsUnlisted(LoadShardedStrategy):
    """Says that it reads objects, and cannot list them."""

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        del loaded_backend

    def check_version_compatibility(self, loaded_version: int) -> None:
        del loaded_version

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise AssertionError(f"must not be reached: {sharded_state_dict} {checkpoint_dir}")

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, dc.ShardedTensor]:
        del checkpoint_dir
        return {}


def state(rank: int = 0) -> dict[str, Any]:
    """Rank 0 has a tensor, and only the last of two ranks an object."""
    data = torch.arange(6.0)
    whole: dict[str, Any] = {"w": shard("w", data, replica_id=rank), "step": 3}
    if rank == 1:
        whole["rng"] = dc.ShardedObject("rng", [1], (1,), (0,))
    return whole


def test_a_common_strategy_without_objects_is_found_out_before_the_save(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        with pytest.raises(dc.CheckpointingException) as raised:
            dc.save(state(comm.rank), tmp_path / "c", ("zarr", 2), CommonOnly(), comm=comm)
        return str(raised.value)

    for text in run_ranks(2, work):
        assert "the strategy lacks CommonOnly.save_sharded_objects" in text
        assert "writes ShardedObjects" in text
    assert not (tmp_path / "c").exists()
    # Where there are none, or the other strategy takes them, it is enough.
    dc.save(state(), tmp_path / "none", ("zarr", 2), CommonOnly())
    run_ranks(
        2,
        lambda comm: dc.save(
            state(comm.rank), tmp_path / "d", "tensorstore", CommonOnly(), comm=comm
        ),
    )
    assert dc.load({}, tmp_path / "d")["step"] == 3


@pytest.mark.parametrize(
    ("make", "lacking"),
    [(Unfinished, "Unfinished.backend"), (WriterLess, "WriterLess.writer_type")],
)
def test_an_unfinished_save_strategy_is_found_out_before_the_save(
    tmp_path: Path, make: Callable[[], Any], lacking: str
) -> None:
    with pytest.raises(dc.CheckpointingException) as raised:
        dc.save(state(), tmp_path / "c", make())
    assert f"the strategy lacks {lacking}" in str(raised.value)
    assert not (tmp_path / "c").exists()


def test_an_unfinished_load_strategy_is_named(tmp_path: Path) -> None:
    dc.save(state(), tmp_path / "c")
    with pytest.raises(
        dc.CheckpointingException, match=r"the strategy lacks ReaderLess\.reader_type"
    ):
        dc.load(state(), tmp_path / "c", ReaderLess())
    text = r"the strategy lacks ObjectsUnlisted\.load_sharded_metadata"
    with pytest.raises(dc.CheckpointingException, match=text):
        dc.load({}, tmp_path / "c", ObjectsUnlisted(), strict="raise_all")
    with pytest.raises(dc.CheckpointingException, match=text):
        dc.load_sharded_metadata(tmp_path / "c", ObjectsUnlisted())
