"""Incremental saves that are killed, and bases that are deleted meanwhile: nothing is wrong."""

import json
from pathlib import Path

import pytest

from scripts import run_fresh

SCRIPT = Path(__file__).parent / "incremental_kills.py"
SEED, SECONDS = 16, 20


@pytest.mark.exhaustive
def test_kills_and_deletions_at_random_moments(tmp_path: Path) -> None:
    """As many as fit into the time; the script alone takes any time."""
    done = run_fresh(SCRIPT, tmp_path, SEED, SECONDS, timeout=SECONDS + 90)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["save: killed"] >= 2
    assert counts["delete: survived"] >= 2
    assert counts["both: killed"] + counts.get("both: survived", 0) >= 2
