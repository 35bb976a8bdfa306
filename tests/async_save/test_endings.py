"""However a training ends with a save in flight: no hang, no zombie, no half commit."""

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
    def __init__(self, folder: Path, saver: str, ending: str) -> None:
        self.folder, self.ending = folder, ending
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, folder, saver, ending],
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


@pytest.mark.parametrize("ending", ["exit", "raise", "interrupt"])
def test_the_save_in_flight_is_brought_to_its_end(tmp_path: Path, ending: str) -> None:
    check(tmp_path, "explicit", ending)


def test_the_saver_that_is_kept_is_closed(tmp_path: Path) -> None:
    check(tmp_path, "kept", "exit")


def test_a_result_that_nobody_asks_for_is_not_committed(tmp_path: Path) -> None:
    check(tmp_path, "explicit", "forgotten")


def check(tmp_path: Path, saver: str, ending: str) -> None:
    training = Training(tmp_path / "training", saver, ending)
    try:
        assert_ended_well(training, training.end())
    finally:
        training.process.kill()
        training.process.communicate()


def assert_ended_well(training: Training, output: str) -> None:
    code, ending, folder = training.process.returncode, training.ending, training.folder / "c"
    expected = {
        "exit": (0, ""),
        "raise": (1, "loss is nan"),
        "interrupt": (-signal.SIGINT, "KeyboardInterrupt"),
        "forgotten": (0, "never committed: nobody asked for its result"),
    }[ending]
    assert code == expected[0], output
    assert expected[1] in output
    assert "Exception ignored" not in output
    if ending == "forgotten":
        assert not check_is_distributed_checkpoint(folder)
        return
    found = load_plain_tensors(folder)
    assert found["step"] == 7
    assert found["w"].unique().tolist() == [7]
