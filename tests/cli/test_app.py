from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import __version__
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.errors import CorruptCheckpointError, Finding, RankFailedError
from dist_checkpointing.tools.cli.app import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from samples import Run
from scripts import run_fresh

GOLDEN = Path(__file__).parents[1] / "golden" / "mc0.15.3_zarr"
ROOT = Path(__file__).parents[2]


def test_one_finding_is_told_in_one_line(dckpt: Run, tmp_path: Path) -> None:
    finished = dckpt("ls", tmp_path / "nope")
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err == (
        f"error: Checkpoint directory {tmp_path / 'nope'} does not exist: no such folder; "
        f"file {tmp_path / 'nope'}\n"
    )
    (tmp_path / "file").touch()
    assert "nor a file of safetensors or torch.save" in dckpt("ls", tmp_path / "file").err
    assert "it is a file, not a folder" in dckpt("verify", tmp_path / "file").err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            CorruptCheckpointError("it is damaged", [Finding("gone", path="p", remedy="Restore.")]),
            "error: it is damaged: gone; file p. Restore.\n",
        ),
        (
            CorruptCheckpointError("it is damaged", [Finding("gone"), Finding("odd", "k")]),
            "error: it is damaged\n  - gone\n  - 'k': odd\n",
        ),
        (
            RankFailedError("reading failed", [Finding("no", ranks=(3,))], {3: "a traceback"}),
            "error: reading failed: no; rank 3\n",
        ),
        (FileNotFoundError(2, "No such file", "t.json"), "error: No such file: t.json\n"),
        (KeyError("no 'w'"), "error: no 'w'\n"),
        (ValueError("bad"), "error: bad\n"),
        (MemoryError("too much"), "error: MemoryError: too much\n"),
        (RecursionError("too deep"), "error: RecursionError: too deep\n"),
    ],
)
def test_errors_of_every_kind(
    dckpt: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Checkpoint, "open", fails)
    finished = dckpt("ls", GOLDEN)
    assert (finished.code, finished.err) == (EXIT_BAD_INPUT, text)
    with pytest.raises(type(error)):
        dckpt("ls", GOLDEN, "--debug")


def test_the_version_is_told(dckpt: Run) -> None:
    finished = dckpt("--version")
    assert (finished.code, finished.out) == (0, f"dckpt {__version__}\n")


def test_a_file_that_ends_early_is_named_and_not_just_aborted(
    dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise EOFError("no data left in file")

    monkeypatch.setattr(Checkpoint, "open", fails)
    finished = dckpt("verify", GOLDEN)
    expected = "error: a file ended early: no data left in file\n"
    assert (finished.code, finished.err) == (EXIT_BAD_INPUT, expected)


@pytest.mark.parametrize("arguments", [["lss"], ["ls"], ["plan", GOLDEN, "--tp", "x"]])
def test_errors_of_usage_are_those_of_typer(dckpt: Run, arguments: list[Any]) -> None:
    finished = dckpt(*arguments)
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err.startswith("Usage:")


def test_ctrl_c_is_one_line() -> None:
    code = f"""
import os, signal, time
from dist_checkpointing.tools.cli import app, ls
# A job in the background ignores Ctrl-C, and its children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted(*_, **__):
    os.kill(os.getpid(), {int(signal.SIGINT)})
    time.sleep(60)  # another thread may get the signal first
ls.Checkpoint.open = interrupted
app.main()
"""
    finished = run_fresh("-c", code, "ls", GOLDEN)
    assert finished.returncode == EXIT_INTERRUPTED
    assert finished.stderr == "error: interrupted\n"


def test_a_closed_pipe_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    finished = subprocess.run(
        [sys.executable, "-m", "dist_checkpointing", "ls", str(GOLDEN)],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert (finished.returncode, finished.stderr) == (0, b"")


def test_the_version_is_told_where_nothing_is_installed(tmp_path: Path) -> None:
    """A copy of the package alone, whose metadata nobody has."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dist_checkpointing", tmp_path / "dist_checkpointing", ignore=ignored)
    code = """
import importlib.metadata as metadata
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = metadata.distribution = missing
import sys
sys.argv = ["dckpt", "--version"]
from dist_checkpointing.tools.cli import app
print(app.__file__)
app.main()
"""
    finished = run_fresh("-c", code, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    app = tmp_path / "dist_checkpointing" / "tools" / "cli" / "app.py"
    assert finished.stderr == ""
    assert finished.stdout == f"{app}\ndckpt {__version__}\n"
