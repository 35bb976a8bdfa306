"""The loop with TorchState resumes with the same losses, and on another number of ranks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_forked

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = ROOT / "examples" / "torch_training.py"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT)

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


def told(*arguments: object) -> list[str]:
    """What one process says, one line a step."""
    finished = run_forked(SCRIPT, *arguments, timeout=150)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout.splitlines()


def test_one_process_goes_on(tmp_path: Path) -> None:
    whole = told(tmp_path / "whole", "--steps", 8)
    assert [line.split()[1] for line in whole] == [*map(str, range(1, 9)), "step"]
    told(tmp_path / "run", "--steps", 6)
    assert told(tmp_path / "run", "--steps", 8) == ["resumed at step 6", *whole[6:]]


@pytest.mark.exhaustive
def test_a_signal_saves_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, *map(str, TWO_RANKS), str(tmp_path), "--steps", "1000000"]
    command += ["--save-every", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        for line in training.stdout:
            if line.startswith("step 3 "):
                training.send_signal(signal.SIGTERM)
                break
        said = training.stdout.read().splitlines()
    (step,) = [line.split()[-1] for line in said if line.startswith("saved")]
    assert said[-1] == f"saved step {step}"
    after = told(tmp_path, "--steps", int(step) + 1)
    assert after[0] == f"resumed at step {step}"
