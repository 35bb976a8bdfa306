"""The example is what it says: one command, and it ends well."""

from __future__ import annotations

from pathlib import Path

import pytest

import dist_checkpointing
from scripts import run_fresh

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = ROOT / "examples" / "fsdp2_roundtrip.py"


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")
def test_the_example_ends_well(tmp_path: Path) -> None:
    finished = run_fresh(SCRIPT, "--folder", tmp_path, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    lines = [line for line in finished.stdout.splitlines() if line.startswith("ok ")]
    assert len(lines) == 3
    assert "FAILED" not in finished.stdout
