"""Histories of trainings: many seeds, the same log from the same seed, and failures of the past."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import share

FOLDER = Path(__file__).parent


def run_child(*arguments: object) -> str:
    """What a process prints, if all went well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_histories() -> None:
    run_child(FOLDER / "simulate.py", "--histories", 50, "--processes", 1)


@pytest.mark.exhaustive
def test_many_histories() -> None:
    run_child(FOLDER / "simulate.py", "--first", 50, "--histories", 450, "--processes", 2)


def test_a_seed_makes_the_same_history_again() -> None:
    logs = [run_child(FOLDER / "simulate.py", "--seed", 5) for _ in range(2)]
    assert logs[0].count("\n") > 100
    assert logs[0] == logs[1]


def test_what_has_failed_once() -> None:
    run_child(FOLDER / "past_failures.py", 40 // share(4))
