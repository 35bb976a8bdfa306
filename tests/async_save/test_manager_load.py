"""What a manager loads when nobody names the step: the newest that the load itself finds sound."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import flip
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import SEAL_NAME
from dist_checkpointing.storage import Checksum, StorageOptions
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3LoadShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from states import ALONE, shard, trained


def last_verified(root: Path) -> int | None:
    steps = json.loads((root / "manager.json").read_text())["steps"]
    return max((int(step) for step, known in steps.items() if known.get("verified")), default=None)


class Plain(LoadShardedStrategy):
    """Reads without a plan of ours."""

    can_handle_sharded_objects = False

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return Zarr3LoadShardedStrategy().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return Zarr3LoadShardedStrategy().load_tensors_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        assert loaded_backend == "zarr"

    def check_version_compatibility(self, loaded_version: int) -> None:
        assert loaded_version == 2


BACKENDS: list[Any] = ["tensorstore", ("zarr", 2), ("zarr", 1), "torch_dist"]
BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=str)
SHAPE = (200, 300)
state = partial(trained, shape=SHAPE)


def template(comm: Comm = ALONE) -> dict[str, Any]:
    made = state(-1, comm)
    made["rng"].data = None
    return made


def flip_value(folder: Path, value: int, row: int = 0) -> None:
    """Flip a bit of ``w``, which holds one value."""
    values = torch.full(SHAPE[1:], float(value)).numpy().tobytes()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        start = path.read_bytes().find(values)
        if start >= 0:
            flip(path, start + row * len(values) + 7)
            return
    raise AssertionError("the tensor is not there")


def saved_by(root: Path, backend: Any, world_size: int, *steps: int) -> None:
    def one(comm: Comm) -> None:
        with dc.CheckpointManager(root, backend, comm=comm) as manager:
            for step in steps:
                manager.save(step, state(step, comm))

    run_ranks(world_size, one)


@BACKEND
def test_the_load_goes_back_after_damage_that_it_finds_itself(
    tmp_path: Path, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks, where one has read a flipped bit; given tensors get the older values."""
    saved_by(tmp_path, backend, 3, 1, 2)
    flip_value(tmp_path / "step-00000002", 2, row=100)

    def one(comm: Comm) -> tuple[int, set[int]]:
        manager = dc.CheckpointManager(tmp_path, backend, comm=comm)
        given = template(comm)
        loaded = manager.load(given)
        assert loaded["w"] is given["w"].data
        assert loaded["w"].unique().tolist() == loaded["m"].unique().tolist() == [1]
        assert loaded["rng"] == [1]
        return loaded["step"], set(manager._damaged)

    assert run_ranks(3, one) == [(1, {2})] * 3
    assert any(
        "step 2 is skipped" in text and "checksum differs" in text for text in caplog.messages
    )
    assert last_verified(tmp_path) == 1
    # Its room may be used.
    again = dc.CheckpointManager(tmp_path, backend)
    assert again.load({"step": 0}) == {"step": 2}, "nothing that is damaged is asked for"
    assert again.latest_valid() == 1
    again.save(2, state(2))
    assert again.latest_valid() == 2


@BACKEND
def test_everything_is_read_once(
    tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.randn(512, 4096)
    dc.CheckpointManager(tmp_path, backend).save(1, {"w": shard("w", full)})
    counts: list[int] = []
    preadv = os.preadv

    def counting(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    loaded = dc.CheckpointManager(tmp_path).load({"w": shard("w", torch.empty(512, 4096))})
    assert torch.equal(loaded["w"], full)
    assert full.nbytes <= sum(counts) <= 1.05 * full.nbytes


def test_a_template_that_does_not_fit_is_an_error_and_no_reason_to_go_back(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 1, 1)
    manager = dc.CheckpointManager(tmp_path)
    manager.save(2, {"w": shard("w", torch.ones(3))})
    with pytest.raises(dc.StateMismatchError, match="global shape differs"):
        manager.load({"w": template()["w"]})
    assert not manager._damaged


def test_memory_that_leaves_share_is_no_reason_to_go_back(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 1, 1, 2)
    manager = dc.CheckpointManager(tmp_path)
    manager.save(3, {"a": shard("a", torch.ones(3)), "b": shard("b", torch.zeros(3))})
    memory = torch.empty(3)
    with pytest.raises(dc.CheckpointingException, match="memory of its own"):
        manager.load({"a": shard("a", memory), "b": shard("b", memory)})
    assert not manager._damaged


def test_damaged_metadata_is_not_blamed_on_the_template(tmp_path: Path) -> None:
    """It is read as that of another tensor."""
    saved_by(tmp_path, "zarr", 1, 1, 2)
    path = tmp_path / "step-00000002/.dckpt/index.json"
    assert b"200" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"200", b"201"))
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1
    assert set(manager._damaged) == {2}


def test_what_cannot_be_unpickled_is_skipped_and_not_damaged(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 1, 1)
    trusting = dc.CheckpointManager(tmp_path, trusted=True)
    trusting.save(2, {**state(2), "extra": partial(print)})
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1
    assert not manager._damaged
    assert trusting.load(template())["step"] == 2


def test_only_a_load_of_everything_makes_a_step_the_last_verified(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 2, 1, 2)

    def load(step: int | None, *keys: str) -> Any:
        def one(comm: Comm) -> None:
            chosen = {key: leaf for key, leaf in template(comm).items() if key in keys}
            dc.CheckpointManager(tmp_path, comm=comm).load(chosen, step)

        run_ranks(2, one)
        return last_verified(tmp_path)

    dc.CheckpointManager(tmp_path).verify(1)
    assert load(None, "w", "m") == 1, "nobody asks for the object"
    assert load(None, "w", "rng") == 1
    assert load(2, "w", "m", "rng") == 1
    alone = {**template(), "rng": None}
    alone["w"] = shard("w", torch.empty(SHAPE), (0, 0, 2))
    del alone["rng"], alone["m"]
    dc.CheckpointManager(tmp_path).load(alone)
    assert last_verified(tmp_path) == 1, "half of a tensor"
    assert load(None, "w", "m", "rng") == 2


def test_checkpoints_without_checksums_are_loaded_as_far_as_they_can_be_read(
    tmp_path: Path,
) -> None:
    options = StorageOptions(checksum=Checksum.NONE)
    manager = dc.CheckpointManager(tmp_path, TensorStoreSaveShardedStrategy(options=options))
    for step in (1, 2):
        manager.save(step, state(step))
    assert manager.load(template())["step"] == 2
    assert last_verified(tmp_path) == 2
    (manager.folder(2) / "common.pt").write_bytes(b"")
    assert manager.load(template())["step"] == 1


def test_a_folder_that_is_not_a_checkpoint_is_skipped(tmp_path: Path) -> None:
    saved_by(tmp_path, "zarr", 1, 1, 2, 3)
    (tmp_path / "step-00000003/metadata.json").unlink()
    folder = tmp_path / "step-00000002"
    assert SEAL_NAME in (folder / ".dckpt/attempt.json").read_text()
    (folder / SEAL_NAME).unlink()
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1
    assert set(manager._damaged) == {2}
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(dc.CheckpointNotFoundError, match=r"never committed(.|\n)*seal"):
        manager.load(template())


def test_a_checkpoint_of_an_older_version_has_no_seal(tmp_path: Path) -> None:
    dc.save(state(1), tmp_path / "step-00000001", "zarr")
    (tmp_path / "step-00000001" / SEAL_NAME).unlink()
    attempt = tmp_path / "step-00000001/.dckpt/attempt.json"
    attempt.write_text(attempt.read_text().replace(SEAL_NAME, ".dckpt/other"))
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1
    flip_value(tmp_path / "step-00000001", 1)
    with pytest.raises(dc.CheckpointNotFoundError, match="checksum differs"):
        manager.load(template())


def test_strategies_of_the_caller(tmp_path: Path) -> None:
    """One that cannot verify loads what has been verified; one that cannot read is an error."""
    saved_by(tmp_path, ("zarr", 2), 1, 1, 2)
    flip_value(tmp_path / "step-00000002", 2)
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template(), sharded_strategy=Plain())["step"] == 1
    assert manager.load(template(), sharded_strategy=("zarr", 2))["step"] == 1
    with pytest.raises(dc.UnsupportedFormatError, match="wrong strategy"):
        manager.load(template(), sharded_strategy=("zarr", 1))
    assert set(manager._damaged) == {2}


def test_the_caller_may_do_without_verifying(tmp_path: Path) -> None:
    saved_by(tmp_path, "zarr", 1, 1, 2)
    flip_value(tmp_path / "step-00000002", 2)
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template(), verify=False)["step"] == 2
    assert last_verified(tmp_path) is None
    with pytest.raises(dc.CorruptCheckpointError):
        manager.load(template(), 2, verify=True)
