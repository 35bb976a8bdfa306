"""The loop with TorchState resumes with the same losses, and on another number of ranks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_forked, run_fresh

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = ROOT / "examples" / "torch_training.py"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT)

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


def told(*command: object) -> list[str]:
    """What rank 0 says, one line a step."""
    run = run_forked if command[0] == SCRIPT else run_fresh
    finished = run(*command, timeout=150)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout.splitlines()


def test_the_page_shows_the_example() -> None:
    program = SCRIPT.read_text().partition('"""\n\n')[2]
    assert f"```python\n{program}```\n" in (ROOT / "docs" / "fsdp2.md").read_text()


def test_one_process_goes_on(tmp_path: Path) -> None:
    whole = told(SCRIPT, tmp_path / "whole", "--steps", 8)
    assert [line.split()[1] for line in whole] == [*map(str, range(1, 9)), "step"]
    told(SCRIPT, tmp_path / "run", "--steps", 6)
    assert told(SCRIPT, tmp_path / "run", "--steps", 8) == ["resumed at step 6", *whole[6:]]


@pytest.mark.exhaustive
def test_two_ranks_go_on_and_so_does_one(tmp_path: Path) -> None:
    whole = told(*TWO_RANKS, tmp_path / "whole", "--steps", 9)
    assert whole[-1] == "saved step 9"
    told(*TWO_RANKS, tmp_path / "run", "--steps", 5)
    assert told(*TWO_RANKS, tmp_path / "run", "--steps", 9) == ["resumed at step 5", *whole[5:]]
    alone = told(SCRIPT, tmp_path / "run", "--steps", 10)
    assert [line.split(" loss")[0] for line in alone] == ["resumed at step 9", "step 10"]


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
    after = told(SCRIPT, tmp_path, "--steps", int(step) + 1)
    assert after[0] == f"resumed at step {step}"
