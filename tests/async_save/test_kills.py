"""Random kills of simulated ranks: what is committed is right, nothing good is lost."""

import json
from pathlib import Path

import pytest

from scripts import run_fresh

SCRIPT = Path(__file__).parent / "kill_rounds.py"
ROUNDS, SEED, SECONDS = 200, 20, 20


@pytest.mark.exhaustive
def test_random_kills(tmp_path: Path) -> None:
    """As many as fit into the time; the script alone takes any number."""
    arguments = (tmp_path, ROUNDS, SEED, SECONDS)
    done = run_fresh(SCRIPT, *arguments, timeout=SECONDS + 90)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["killed"] >= 5
    assert counts["stopped"] >= 2
    assert counts["steps"] >= 1, "nothing was ever committed"
