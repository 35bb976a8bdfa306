"""The example is what it says: one command, and it ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = ROOT / "examples" / "fsdp2_roundtrip.py"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")
def test_the_example_ends_well(tmp_path: Path) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--folder", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    lines = [line for line in finished.stdout.splitlines() if line.startswith("ok ")]
    assert len(lines) == 3
    assert "FAILED" not in finished.stdout
