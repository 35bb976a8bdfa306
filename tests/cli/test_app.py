from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing
from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.errors import CorruptCheckpointError, Finding, RankFailedError
from samples import Run
from scripts import run_fresh

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130
GOLDEN = Path(__file__).parents[1] / "golden" / "mc0.15.3_zarr"
ROOT = Path(__file__).parents[2]


def test_one_finding_is_told_in_one_line(dckpt: Run, tmp_path: Path) -> None:
    finished = dckpt("ls", tmp_path / "nope")
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err == (
        f"error: {tmp_path / 'nope'} does not exist: no such file or folder; "
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
    assert (finished.code, finished.out) == (0, f"dckpt {dist_checkpointing.__version__}\n")


def test_a_file_that_ends_early_is_named_and_not_just_aborted(
    dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise EOFError("no data left in file")

    monkeypatch.setattr(Checkpoint, "open", fails)
    finished = dckpt("verify", GOLDEN)
    expected = "error: a file ended early: no data left in file\n"
    assert (finished.code, finished.err) == (EXIT_BAD_INPUT, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lss"], "No such command 'lss'"),
        (["ls"], "Missing argument "),
        (["plan", GOLDEN, "--tp", "x"], "Invalid value for '--tp'"),
        (["ls", GOLDEN, "--nosuch"], "No such option: --nosuch"),
        (["convert", GOLDEN, "x", "--to"], "Option '--to' requires an argument"),
    ],
)
def test_errors_of_usage_are_told_like_others(
    dckpt: Run, arguments: list[Any], message: str
) -> None:
    finished = dckpt(*arguments)
    assert (finished.code, finished.out) == (EXIT_BAD_INPUT, "")
    assert finished.err.startswith(f"error: {message}")
    if arguments[-1] != "--to":
        document = dckpt(*arguments, "--json")
        assert document.code == EXIT_BAD_INPUT
        error = json.loads(document.out)["error"]
        assert (error["type"], error["findings"]) == ("UsageError", [])
        assert error["message"].startswith(message)
        assert document.err == finished.err


def test_no_arguments_are_answered_by_the_help(dckpt: Run) -> None:
    finished = dckpt()
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err.startswith("Usage:")
    assert "rm-prefix" in finished.err


def run_with(encoding: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "dist_checkpointing", *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_keys_that_the_output_cannot_show_are_escaped(tmp_path: Path) -> None:
    save({"t": ShardedTensor.from_rank_offsets("gr\xf6\xdfe", torch.ones(4))}, tmp_path / "\xfc")
    listed = run_with("ascii", "ls", tmp_path / "\xfc")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in listed.stdout
    missing = run_with("ascii", "show", tmp_path / "\xfc", "nothing")
    assert missing.returncode == EXIT_BAD_INPUT
    assert r"\xfc holds nothing called 'nothing'" in missing.stderr
    drawn = run_with("ascii", "show", tmp_path / "\xfc", "gr\xf6\xdfe", "--plot")
    assert "###" in drawn.stdout
    assert drawn.stdout.isascii()


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    finished = subprocess.run(
        [sys.executable, "-m", "dist_checkpointing", *arguments, str(GOLDEN)],
        stdout=full,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(full)
    assert (finished.returncode, finished.stderr) == (2, b"error: No space left on device\n")


def test_a_closed_output_is_no_failure() -> None:
    command = 'exec "$0" -m dist_checkpointing ls "$1" >&-'
    finished = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, str(GOLDEN)],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert (finished.returncode, finished.stderr) == (0, b"")


@pytest.mark.parametrize("command", ["ls", "verify", "plan"])
def test_an_empty_path_is_not_the_current_folder(dckpt: Run, command: str) -> None:
    finished = dckpt(command, "")
    assert finished.code == EXIT_BAD_INPUT
    assert "the path is empty" in finished.err


def test_what_is_neither_file_nor_folder_is_not_said_to_be_missing(
    dckpt: Run, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop"):
        for command in (["verify"], ["ls"], ["ls", "--follow"], ["convert", "--to", "zarr"]):
            place = tmp_path / name
            finished = dckpt(
                *command, place, *([tmp_path / "x"] if command[0] == "convert" else [])
            )
            assert finished.code == EXIT_BAD_INPUT
            assert "does not exist" not in finished.err
            assert "not a folder" in finished.err or "nor a folder" in finished.err


def test_ctrl_c_is_one_line() -> None:
    code = f"""
import os, signal, time
from dist_checkpointing.tools import app, ls
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
from dist_checkpointing.tools import app
print(app.__file__)
app.main()
"""
    finished = run_fresh("-c", code, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    app = tmp_path / "dist_checkpointing" / "tools" / "app.py"
    assert finished.stderr == ""
    assert finished.stdout == f"{app}\ndckpt {dist_checkpointing.__version__}\n"
