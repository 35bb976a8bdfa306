"""Python scripts in processes of their own.

A forked one finds torch imported, which takes seconds: it comes from the fork server of
``multiprocessing``. It ends without what a script leaves to the end of the interpreter
(``atexit``); tests of that, of imports and of memory need a fresh process.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_SERVER: Final = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "dist_checkpointing.strategies.torch_dist",
        "dist_checkpointing.strategies.zarr",
        "dist_checkpointing.testing",
        "torch.distributed.tensor",
    ]
)


# Not getrusage, which also counts the process that this one was forked from.
TELL_PEAK: Final = """
import atexit, pathlib, re, sys
def tell():
    status = pathlib.Path("/proc/self/status").read_text()
    print(re.search(r"VmHWM:\\s+(\\d+)", status)[1], file=sys.stderr)
atexit.register(tell)
"""
"""Begins a program that prints its peak memory to the standard error at its end."""


def told_peak(stderr: str) -> int:
    """Peak memory of a fresh process that ran ``TELL_PEAK``, in bytes."""
    return int(stderr.rsplit(maxsplit=1)[-1]) * 1024


class ForkedScript:
    """A script under way: as much of ``subprocess.Popen`` as tests need.

    Args:
        command: path of the script, or ``-c`` and a program, and the arguments.
        environment: variables that this process does not have, or has with another value.
        stderr: ``subprocess.STDOUT`` for errors among the output, or ``subprocess.PIPE``.
    """

    def __init__(
        self,
        command: Sequence[object],
        environment: Mapping[str, str] | None = None,
        *,
        stderr: int = subprocess.STDOUT,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._told: tuple[str, str] | None = None
        out, err = self._folder / "out", self._folder / "err"
        out.touch()
        err.touch()
        words = [str(word) for word in command]
        variables = os.environ | dict(environment or {})
        place = out if stderr == subprocess.STDOUT else err
        self._process = _SERVER.Process(target=_run, args=(words, variables, out, place))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit code; negative for the number of a signal; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, at most so many seconds: its output, and its errors if they are apart.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        self._process.join(timeout)
        told = self._told
        if told is None:
            told = ((self._folder / "out").read_text(), (self._folder / "err").read_text())
            if self._process.is_alive():
                raise subprocess.TimeoutExpired(self._process.name, timeout or 0, *told)
            self._told = told
            shutil.rmtree(self._folder)
        return told


def run_forked(*command: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, with its output and its errors apart."""
    script = ForkedScript(command, stderr=subprocess.PIPE)
    try:
        out, err = script.communicate(timeout)
    finally:
        script.kill()
    words = [str(word) for word in command]
    return subprocess.CompletedProcess(words, script.returncode or 0, out, err)


def run_fresh(
    *command: object,
    timeout: float = 120,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python COMMAND`` to its end.

    Args:
        command: path of a script, ``-c`` and a program, or ``-m`` and a module; then arguments.
        timeout: in seconds.
        cwd: where it runs.
        environment: variables that this process does not have, or has with another value.
    """
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=cwd,
        env=os.environ | dict(environment or {}),
    )


def _run(words: list[str], variables: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # A job in the background ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if words[0] == "-c":
        sys.argv = words[:1] + words[2:]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
