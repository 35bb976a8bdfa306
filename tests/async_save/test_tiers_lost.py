"""What is lost, and what is not, with fast disks of which each machine has its own."""

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointManager, ObjectPath, Retention, load, verify_checkpoint
from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.testing import run_ranks
from faults import (
    failing,
    path_of,
    short_waits,
    store_down,
    store_requests,
    store_waiting,
    without_waiting,
)
from split_disks import (
    check,
    check_newest,
    disk,
    flip,
    save_steps,
    save_with_store_down,
    state,
    steps_in,
    whole,
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
    order = ObjectPath.of(root) / ".dckpt/drain.json"
    assert order.store.head(order.key) is None
    for name in lost:
        shutil.rmtree(tmp_path / name)
    check_newest(tmp_path, root, 2, ranks)

    def go_on(comm: Comm) -> list[int]:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            with pytest.raises(CheckpointExistsError, match="the run is at step 2 already"):
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


def check_history(folder: Path, root: str, ranks: int, newest: int, steps: list[int]) -> None:
    """All ranks find this newest step and these committed ones, on the disks and in the store."""

    def resume(comm: Comm) -> tuple[int | None, int | None, list[int], int]:
        with CheckpointManager(root, fast=disk(folder, comm), comm=comm) as manager:
            found = manager.latest(), manager.latest_valid(), manager.steps()
            loaded = manager.load(state(comm, None))
            check(comm, loaded, newest)
            return *found, loaded["step"]

    with without_waiting():
        assert run_ranks(ranks, resume) == [(newest, newest, steps, newest)] * ranks
    with CheckpointManager(root) as stored:
        assert (stored.latest(), stored.latest_valid(), stored.steps()) == (newest, newest, steps)


def test_a_new_disk_of_rank_0_does_not_bring_back_what_was_abandoned(tmp_path: Path) -> None:
    """Only the other disks know that the run has gone back: nothing of it is in the store."""
    root = new_url()
    save_with_store_down(tmp_path, root, steps=(10, 20, 30))
    save_with_store_down(tmp_path, root, steps=(15,), loaded=10)
    for old, new in (("node1", "node2"), ("node0", "node1")):
        (tmp_path / old).rename(tmp_path / new)
    check_history(tmp_path, root, 6, 15, [10, 15])


@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_a_step_that_is_lost_does_not_bring_back_what_it_abandoned(
    lost: str, tmp_path: Path
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [10, 20, 30])
    save_with_store_down(tmp_path, root, steps=(15,), loaded=10)
    shutil.rmtree(tmp_path / lost)
    check_history(tmp_path, root, 4, 10, [10, 20, 30])


def test_a_disk_of_rank_0_that_was_away_knows_less_than_the_others(tmp_path: Path) -> None:
    """Without it the run has gone back and saved another step 70, which is not in the store."""
    root = new_url()
    save_steps(tmp_path, root, [60, 70])
    save_with_store_down(tmp_path, root, steps=(80,))
    (tmp_path / "node0").rename(tmp_path / "away")
    save_with_store_down(tmp_path, root, steps=(65, 70), loaded=60)
    for old, new in (("node1", "node2"), ("node0", "node1"), ("away", "node0")):
        (tmp_path / old).rename(tmp_path / new)
    check_history(tmp_path, root, 6, 70, [60, 65, 70])


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


# CheckpointManager with fast disks of which each machine has its own.


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("tensorstore", 1), ("tensorstore", 6), ("zarr", 3), ("torch_dist", 4)]
)
def test_any_layout_loads_what_two_nodes_have_saved(
    ranks: int, strategy: str, tmp_path: Path
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1, 2], sharded_strategy=strategy)
    for name in ("node0", "node1"):
        assert steps_in(tmp_path / name) == [1, 2]
        assert any(path.is_file() for path in (tmp_path / name).rglob("*"))
    verify_checkpoint(f"{root}/step-00000002")
    check_newest(tmp_path, root, 2, ranks)


def test_retention_holds_on_every_disk_and_in_the_store(tmp_path: Path) -> None:
    root = new_url()
    keep = Retention(keep_last=1, keep_best=1)

    def train(comm: Comm) -> None:
        options: dict[str, Any] = {"fast": disk(tmp_path, comm), "comm": comm, "retention": keep}
        for step, metric in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, None)):
            # Each is copied before the next one.
            with CheckpointManager(root, **options) as manager:
                manager.save(step, state(comm, step), metric=None if comm.rank else metric)
        with CheckpointManager(root, **options) as manager:
            assert (manager.steps(), manager.latest(), manager.best()) == ([2, 5], 5, 2)

    run_ranks(4, train)
    for place in (root, tmp_path / "node0", tmp_path / "node1"):
        assert steps_in(place) == [2, 5]


@pytest.mark.parametrize("ranks", [2, 4], ids=["one disk", "two machines"])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_run_goes_back(ranks: int, is_copied: bool, tmp_path: Path) -> None:
    """Also before what it has saved since then is in the store."""
    root = new_url()

    def train(comm: Comm, steps: tuple[int, ...], loaded: int | None, down: ExitStack) -> None:
        manager = CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm)
        if loaded is not None:
            check(comm, manager.load(state(comm, None), loaded), loaded)
        comm.all_gather(None)
        if comm.rank == 0 and not is_copied and loaded is not None:
            for fault in (without_waiting(), short_waits(), store_down()):
                down.enter_context(fault)
        comm.all_gather(None)
        for step in steps:
            manager.save(step, state(comm, step))
            assert manager.latest() == step
        if is_copied or loaded is None:
            manager.close()
        else:
            with pytest.raises(CheckpointingException, match=f"step {steps[-1]} is not in the"):
                manager.close()

    for steps, loaded in (((10, 20, 30), None), ((15, 20), 10)):
        with ExitStack() as down:
            run_ranks(ranks, lambda comm: train(comm, steps, loaded, down))  # noqa: B023 - now
    with CheckpointManager(root) as stored:
        assert stored.latest() == stored.latest_valid() == (20 if is_copied else 10)
        assert stored.steps() == ([10, 15, 20, 30] if is_copied else [10, 20, 30])
    with without_waiting():
        check_newest(tmp_path, root, 20, ranks)
    with CheckpointManager(root) as stored:
        assert (stored.latest(), stored.steps()) == (20, [10, 15, 20, 30])


def test_disks_keep_what_is_not_in_the_store(tmp_path: Path) -> None:
    root, gate = new_url(), threading.Event()

    def train(comm: Comm) -> None:
        keep = Retention(keep_last=1)
        with CheckpointManager(
            root, fast=disk(tmp_path, comm), comm=comm, retention=keep
        ) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(comm, step))
            assert 3 in steps_in(disk(tmp_path, comm))
            comm.all_gather(None)
            gate.set()

    with store_waiting(gate, "/data/"):
        run_ranks(4, train)
    for place in (root, tmp_path / "node0", tmp_path / "node1"):
        assert steps_in(place) == [3]
    check_newest(tmp_path, root, 3, 4)


def test_what_a_disk_has_is_not_read_from_the_store(tmp_path: Path) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1])
    asked: list[str] = []

    def noting(name: str, key: str, go: Callable[[], Any]) -> Any:
        if name in ("get", "get_range"):
            asked.append(key)
        return go()

    def resume(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            comm.all_gather(None)
            asked.clear()
            comm.all_gather(None)
            rows = state(comm, None)["rows"]
            loaded = load({"rows": rows}, manager._run.prepare_read(1), comm=comm)
            assert torch.equal(loaded["rows"], whole(1).chunk(4)[comm.rank])

    with store_requests(noting):
        run_ranks(4, resume)
        assert asked
        assert not [key for key in asked if "/data/model/" in key]
        # The file of another rank on this machine is here too; those of the other machine are not.
        asked.clear()
        check_newest(tmp_path, root, 1, 3)
    assert [key for key in asked if "/data/model/" in key]


def test_ranks_meet_while_a_long_copy_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would take rank 0 for dead."""
    root, gate, met = new_url(), threading.Event(), []
    told: Callable[..., Any] = ThreadComm.from_rank0

    def counted(comm: ThreadComm, step: str, *args: Any, **options: Any) -> Any:
        if step == "bringing step 1 into the store":
            met.append(comm.rank)
            if met.count(0) == 5:
                gate.set()
        return told(comm, step, *args, **options)

    monkeypatch.setattr(ThreadComm, "from_rank0", counted)

    def train(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(tmp_path, comm), comm=comm) as manager:
            manager.save(1, state(comm, 1))
            check(comm, manager.load(state(comm, None), 1), 1)

    with short_waits(90), store_waiting(gate, "/data/"):
        run_ranks(4, train)
    assert met.count(0) == met.count(3) >= 5


def test_what_needs_one_folder_is_refused(tmp_path: Path) -> None:
    root = new_url()

    def train(comm: Comm) -> None:
        place = disk(tmp_path, comm)
        with pytest.raises(UnsupportedFormatError, match="not all ranks share a disk"):
            CheckpointManager(root, fast=place, comm=comm, incremental=True)
        own = "each machine has a disk of its own"
        manager = CheckpointManager(root, ("zarr", 1), fast=place, comm=comm)
        with pytest.raises(UnsupportedFormatError, match=own):
            manager.save(1, state(comm, 1))
        manager.close()
        with CheckpointManager(root, fast=place, comm=comm) as manager:
            manager.save(1, state(comm, 1))
            with pytest.raises(UnsupportedFormatError, match=own):
                manager.save(2, state(comm, 2), base=manager.folder(1))

    run_ranks(4, train)
    assert steps_in(root) == [1]
