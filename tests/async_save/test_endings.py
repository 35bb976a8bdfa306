"""However a training ends with a save in flight: no hang, no zombie, no half commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_checkpointing import check_is_distributed_checkpoint, load_plain_tensors

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "ending_script.py"


class Training:
    def __init__(self, folder: Path, worker: str, ending: str) -> None:
        self.folder, self.worker, self.ending = folder, worker, ending
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, folder, worker, ending],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a group of its own, as a shell gives it to a job
        )

    def await_file(self, name: str) -> Path:
        path, deadline = self.folder / name, time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.01)
        return path

    def end(self) -> str:
        """Let it end, in its way; what it has said."""
        if self.ending == "interrupt":
            self.await_file("go")
            os.killpg(self.process.pid, signal.SIGINT)
        # It also waits for a process that is left and holds the output open.
        output, _ = self.process.communicate(timeout=60)
        return output

    @property
    def writer(self) -> int:
        return int((self.folder / "writing").read_text())


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("ending", ["exit", "raise", "interrupt"])
def test_the_save_in_flight_is_brought_to_its_end(tmp_path: Path, worker: str, ending: str) -> None:
    check(tmp_path, worker, ending)


def test_the_saver_that_is_kept_is_closed(tmp_path: Path) -> None:
    check(tmp_path, "kept", "exit")


def test_a_result_that_nobody_asks_for_is_not_committed(tmp_path: Path) -> None:
    check(tmp_path, "process", "forgotten")


@pytest.mark.exhaustive
def test_a_killed_training_takes_its_writer_along(tmp_path: Path) -> None:
    check(tmp_path, "process", "killed")


def has_ended(pid: int) -> bool:
    """Within reason; nobody but the system is left to reap it."""
    status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def check(tmp_path: Path, worker: str, ending: str) -> None:
    training = Training(tmp_path / "training", worker, ending)
    try:
        assert_ended_well(training, training.end())
    finally:
        training.process.kill()
        training.process.communicate()


def assert_ended_well(training: Training, output: str) -> None:
    code, ending, folder = training.process.returncode, training.ending, training.folder / "c"
    is_apart = training.writer != training.process.pid
    assert is_apart is (training.worker == "process"), output
    if ending == "killed":
        assert has_ended(training.writer), "the process that writes goes on"
    else:
        assert not Path(f"/proc/{training.writer}").exists(), "the process that writes is left"
    expected = {
        "exit": (0, ""),
        "raise": (1, "loss is nan"),
        "interrupt": (-signal.SIGINT, "KeyboardInterrupt"),
        "killed": (-signal.SIGKILL, ""),
        "forgotten": (0, "never committed: nobody asked for its result"),
    }[ending]
    assert code == expected[0], output
    assert expected[1] in output
    assert "Exception ignored" not in output
    if ending in ("killed", "forgotten"):
        assert not check_is_distributed_checkpoint(folder)
        return
    found = load_plain_tensors(folder)
    assert found["step"] == 7
    assert found["w"].unique().tolist() == [7]
