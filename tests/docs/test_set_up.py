"""The set-up of a checkout: what a target installs, and what a person sees of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dist_checkpointing

ROOT = Path(dist_checkpointing.__file__).parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="not a checkout")

PYTHON = """#!/bin/bash
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  -c*) exec {real} "$@" ;;
  *"pip install"*) echo "Collecting torch"; echo "WARNING: noise"; echo "$*" >> installed; {end} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/set-up"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout: Path, *command: str, end: str = "true") -> subprocess.CompletedProcess[str]:
    python = checkout / "python"
    python.write_text(PYTHON.replace("{end}", end).replace("{real}", sys.executable))
    python.chmod(0o755)
    surroundings = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(
        command, cwd=checkout, env=surroundings, text=True, capture_output=True, check=False
    )


def test_the_demo_installs_only_what_it_needs(checkout: Path) -> None:
    assert run(checkout, "make", ".venv/demo-ready").returncode == 0
    assert (checkout / "installed").read_text().split()[-1] == ".[demo]"
    assert run(checkout, "make", ".venv/ready").returncode == 0
    assert (checkout / "installed").read_text().split()[-1] == ".[dev]"
    # With all of it there, nothing more is installed for the demo.
    (checkout / ".venv" / "demo-ready").unlink()
    (checkout / "installed").unlink()
    assert run(checkout, "make", ".venv/demo-ready").returncode == 0
    assert not (checkout / "installed").exists()
    # For the site the package, which programs that run may be importing, is not installed again.
    assert run(checkout, "make", ".venv/docs-ready").returncode == 0
    added = (checkout / "installed").read_text().split()
    assert "mkdocs>=1.6,<2" in added
    assert not {"-e", ".", ".[docs]"} & {*added}


def test_the_set_up_says_how_long_and_no_more(checkout: Path) -> None:
    ended = run(checkout, ".ci/set-up", "demo")
    first, last = ended.stderr.splitlines()
    assert "2 to 10 minutes" in first
    assert "GB" in first
    assert last.startswith("Ready after")
    assert not ended.stdout


def test_a_set_up_that_fails_shows_why(checkout: Path) -> None:
    ended = run(checkout, ".ci/set-up", "dev", end="echo no space left; exit 1")
    assert ended.returncode != 0
    assert "no space left" in ended.stderr
    assert not (checkout / ".venv" / "ready").exists()
