"""Scripts as ranks that are processes: under torchrun, or without it where some are to die."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from scripts import ForkedScript, run_fresh

# The store of the ranks is held by the test: no rank starts one.
_STORE_OF_AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def torchrun(
    world_size: int, script: Path, *arguments: object, reports: Path, timeout_seconds: float
) -> list[Any]:
    """Run ``script ARGUMENTS REPORTS`` on so many ranks, as a user does.

    Returns:
        What each rank wrote to ``REPORTS/<rank>.json``.
    """
    reports.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    done = run_fresh(*launcher, script, *arguments, reports, timeout=timeout_seconds)
    assert done.returncode == 0, done.stderr[-5000:]
    return _read(reports, world_size)


def run_script(
    world_size: int, script: Path, *arguments: object, reports: Path, timeout_seconds: float
) -> list[Any]:
    """The same as ``torchrun``, with the environment of torchrun and without its seconds."""
    reports.mkdir(exist_ok=True)
    with ranks(world_size, [script, *arguments, reports]) as started:
        outputs = [process.communicate(timeout_seconds)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes == [0] * world_size, "\n".join(outputs)[-5000:]
    return _read(reports, world_size)


@contextmanager
def ranks(
    world_size: int, command: Sequence[object], *, stderr: int = subprocess.STDOUT
) -> Iterator[list[ForkedScript]]:
    """A program on so many ranks, in the environment that torchrun makes."""
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    world = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        **_STORE_OF_AGENT,
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    started = [ForkedScript(command, world | one, stderr=stderr) for one in own]
    with _ended(started):
        yield started


def _read(reports: Path, world_size: int) -> list[Any]:
    return [json.loads((reports / f"{rank}.json").read_text()) for rank in range(world_size)]


@contextmanager
def processes(
    commands: Sequence[Sequence[object]], *, stderr: int = subprocess.STDOUT, is_fresh: bool = False
) -> Iterator[list[ForkedScript]]:
    """A process a rank without a launcher, which would kill the survivors of a dead one.

    Args:
        commands: of each rank: a Python script and its arguments.
        stderr: where it goes; by default among the output.
        is_fresh: whether each is started by itself, where the end of the interpreter matters.
    """
    start = _fresh if is_fresh else ForkedScript
    started = [start(command, _STORE_OF_AGENT, stderr=stderr) for command in commands]
    with _ended(started):
        yield started


@contextmanager
def _ended(started: list[ForkedScript]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _fresh(command: Sequence[object], own: dict[str, str], *, stderr: int) -> ForkedScript:
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | own,
    )
    return cast("ForkedScript", process)
