"""Random kills of simulated ranks: what is committed is right, nothing good is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = Path(__file__).parent / "kill_rounds.py"
ROUNDS, SEED, SECONDS = 200, 20, 20


@pytest.mark.exhaustive
@pytest.mark.slow
def test_random_kills(tmp_path: Path) -> None:
    """As many as fit into the time; the script alone takes any number."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, *map(str, (ROUNDS, SEED, SECONDS))],
        capture_output=True,
        text=True,
        timeout=SECONDS + 90,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["killed"] >= 5
    assert counts["stopped"] >= 2
    assert counts["steps"] >= 1, "nothing was ever committed"
