"""What a manager loads when nobody names the step: the newest of the history that is sound."""

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
from dist_checkpointing.manager import read_record
from dist_checkpointing.storage import Checksum, StorageOptions
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3LoadShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from states import ALONE, shard, trained, trained_template
from stores import new_url


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
template = partial(trained_template, shape=SHAPE)


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

    def one(comm: Comm) -> int:
        manager = dc.CheckpointManager(tmp_path, backend, comm=comm)
        given = template(comm)
        loaded = manager.load(given)
        assert loaded["w"] is given["w"].data
        assert loaded["w"].unique().tolist() == loaded["m"].unique().tolist() == [1]
        assert loaded["rng"] == [1]
        return int(loaded["step"])

    assert run_ranks(3, one) == [1] * 3
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


def test_a_template_that_does_not_fit_is_an_error_and_no_reason_to_go_back(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 1, 1)
    manager = dc.CheckpointManager(tmp_path)
    manager.save(2, {"w": shard("w", torch.ones(3))})
    with pytest.raises(dc.StateMismatchError, match="global shape differs"):
        manager.load({"w": template()["w"]})
    memory = torch.empty(3)
    manager.save(3, {key: shard(key, torch.full((3,), float(ord(key)))) for key in "ab"})
    with pytest.raises(dc.CheckpointingException, match="separate memory"):
        manager.load({key: shard(key, memory) for key in "ab"})
    assert manager.latest_valid() == 3


def test_damaged_metadata_is_not_blamed_on_the_template(tmp_path: Path) -> None:
    """It is read as that of another tensor."""
    saved_by(tmp_path, "zarr", 1, 1, 2)
    path = tmp_path / "step-00000002/.dckpt/index.json"
    assert b"200" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"200", b"201"))
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1


def test_what_cannot_be_unpickled_is_skipped(tmp_path: Path) -> None:
    saved_by(tmp_path, "tensorstore", 1, 1)
    trusting = dc.CheckpointManager(tmp_path, trusted=True)
    trusting.save(2, {**state(2), "extra": partial(print)})
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template())["step"] == 1
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


def test_the_caller_may_do_without_verifying(tmp_path: Path) -> None:
    saved_by(tmp_path, "zarr", 1, 1, 2)
    flip_value(tmp_path / "step-00000002", 2)
    manager = dc.CheckpointManager(tmp_path)
    assert manager.load(template(), verify=False)["step"] == 2
    assert last_verified(tmp_path) is None
    with pytest.raises(dc.CorruptCheckpointError):
        manager.load(template(), 2, verify=True)


# One history: a run that goes back to an earlier step, and two runs in one folder.

PLACES = pytest.mark.parametrize("place", ["disk", "store"])


def root_at(place: str, tmp_path: Path) -> Any:
    return tmp_path / "run" if place == "disk" else new_url()


def loaded(manager: dc.CheckpointManager, step: int | None, comm: Comm = ALONE) -> Any:
    """The value that all of a step has."""
    found = manager.load(template(comm), step)
    assert found["w"].unique().tolist() == found["rng"] == [found["step"]]
    return found["step"]


def went_back(root: Any, comm: Comm = ALONE) -> None:
    """Steps 6000, 7000 and 8000, and 6500 after loading 6000."""
    with dc.CheckpointManager(root, comm=comm) as manager:
        for step in (6000, 7000, 8000):
            manager.save(step, state(step, comm))
        assert loaded(manager, 6000, comm) == 6000
        manager.save(6500, state(6500, comm))


@PLACES
def test_a_step_is_named_behind_the_path_of_its_run(tmp_path: Path, place: str) -> None:
    """By ``load`` on all ranks, and by an open checkpoint; the latest one as the manager says."""
    root = root_at(place, tmp_path)
    run_ranks(2, lambda comm: went_back(root, comm))

    def one(comm: Comm) -> None:
        for named, step in (("latest", 6500), ("6000", 6000), ("008000", 8000)):
            found = dc.load(template(comm), f"{root}@{named}", comm=comm)
            assert found["step"] == step
        with pytest.raises(dc.CheckpointNotFoundError, match=r"no such step.*6500, 7000, 8000"):
            dc.load(template(comm), f"{root}@77", comm=comm)
        there = r"(?s)step 77 is not there.*its last steps are 6000, 6500, 7000, 8000"
        with pytest.raises(dc.CheckpointNotFoundError, match=there):
            dc.CheckpointManager(root, comm=comm).load(template(comm), 77)

    run_ranks(2, one)
    opened = dc.Checkpoint.open(f"{root}@latest")
    assert (opened.common["step"], opened.path.parent.name) == (6500, Path(str(root)).name)
    with pytest.raises(dc.CheckpointNotFoundError, match="no steps of a run"):
        dc.Checkpoint.open(f"{root}-2@latest")


@PLACES
def test_two_runs_do_not_mix(tmp_path: Path, place: str) -> None:
    root = root_at(place, tmp_path)
    with dc.CheckpointManager(root) as first:
        for step in (6000, 7000):
            first.save(step, state(step))
    second = dc.CheckpointManager(root)
    ways = rf"(?s)at step 7000 already.*loaded nothing.*process {os.getpid()} on host"
    ways += r".*load it first.*another folder.*fresh=True"
    with pytest.raises(dc.CheckpointExistsError, match=ways):
        second.save(7000, state(1))
    with pytest.raises(dc.CheckpointingException, match=ways) as raised:
        second.async_save(100, state(1))
    assert type(raised.value) is dc.CheckpointingException
    assert second.steps() == [6000, 7000]
    fresh = dc.CheckpointManager(root, fresh=True)
    for step in (100, 6000):
        fresh.save(step, state(step + 1))
    again = dc.CheckpointManager(root)
    assert (again.latest(), again.steps()) == (6000, [100, 6000, 7000])
    assert loaded(again, 6000) == 6001
    again.delete(6000)
    assert (again.latest(), loaded(again, None)) == (100, 101)
    fresh = dc.CheckpointManager(root, fresh=True)
    fresh.save(50, state(50))
    fresh.delete(50)
    # Seed 2048 of the histories: abandoned steps are loaded by number alone.
    third = dc.CheckpointManager(root)
    assert (third.latest(), third.steps(), loaded(third, 7000)) == (None, [100, 7000], 7000)
    with pytest.raises(dc.CheckpointNotFoundError, match="no valid checkpoint"):
        loaded(dc.CheckpointManager(root), None)


@PLACES
def test_a_second_writer_is_noticed(tmp_path: Path, place: str) -> None:
    root = root_at(place, tmp_path)
    one, other, reader = (dc.CheckpointManager(root) for _ in range(3))
    one.save(4, state(4))
    other.save(8, state(8))
    for step in (6, 9):
        with pytest.raises(dc.CheckpointExistsError) as raised:
            one.save(step, state(step))
        found = str(raised.value.findings[0].found)
        assert f"process {os.getpid()} on host" in found
        assert "the latest step is 8" in found
    assert reader.latest_valid() == loaded(reader, None) == 8
    reader.delete(4)
    other.save(10, state(10))
    assert (reader.steps(), reader.latest()) == ([8, 10], 10)


def test_an_argument_of_another_type(tmp_path: Path) -> None:
    numbers = ("sharded_strategy", "comm", "retention", "on_error")
    flags = ("trusted", "incremental", "fresh", "fingerprints")
    wrong: list[tuple[str, Any]] = [
        *((name, 3) for name in (*numbers, "replicas", "on_replica_mismatch", "on_saved")),
        *((name, value) for name in flags for value in (1, "yes", None)),
        *(("retries", value) for value in ("2", 1.5, True)),
        *(("on_saved", "log"), ("on_saved", [3])),
    ]
    for name, value in wrong:
        with pytest.raises(TypeError, match=rf"^{name} must be "):
            dc.CheckpointManager(tmp_path, **{name: value})
    wrong = [("on_error", "Raise"), ("retries", -1)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"^{name} must be "):
            dc.CheckpointManager(tmp_path, **{name: value})
    assert not [*tmp_path.iterdir()]


def test_a_record_without_parents_and_writer(tmp_path: Path) -> None:
    """As older versions wrote it."""
    went_back(tmp_path)
    path = tmp_path / "manager.json"
    record = json.loads(path.read_text())
    del record["writer"]
    for known in record["steps"].values():
        del known["parent"]
    path.write_text(json.dumps(record))
    manager = dc.CheckpointManager(tmp_path)
    assert (manager.latest(), loaded(manager, None)) == (6500, 6500)
    manager.save(7500, state(7500))
    assert dc.CheckpointManager(tmp_path).latest_valid() == 7500
    assert read_record(tmp_path).history([6000, 6500, 7000, 7500, 8000]) == [7500, 6500, 6000]


def test_ranks_that_call_different_methods(tmp_path: Path) -> None:
    went_back(tmp_path)

    def one(comm: Comm) -> None:
        manager = dc.CheckpointManager(tmp_path, comm=comm)
        with pytest.raises(dc.CheckpointingException, match="call different functions") as raised:
            manager.steps() if comm.rank == 0 else manager.load(template(comm))
        assert "calls CheckpointManager.steps" in str(raised.value)
        assert "calls CheckpointManager.load" in str(raised.value)

    run_ranks(2, one)
