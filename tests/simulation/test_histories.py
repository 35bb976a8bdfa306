"""Histories of trainings: many seeds, the same log from the same seed, and failures of the past."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tiers import share

CHILD = """
    import gc, logging, sys
    from dist_checkpointing.testing.simulation.histories import Failure, History, play

    logging.disable(logging.CRITICAL)
    play(History.of(1))
    gc.collect()
    gc.freeze()
    seeds = range(*map(int, sys.argv[1:]))
    for history in map(History.of, seeds):
        if history.place == "fast" and len(seeds) > 1:
            continue
        end = play(history, keeps_log=len(seeds) == 1)
        if isinstance(end, Failure):
            sys.exit(f"seed {history.seed}: {end.error!r}")
        for line in end.log:
            print(f"{line.seconds:.7f}", line.process, line.name, line.path, line.outcome)
"""
"""Plays histories in a process of its own: what a seed makes depends on the hashes of names."""


def run_child(*arguments: object) -> str:
    """What a process prints, if all went well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def in_child(first: int, last: int) -> str:
    """The log, if it is of one history."""
    return run_child("-c", textwrap.dedent(CHILD), first, last)


def test_histories() -> None:
    in_child(0, 50)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(50, 500, 150))
def test_many_histories(first: int) -> None:
    in_child(first, first + 150)


def test_a_seed_makes_the_same_history_again() -> None:
    logs = [in_child(5, 6) for _ in range(2)]
    assert logs[0].count("\n") > 100
    assert logs[0] == logs[1]


def test_what_has_failed_once() -> None:
    run_child(str(Path(__file__).with_name("past_failures.py")), 40 // share(10))
