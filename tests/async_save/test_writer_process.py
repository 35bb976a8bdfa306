"""AsyncSaver(worker="process"): one spawned process writes, and its end is told to every rank."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dist_checkpointing import (
    AsyncSaver,
    CheckpointingException,
    CheckpointManager,
    RankFailedError,
    Retention,
    ShardedObject,
    ShardedTensor,
    StagingBuffers,
    check_is_distributed_checkpoint,
    load,
    load_plain_tensors,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.interop.torch_dcp import DCPStorageLoadStrategy, DCPStorageSaveStrategy
from dist_checkpointing.storage.progress import Progress
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from dist_checkpointing.strategies.torch_dist import TorchDistSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from states import ALONE, cell, full_at_step, parts_at_step

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the path of imports that this one has."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def odd(oddity: str) -> Any:
    import process_backends  # type: ignore[import-not-found]

    return process_backends.Odd(oddity)


def state(comm: Comm, step: int, rows: int = 8) -> dict[str, Any]:
    rng = cell("rng", [step, {"state": torch.full((3,), step)}], comm)
    return {**parts_at_step(step, comm, rows), "rng": rng, "step": step}


def ruin(made: dict[str, Any]) -> None:
    for leaf in made.values():
        if isinstance(leaf, ShardedTensor):
            assert leaf.data is not None
            leaf.data.fill_(-1)
        elif isinstance(leaf, ShardedObject):
            held: Any = leaf.data
            held[1]["state"].fill_(-1)
    made.clear()


def assert_holds(folder: Path, step: int, rows: int = 8) -> None:
    found = load_plain_tensors(folder)
    for key, expected in full_at_step(step, rows).items():
        assert found[key].dtype is expected.dtype
        assert torch.equal(found[key], expected), key
    assert found["step"] == step


def is_there(pid: int | None) -> bool:
    """Also as a zombie."""
    return Path(f"/proc/{pid}").exists()


def gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_there(pid)


def kill_writer_in(folder: Path) -> int:
    """Kill the process that stalls, once it does."""
    path, deadline = folder / "pid", time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(path.read_text())
    path.unlink()
    os.kill(pid, signal.SIGKILL)
    return pid


def test_every_backend_and_changes_after_the_call(tmp_path: Path) -> None:
    """One process for all saves, also for larger ones; values of every kind arrive."""
    from_dcp = DCPStorageLoadStrategy(FileSystemReader)
    num_backends = 6

    def one(comm: Comm) -> set[int | None]:
        backends: list[Any] = [
            "tensorstore",
            ("zarr", 2),
            ("zarr", 1),
            "torch_dist",
            FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
            DCPStorageSaveStrategy(FileSystemWriter),
        ]
        assert len(backends) == num_backends
        pids = set()
        with AsyncSaver(comm=comm, worker="process") as saver:
            for number, backend in enumerate(backends):
                for step, rows in ((1, 8), (2, 8), (3, 24)):
                    made = state(comm, step, rows)
                    capture: Any = "background" if step == 2 else "copy"
                    handle = saver.save(
                        made, tmp_path / f"{number}-{step}", backend, step=step, capture=capture
                    )
                    assert handle.captured.wait(30)
                    ruin(made)
                assert saver._process is not None
                pids.add(saver._process.pid)
        return pids

    (first,), (second,) = run_ranks(2, one)
    assert first != second
    assert not is_there(first)
    assert not is_there(second)
    for number in range(num_backends):
        for step, rows in ((1, 8), (2, 8), (3, 24)):
            folder = tmp_path / f"{number}-{step}"
            if number < num_backends - 1:
                assert_holds(folder, step, rows)
                continue
            data = full_at_step(step, rows)["rows"]
            template = {"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros_like(data))}
            loaded = load(template, folder, from_dcp)
            assert torch.equal(loaded["rows"], data)


@pytest.mark.exhaustive
def test_a_killed_process_is_an_error_of_its_rank_on_all_and_is_replaced(tmp_path: Path) -> None:
    def one(comm: Comm) -> tuple[str, list[int]]:
        pids = []
        with AsyncSaver(comm=comm, worker="process") as saver:
            handle = saver.save(state(comm, 1), tmp_path / "1", odd("stall"))
            if comm.rank == 1:
                pids.append(kill_writer_in(tmp_path / "1"))
            with pytest.raises(RankFailedError) as raised:
                handle.result(60)
            assert raised.value.ranks == (1,)
            assert not check_is_distributed_checkpoint(tmp_path / "1")
            comm.all_gather(None)
            # One that dies between two saves harms neither.
            saver.save(state(comm, 1), tmp_path / "1", "zarr").result(60)
            assert saver._process is not None
            assert saver._process.pid is not None
            pids.append(saver._process.pid)
            os.kill(saver._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, saver._process.pid, os.WEXITED | os.WNOWAIT)
            saver.save(state(comm, 2), tmp_path / "2").result(60)
            pids.append(saver._process.pid)
        return str(raised.value), pids

    (text, _), (other, pids) = run_ranks(2, one)
    assert text == other
    assert "killed by SIGKILL (exit code -9); rank 1" in text
    assert len(set(pids)) == 3
    assert not any(map(is_there, pids)), "zombies"
    assert_holds(tmp_path / "1", 1)
    assert_holds(tmp_path / "2", 2)


def test_a_full_disk(tmp_path: Path) -> None:
    """It is told with the traceback, on all ranks, and the same process goes on with the next."""

    def one(comm: Comm) -> list[str]:
        seen = []
        with AsyncSaver(comm=comm, worker="process", finalize="caller") as saver:
            saver.save(state(comm, 1), tmp_path / "1", "zarr").result(60)
            assert saver._process is not None
            pid = saver._process.pid
            for oddity, words in (("disk", "No space left"), ("limit", "File too large")):
                handle = saver.save(state(comm, 2), tmp_path / "2", odd(oddity))
                with pytest.raises(RankFailedError, match=words) as raised:
                    handle.result(60)
                assert raised.value.ranks == (1,)
                seen.append(str(raised.value))
            saver.save(state(comm, 3), tmp_path / "3", "zarr").result(60)
            assert saver._process.pid == pid
        return seen

    first, second = run_ranks(2, one)
    assert first == second
    assert all("write_data" in text for text in first), "no traceback of the process"
    assert not check_is_distributed_checkpoint(tmp_path / "2")
    assert_holds(tmp_path / "1", 1)
    assert_holds(tmp_path / "3", 3)


@pytest.mark.exhaustive
def test_a_manager_retries_with_another_process(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "run", odd("die once"), worker="process", on_error="retry",
        retention=Retention(keep_last=1),
    ) as manager:  # fmt: skip
        for step in (1, 2):
            manager.async_save(step, state(ALONE, step))
    assert (tmp_path / "run" / "died").exists()
    assert manager.steps() == [2]
    assert_holds(manager.folder(2), 2)


class Plain(SaveShardedStrategy):
    def save(self, *_: Any) -> None:
        raise AssertionError("never called")


def locked() -> Any:
    import process_backends

    return process_backends.Locked()


@pytest.mark.parametrize(
    ("make", "words"),
    [(locked, "LockedWriter cannot be pickled"), (partial(Plain, "plain", 1), "StorageWriter")],
)
def test_strategies_that_a_process_cannot_run(tmp_path: Path, make: Any, words: str) -> None:
    with AsyncSaver(worker="process") as saver:
        with pytest.raises(CheckpointingException, match=rf"{words}(.|\n)*worker='thread'"):
            saver.save(state(ALONE, 1), tmp_path / "1", make())
        assert not (tmp_path / "1").exists()


def test_objects_that_a_process_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their key is named; a class that only this process knows is one."""
    module = ModuleType("known_to_nobody_else")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Mine:
        __module__ = module.__name__
        __qualname__ = "Mine"

    module.Mine = Mine  # type: ignore[attr-defined]
    pickle.dumps(Mine())

    class Local:
        def __deepcopy__(self, _: Any) -> Local:
            return self

    with AsyncSaver(worker="process") as saver:
        for value, words in ((Mine(), "No module named"), (Local(), "cannot be pickled")):
            made = {"mine": ShardedObject("mine", value, (1,), (0,))}
            with pytest.raises(CheckpointingException, match=words) as raised:
                saver.save(made, tmp_path / "1", trusted=True).result(60)
            assert raised.value.findings[0].key == "mine"
            # What no process can pickle cannot be saved at all.
            assert ("worker='thread'" in str(raised.value)) == isinstance(value, Mine)
        seen: list[Progress] = []
        saver.save(state(ALONE, 2), tmp_path / "2", progress=seen.append).result(60)
    assert_holds(tmp_path / "2", 2)
    # How far it is crosses too.
    written = [report for report in seen if report.phase == "writing"]
    assert written[-1].bytes_done == written[-1].bytes_total > 0


def test_buffers_must_be_shared() -> None:
    with pytest.raises(ValueError, match="shared=True"):
        AsyncSaver(worker="process", buffers=StagingBuffers())


def test_a_saver_that_nobody_closes_leaves_no_process(tmp_path: Path) -> None:
    saver = AsyncSaver(worker="process")
    saver.save(state(ALONE, 1), tmp_path / "1").result(60)
    assert saver._process is not None
    pid = saver._process.pid
    assert pid is not None
    assert is_there(pid)
    del saver
    import gc

    gc.collect()
    assert gone(pid)
