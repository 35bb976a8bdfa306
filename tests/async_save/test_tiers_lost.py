"""What is lost, and what is not, with fast disks of which each machine has its own."""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import CheckpointManager, ObjectPath, Retention, verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RankFailedError,
)
from dist_checkpointing.testing import run_ranks
from faults import failing, path_of, short_waits, store_down, without_waiting
from split_disks import (
    check,
    check_newest,
    disk,
    flip,
    save_steps,
    save_with_store_down,
    state,
    steps_in,
)
from stores import new_url


@pytest.mark.parametrize(
    ("lost", "ranks"), [(["node0"], 4), (["node1"], 2), (["node0", "node1"], 4)]
)
def test_nodes_whose_disks_are_gone_go_on_from_the_store(
    lost: list[str], ranks: int, tmp_path: Path
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1, 2])
    for name in lost:
        shutil.rmtree(tmp_path / name)
    check_newest(tmp_path, root, 2, ranks)

    def go_on(comm: Comm) -> list[int]:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            with pytest.raises(
                CheckpointExistsError, match=r"step 2 is (in the store|there) already"
            ):
                manager.save(2, state(comm, 2))
            manager.save(3, state(comm, 3))
            return manager.steps()

    assert run_ranks(ranks, go_on) == [[1, 2, 3]] * ranks
    check_newest(tmp_path, root, 3, 4)


@pytest.mark.parametrize("first", [1, 2, 5, 11, 17, 23])
def test_a_copy_that_is_cut_off_is_made_by_the_next_manager(first: int, tmp_path: Path) -> None:
    """Whichever object is not taken, the store has all of a step or nothing of it."""
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root, first)
    with without_waiting():  # while a dead claim is watched
        check_newest(tmp_path, root, 2, 4)
    verify_checkpoint(f"{root}/step-00000002")


@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_without_one_disk_the_newest_step_of_the_store_is_loaded(
    lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root)
    shutil.copytree(tmp_path / lost, tmp_path / "away")
    shutil.rmtree(tmp_path / lost)
    check_newest(tmp_path, root, 1, 4)
    assert "step 2 is on some disks and not in the store" in caplog.text
    # The disk comes back, and nothing was lost meanwhile.
    shutil.rmtree(tmp_path / lost)
    shutil.move(tmp_path / "away", tmp_path / lost)
    check_newest(tmp_path, root, 2, 4)


def test_a_step_that_a_lost_disk_took_with_it_is_saved_again(tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root)
    shutil.rmtree(tmp_path / "node1")

    def train(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            check(comm, manager.load(state(comm, None)), 1)
            with pytest.raises(CheckpointNotFoundError, match="step 2 is not there"):
                manager.load(state(comm, None), 2)
            manager.save(2, state(comm, 22) | {"step": 22})

    run_ranks(4, train)

    def resume(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            check(comm, manager.load(state(comm, None)), 22)

    run_ranks(4, resume)


def test_machines_may_come_back_as_other_ranks(tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root)
    # Rank 0 is on a new machine now, whose disk is empty.
    for old, new in (("node1", "node2"), ("node0", "node1")):
        (tmp_path / old).rename(tmp_path / new)
    check_newest(tmp_path, root, 2, 6)
    verify_checkpoint(f"{root}/step-00000002")


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_job_that_died_before_every_disk_had_noted_the_commit(node: str, tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root)
    folder = tmp_path / node / "step-00000002"
    (folder / "metadata.json").unlink()
    (folder / ".dckpt/seal.json").unlink()
    check_newest(tmp_path, root, 2, 4)
    assert (folder / "metadata.json").is_file()


def test_a_rank_that_fails_leaves_nothing_on_any_disk(tmp_path: Path) -> None:
    root, full = new_url(), ExitStack()

    def is_on_node1(descriptor: int) -> bool:
        return path_of(descriptor).is_relative_to(tmp_path / "node1")

    def train(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            manager.save(1, state(comm, 1))
            comm.all_gather(None)
            if comm.rank == 0:
                full.enter_context(failing("os.fsync", code=28, at=is_on_node1))
            comm.all_gather(None)
            with pytest.raises(RankFailedError, match="No space left"):
                manager.save(2, state(comm, 2))
            comm.all_gather(None)
            if comm.rank == 0:
                full.close()
            comm.all_gather(None)
            check(comm, manager.load(state(comm, None)), 1)
            manager.save(2, state(comm, 2))

    run_ranks(4, train)
    check_newest(tmp_path, root, 2, 4)


def test_a_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    root = new_url()

    def is_report(name: str, key: str) -> bool:
        return name == "put" and "/.dckpt/drain/" in key

    with short_waits(0.1), store_down(at=is_report):

        def train(comm: Comm) -> None:
            manager = CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm)
            manager.save(1, state(comm, 1))
            with pytest.raises(CheckpointingException, match="step 1 is not in the store") as error:
                manager.close()
            assert str(disk(tmp_path, comm).parent / "node1") in str(error.value)

        run_ranks(4, train)
    with CheckpointManager(root) as stored:
        assert stored.steps() == []
    check_newest(tmp_path, root, 1, 4)


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_damage_on_a_disk_is_mended_by_the_store(
    node: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1, 2])
    flip(tmp_path / node / "step-00000002")
    with caplog.at_level(logging.WARNING):
        check_newest(tmp_path, root, 2, 4)
    assert "step 2 is skipped" in caplog.text


def test_damage_on_a_disk_does_not_come_into_the_store(tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    save_with_store_down(tmp_path, root)
    flip(tmp_path / "node1/step-00000002")

    def train(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            check(comm, manager.load(state(comm, None)), 1)
            manager.save(2, state(comm, 2))

    run_ranks(4, train)
    check_newest(tmp_path, root, 2, 4)


def test_what_is_damaged_in_the_store_is_found_though_the_disks_are_whole(tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    place = ObjectPath.of(f"{root}/step-00000001/data")
    for info in list(place.store.list_below(place.prefix)):
        if "/data/model/" in info.key:
            place.store.put(info.key, b"x" * info.num_bytes)

    def resume(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            with pytest.raises(CorruptCheckpointError):
                manager.verify(1)
            assert manager.latest_valid() is None

    run_ranks(4, resume)


def test_a_disk_that_cannot_note_a_commit_keeps_its_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_url()

    def is_commit_on_node1(_: Any, target: Any, **__: Any) -> bool:
        return "node1" in str(target) and str(target).endswith("metadata.json")

    with failing("os.replace", code=28, at=is_commit_on_node1):
        save_steps(tmp_path, root, [1, 2], retention=Retention(keep_last=1))
    assert "the commit is not noted on this disk" in caplog.text
    assert steps_in(root) == [2]
    check_newest(tmp_path, root, 2, 4)
