"""CheckpointManager with fast disks of which each machine has its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointManager, ObjectPath, Retention, load, verify_checkpoint
from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.errors import UnsupportedFormatError
from dist_checkpointing.testing import run_ranks
from faults import short_waits, store_requests, store_waiting
from real_ranks import run_script
from split_disks import check, check_newest, disk, save_steps, state, steps_in, whole
from stores import new_url


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
    deleted: list[int] = []

    def train(comm: Comm) -> None:
        with CheckpointManager(
            root,
            fast=disk(tmp_path, comm),
            comm=comm,
            retention=keep,
            drain="wait",
            on_deleted=deleted.append,
        ) as manager:
            for step, metric in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0)):
                manager.save(step, state(comm, step), metric=metric if comm.rank == 0 else None)
            manager.save(5, state(comm, 5))
            assert (manager.steps(), manager.latest(), manager.best()) == ([2, 5], 5, 2)

    run_ranks(4, train)
    for place in (root, tmp_path / "node0", tmp_path / "node1"):
        assert steps_in(place) == [2, 5]
    assert deleted == [1, 3, 4]


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


@pytest.mark.exhaustive  # eleven seconds
def test_processes_on_two_machines(
    tmp_path: Path, s3_place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = s3_place.store.options
    for name, value in (
        ("ENDPOINT_URL", options.endpoint),
        ("ACCESS_KEY_ID", options.access_key_id),
        ("SECRET_ACCESS_KEY", options.secret_access_key),
        ("REGION", options.region),
    ):
        monkeypatch.setenv(f"AWS_{name}", str(value))
    script = Path(__file__).with_name("split_script.py")

    def run(ranks: int, action: str, steps: str) -> list[Any]:
        return run_script(
            ranks,
            *(script, tmp_path / "disks", s3_place, action, steps),
            reports=tmp_path / f"{action}{ranks}",
            timeout_seconds=100,
        )

    def check_loaded(found: list[Any], step: int) -> None:
        rows = torch.arange(40.0).reshape(8, 5) + step
        assert [named for named, _ in found] == [step] * len(found)
        assert torch.equal(torch.cat([torch.tensor(part) for _, part in found]), rows)

    run(4, "SAVE", "[1, 2]")
    run(4, "DIE", "[3]")
    assert steps_in_store(s3_place) == [1, 2]
    check_loaded(run(2, "LOAD", "[]"), 2)  # without the other disk
    check_loaded(run(4, "LOAD", "[]"), 3)
    assert steps_in_store(s3_place) == [1, 2, 3]
    shutil.rmtree(tmp_path / "disks/node0")
    check_loaded(run(4, "LOAD", "[4]"), 3)
    assert steps_in_store(s3_place) == [1, 2, 3, 4]


def steps_in_store(root: ObjectPath) -> list[int]:
    with CheckpointManager(root) as manager:
        return manager.steps()
