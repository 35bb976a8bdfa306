"""The loop with TorchState resumes with the same losses, and on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_fresh

SCRIPT = Path(dist_checkpointing.__file__).parents[1] / "examples" / "torch_training.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


def told(*command: object) -> list[str]:
    """What rank 0 says, one line a step."""
    finished = run_fresh(*command, timeout=150)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout.splitlines()


@pytest.mark.exhaustive
def test_two_ranks_go_on_and_so_does_one(tmp_path: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT)
    whole = told(*ranks, tmp_path / "whole", "--steps", 9)
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 10)]
    told(*ranks, tmp_path / "run", "--steps", 5)
    assert told(*ranks, tmp_path / "run", "--steps", 9) == ["resumed at step 5", *whole[5:]]
    alone = told(SCRIPT, tmp_path / "run", "--steps", 10)
    assert alone[0] == "resumed at step 5"
    assert len(alone) == 6
