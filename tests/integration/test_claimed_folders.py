"""Who may write into a folder, and what is deleted there, on any file system."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.filesystem import LOCK_NAME, FolderLock, local_folder
from dist_checkpointing.format import Attempt, CheckpointingConfig, remove_checkpoint
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import TorchDistSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from faults import strange_flock
from states import BACKEND, assert_at_step, trained, wholes


def assert_sound(folder: Path, step: int) -> None:
    dc.verify_checkpoint(folder)
    assert_at_step(folder, step)


@pytest.fixture
def how(request: pytest.FixtureRequest) -> Iterator[None]:
    """``flock`` as on NFS (EBADF for a descriptor that is only read), or not at all."""
    with strange_flock(None if request.param == "EBADF" else getattr(errno, request.param)):
        yield


# File systems.


@pytest.mark.parametrize("how", ["ENOSYS", "EBADF"], indirect=True)
@pytest.mark.usefixtures("how")
def test_a_save_and_a_removal_keep_each_other_out(tmp_path: Path) -> None:
    dc.save(trained(1), tmp_path, "zarr")
    calls: list[Callable[[], Any]] = [
        lambda: dc.save(trained(2), tmp_path, "zarr", overwrite=True),
        lambda: dc.remove_sharded_tensors(tmp_path, "optimizer", comm=SingleProcess()),
        lambda: remove_checkpoint(tmp_path),
    ]
    with FolderLock.acquire(tmp_path):
        for call in calls:
            with pytest.raises(dc.CheckpointExistsError, match=f"process {os.getpid()} on host"):
                call()
    assert_sound(tmp_path, 1)


def test_ranks_with_more_threads_than_rank_0_leave_nothing_that_nobody_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_rank(comm: Comm, numel: int) -> None:
        options = StorageOptions(threads=[1, 30][comm.rank], durability=Durability.PAGE_CACHE)
        wanted = wholes({f"{comm.rank}.{n}": torch.ones(numel, dtype=torch.int8) for n in range(9)})
        dc.save(wanted, tmp_path, TorchDistSaveShardedStrategy(options=options), comm=comm)

    with monkeypatch.context() as patched:
        # As a kill before the commit leaves it.
        patched.setattr(Attempt, "commit", lambda *_: (_ for _ in ()).throw(OSError("no commit")))
        patched.setattr(Attempt, "abandon", Attempt.release)
        with pytest.raises(dc.CheckpointingException, match="no commit"):
            # 32 MiB are enough for a file; more than eight of them a rank has not.
            run_ranks(2, lambda comm: save_rank(comm, comm.rank * 2**25))
    assert (tmp_path / "__1_7.distcp").exists()
    run_ranks(2, lambda comm: save_rank(comm, 3))
    dc.verify_checkpoint(tmp_path)
    assert len(dc.load_plain_tensors(tmp_path)) == 18
    remove_checkpoint(tmp_path)
    assert not tmp_path.exists()


# Leftovers.


def test_an_array_of_another_program_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.zarray").write_bytes(b"{")
    dc.save(trained(1), tmp_path, ("zarr", 1))
    assert_sound(tmp_path, 1)
    assert dc.load_tensors_metadata(tmp_path).keys() == {"w", "optimizer.m"}
    dc.remove_sharded_tensors(tmp_path, "o")
    assert dc.load_tensors_metadata(tmp_path).keys() == {"w"}
    assert (tmp_path / "other/.zarray").read_bytes() == b"{"


def test_a_save_whose_lock_was_taken_away_leaves_the_next_one_alone(tmp_path: Path) -> None:
    first = Attempt.begin(tmp_path, ["w", "common.pt"])
    (tmp_path / LOCK_NAME).unlink()
    dc.save(trained(1), tmp_path)
    with pytest.raises(dc.CheckpointExistsError, match="another save has taken over"):
        first.commit(CheckpointingConfig("zarr", 1))
    first.abandon()
    assert_sound(tmp_path, 1)


# Links.


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "x").mkdir(parents=True)
    for name in ("victim", "x/0", "x/.zarray", "attempt.json", "removal.json"):
        (folder / name).write_text("mine")
    return folder


def assert_untouched(outside: Path) -> None:
    files = {str(p.relative_to(outside)) for p in outside.rglob("*") if p.is_file()}
    assert files == {"victim", "x/0", "x/.zarray", "attempt.json", "removal.json"}
    assert {p.read_text() for p in outside.rglob("*") if p.is_file()} == {"mine"}


def claimed(folder: Path, creates: list[str]) -> Path:
    """A folder as a killed save leaves it, with the names that it wanted to create."""
    (folder / ".dckpt").mkdir(parents=True)
    record = json.dumps({"attempt": "a" * 32, "creates": creates})
    (folder / ".dckpt/attempt.json").write_text(record)
    return folder


def test_a_link_in_the_place_of_the_record_is_replaced(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "c"
    (folder / ".dckpt").mkdir(parents=True)
    (folder / ".dckpt/attempt.json").symlink_to(outside / "victim")
    dc.save(trained(1), folder)
    assert_untouched(outside)
    assert not (folder / ".dckpt/attempt.json").is_symlink()
    assert_sound(folder, 1)


def test_leftovers_behind_a_link_are_not_deleted(tmp_path: Path, outside: Path) -> None:
    names = ["link/x", "link/victim", "link/x/0", "link/nothing/y", "w"]
    folder = claimed(tmp_path / "c", names)
    (folder / "link").symlink_to(outside)
    # A link of ours is deleted, and not what it points to.
    (folder / "w").symlink_to(outside)
    dc.save(trained(1), folder, "zarr")
    assert_untouched(outside)
    assert (folder / "link").is_symlink()
    assert not (folder / "w").is_symlink()
    assert_sound(folder, 1)
    remove_checkpoint(folder)
    assert_untouched(outside)
    assert [path.name for path in folder.iterdir()] == ["link"]


@pytest.mark.parametrize("creates", [["w"], ["link/w"], ["link/w", "link/x"]], ids=str)
def test_nothing_is_written_through_a_link(
    tmp_path: Path, outside: Path, creates: list[str]
) -> None:
    folder = claimed(tmp_path / "c", creates)
    (folder / "link").symlink_to(outside)
    with pytest.raises(dc.CheckpointExistsError, match="is a link"):
        dc.save(trained(1, key="link/new"), folder, ("zarr", 1))
    assert_untouched(outside)


@BACKEND
def test_a_link_in_the_place_of_our_folder_is_refused(
    tmp_path: Path, outside: Path, backend: Any
) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / ".dckpt").symlink_to(outside)
    with pytest.raises(dc.CheckpointExistsError, match=r"\.dckpt"):
        dc.save(trained(1), folder, backend)
    assert_untouched(outside)
    assert [path.name for path in folder.iterdir()] == [".dckpt"]


@pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2)])
def test_a_removal_does_not_follow_links(tmp_path: Path, outside: Path, backend: Any) -> None:
    folder = tmp_path / "c"
    dc.save(trained(1), folder, backend)
    (folder / "link").symlink_to(outside)
    going = {"k": ["link/x"], "l": ["link"]}
    (folder / ".dckpt/removal.json").write_text(json.dumps(going))
    dc.remove_sharded_tensors(folder, "optimizer")
    assert_untouched(outside)
    assert (folder / "link").is_symlink()
    assert "optimizer.m" not in dc.load_plain_tensors(folder)
    (folder / ".dckpt/removal.json").symlink_to(outside / "removal.json")
    dc.remove_sharded_tensors(folder, "w")
    assert_untouched(outside)


def test_data_behind_a_link_is_not_deleted(tmp_path: Path) -> None:
    folder, outside = tmp_path / "c", tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder/file").write_text("mine")
    dc.save(trained(1), folder, "tensorstore")
    (folder / "data/other").symlink_to(outside)
    dc.remove_sharded_tensors(folder, "optimizer")
    assert (outside / "folder/file").read_text() == "mine"


@pytest.mark.parametrize("name", ["..", "../outside/victim", "w/../../outside/victim"])
def test_a_path_that_is_not_below_is_not_deleted(tmp_path: Path, outside: Path, name: str) -> None:
    folder = tmp_path / "c"
    (folder / "w").mkdir(parents=True)
    with pytest.raises(ValueError, match="not below"):
        local_folder.remove(folder / name, folder)
    assert_untouched(outside)
