"""Scripts as ranks that are processes: under torchrun, or without it where some shall die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dist_checkpointing

_ROOT = Path(dist_checkpointing.__file__).parents[1]


def torchrun(
    world_size: int, script: Path, *arguments: object, reports: Path, timeout_seconds: float
) -> list[Any]:
    """Run ``script ARGUMENTS REPORTS`` on so many ranks.

    Returns:
        What each rank wrote to ``REPORTS/<rank>.json``.
    """
    reports.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={world_size}", script, *map(str, arguments), reports],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((reports / f"{rank}.json").read_text()) for rank in range(world_size)]


@contextmanager
def processes(
    commands: Sequence[Sequence[object]], *, stderr: int = subprocess.STDOUT
) -> Iterator[list[subprocess.Popen[str]]]:
    """A process a rank without a launcher, which would kill the survivors of a dead one.

    Args:
        commands: of each rank: a Python script and its arguments.
        stderr: where it goes; by default among the output.
    """
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # The store is held by the test: no rank shall start one.
            env=_environment() | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        )
        for command in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _environment() -> dict[str, str]:
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
