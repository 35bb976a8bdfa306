"""What a save leaves behind that was killed, or given up by ranks that are only late."""

import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem import LOCK_NAME
from dist_checkpointing.format import Attempt, CheckpointingConfig, remove_checkpoint
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.storage import WriteResults
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrV3Writer
from faults import replaced
from states import BACKENDS, at_step


@pytest.mark.parametrize("backend", BACKENDS)
def test_temporary_files_of_a_killed_save_are_cleared_away(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    """Files that are replaced as a whole have such names for a moment."""
    left: list[Path] = []

    def leave(real: Any, source: str, target: str) -> None:
        path = Path(source)
        if path.suffix == ".tmp":
            copied = path.with_name(f"{path.name[:-12]}0123abcd.tmp")
            copied.write_bytes(b"half")
            left.append(copied)
        real(source, target)

    folder = tmp_path / "c"
    with replaced("os.replace", leave):
        dc.save(at_step(1), folder, backend)
    assert {path.name.split(".0123")[0] for path in left} >= {"metadata.json", "attempt.json"}
    foreign = [folder / "notes.0123abcd.tmp", folder / "common.pt.bak.tmp"]
    for path in foreign:
        path.write_text("mine")
    dc.save(at_step(2), folder, backend, overwrite=True)
    assert not any(path.exists() for path in left)
    assert dc.load_plain_tensors(folder)["step"] == 2
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    remove_checkpoint(folder)
    assert sorted(folder.rglob("*")) == sorted(foreign)


def test_a_manager_clears_its_own(tmp_path: Path) -> None:
    (tmp_path / "manager.json.0123abcd.tmp").write_bytes(b"half")
    with dc.CheckpointManager(tmp_path) as manager:
        manager.async_save(1, at_step(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manager.json", "step-00000001"]


def test_a_process_forked_during_a_save_does_not_keep_the_folder_taken(tmp_path: Path) -> None:
    """Such as a worker of a DataLoader: it shares the open file and with it the lock."""
    attempt = Attempt.begin(tmp_path, ["w"])
    held = tmp_path / LOCK_NAME
    lock_file = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == held)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[lock_file],
    )
    try:
        with pytest.raises(dc.CheckpointExistsError, match="being written"):
            Attempt.begin(tmp_path, ["w"])
        attempt.release()
        Attempt.begin(tmp_path, ["w"]).release()
        assert child.poll() is None
    finally:
        child.communicate()


class Late(Zarr3SaveShardedStrategy):
    """Rank 1 writes only when it is told to."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
        gate = self.gate

        class Writer(ZarrV3Writer):
            def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
                if self.rank == 1:
                    assert gate.wait(30)
                return super().write_data(plan, planner)

        return Writer(checkpoint_dir)


def worlds(world_size: int, seconds: float) -> list[ThreadComm]:
    rendezvous = ThreadComm.Rendezvous(world_size, seconds)
    return [ThreadComm(rendezvous, rank) for rank in range(world_size)]


def test_a_rank_that_is_only_late_does_not_spoil_the_folder(tmp_path: Path) -> None:
    """It still writes after the others gave up; what it writes is cleared by the next save."""
    gate = threading.Event()
    folder, failures = tmp_path / "c", []

    def one(comm: Comm) -> None:
        saver = dc.AsyncSaver(comm=comm, retries=3)
        handle = saver.save(at_step(1, comm), folder, Late(gate))
        try:
            handle.result(30)
        except dc.RankFailedError as error:
            failures.append((comm.rank, error.silent_ranks))

    threads = [threading.Thread(target=one, args=(comm,)) for comm in worlds(2, 1.0)]
    for thread in threads:
        thread.start()
    threads[0].join()
    assert failures == [(0, (1,))], "nobody writes again what waits for a rank that is gone"
    gate.set()
    threads[1].join()
    assert (folder / "w").exists()
    assert not dc.check_is_distributed_checkpoint(folder)
    dc.save(at_step(2), folder, "zarr")
    assert dc.load_plain_tensors(folder)["w"].unique().tolist() == [2]


def test_a_rank_lost_after_the_commit_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything was written: the checkpoint is good, even if nobody can be told so."""
    agree = ThreadComm.agree

    def never_to_the_last(self: ThreadComm, step: str, error: Exception | None) -> None:
        if self.rank == 1 and step == "committing":
            raise SystemExit
        agree(self, step, error)

    monkeypatch.setattr(ThreadComm, "agree", never_to_the_last)

    def one(comm: Comm) -> None:
        manager = dc.CheckpointManager(tmp_path, comm=comm)
        handle = manager.async_save(1, at_step(1, comm))
        if comm.rank == 0:
            with pytest.raises(dc.RankFailedError, match="did not reach"):
                handle.result(30)
            done.set()

    done = threading.Event()
    threads = [threading.Thread(target=one, args=(comm,)) for comm in worlds(2, 0.5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.is_set()
    monkeypatch.undo()
    with dc.CheckpointManager(tmp_path, retention=dc.Retention(keep_last=1)) as manager:
        assert manager.latest_valid() == 1
        assert dc.load_plain_tensors(manager.folder(1))["w"].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("tracebacks", "silent"), [({0: "x", 1: "x"}, ()), ({0: "x"}, (1,)), ({}, (0, 1))]
)
def test_silent_ranks(tracebacks: dict[int, str], silent: tuple[int, ...]) -> None:
    error = dc.RankFailedError("step", [Finding("a", ranks=(0, 1))], tracebacks)
    assert error.silent_ranks == silent


def test_errors_of_ranks_that_all_stopped_free_the_folder(tmp_path: Path) -> None:
    class Failing(Zarr3SaveShardedStrategy):
        def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
            class Writer(ZarrV3Writer):
                def write_data(self, *_: Any) -> Future[WriteResults]:
                    raise OSError(5, "Input/output error")

            return Writer(checkpoint_dir)

    with dc.AsyncSaver() as saver, pytest.raises(CheckpointingException, match="Input/output"):
        saver.save(at_step(1), tmp_path / "c", Failing()).result(30)
    assert [path.name for path in (tmp_path / "c").rglob("*")] == [".dckpt", "attempt.json"]


def test_what_is_committed_is_never_given_up(tmp_path: Path) -> None:
    attempt = Attempt.begin(tmp_path, ["w"])
    attempt.commit(CheckpointingConfig("zarr", 2))
    attempt.abandon()
    assert dc.check_is_distributed_checkpoint(tmp_path)
