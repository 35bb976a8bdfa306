import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import dist_checkpointing
from dist_checkpointing import CheckpointManager, ShardedObject, ShardedTensor, save
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.errors import CorruptCheckpointError, Finding, RankFailedError
from dist_checkpointing.tools import app, report
from samples import Run, Samples
from scripts import run_fresh
from states import at_step, wholes

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130
GOLDEN = Path(__file__).parents[1] / "golden" / "mc0.15.3_zarr"
ROOT = Path(__file__).parents[2]


def test_one_finding_is_told_in_one_line(dckpt: Run, tmp_path: Path) -> None:
    finished = dckpt("ls", tmp_path / "nope")
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err == (
        f"error: Checkpoint directory {tmp_path / 'nope'} does not exist: no such folder; "
        f"file {tmp_path / 'nope'}. Is this the right path?\n"
    )
    (tmp_path / "file").touch()
    for command in ("ls", "verify"):
        assert "nor a file of safetensors or torch.save" in dckpt(command, tmp_path / "file").err


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
            assert "neither a folder nor a file" in finished.err


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


@pytest.mark.parametrize("imported", ["typer", "torch"])
def test_ctrl_c_is_one_line_while_modules_are_imported(imported: str) -> None:
    code = f"""import signal, sys
from dist_checkpointing.__main__ import main
class Interrupted:
    def find_spec(name, *_):
        name == {imported!r} and signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted)
main()"""
    finished = run_fresh("-c", code, "diff", GOLDEN, GOLDEN)
    assert (finished.returncode, finished.stderr) == (EXIT_INTERRUPTED, "error: interrupted\n")


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


# The fields of ``--json`` are those that docs/cli.md names.


PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "`ls`": (["ls", "a"], ["--all"]),
    "`ls RUN`": (["ls", "run"], []),
    "`show` of a tensor": (["show", "a", "w"], []),
    "`show` of an object": (["show", "a", "o"], []),
    "`show` of common state": (["show", "a", "step"], []),
    "`stats`": (["stats", "a"], ["--scan"]),
    "`verify`": (["verify", "a"], []),
    "`diff`": (["diff", "a", "b", "--summary"], ["WITHOUT --summary"]),
    "`convert`": (["convert", "a", "c", "--to", "zarr", "--dry-run"], []),
    "`plan`": (["plan", "a", "--tp", "2"], []),
    "`map`": (["map", "a", "-o", "a.html"], []),
    "`rm-prefix`": (["rm-prefix", "a", "w", "--dry-run"], []),
    "`ls --follow`: a line for each save that has ended": (["ls", "a", "--follow"], []),
}


def documented() -> dict[str, list[set[str]]]:
    """The fields of each document: those that are always there, and those with an option."""
    if not PAGE.exists():
        pytest.skip("not a checkout")
    _, _, text = PAGE.read_text().partition("## As JSON")
    rows = re.findall(r"^\| (`.*?) \| (`.*) \|$", text, re.MULTILINE)
    return {
        command: [
            set(re.findall(r"`([a-z_]+)`", part)) for part in re.split(r"; with(?:out)? ", fields)
        ]
        for command, fields in rows
    }


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensor = ShardedTensor.from_rank_offsets("w", torch.full((4, 2), value))
        save({"w": tensor, "o": ShardedObject("o", 1, (1,), (0,)), "step": 1}, name)
    with CheckpointManager("run") as manager:
        manager.save(1, {"step": 1})


def fields_of(dckpt: Run, arguments: list[str]) -> set[str]:
    finished = dckpt(*arguments, "--json")
    document: Any = json.loads(finished.out)
    assert "error" not in document
    return set(document)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("places")
def test_fields_are_documented(dckpt: Run, command: str) -> None:
    always, *optional = documented()[command]
    arguments, more = COMMANDS[command]
    assert fields_of(dckpt, arguments) == always
    if more:
        without = [word for word in arguments if f"WITHOUT {word}" not in more]
        options = [option for option in more if not option.startswith("WITHOUT")]
        assert fields_of(dckpt, [*without, *options]) == always | optional[0]


def test_every_document_is_tested() -> None:
    assert set(documented()) == set(COMMANDS)


# What every command prints on terminals of different widths.


WIDTHS = [60, 80, 120]


@pytest.fixture(params=WIDTHS)
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A terminal without colours."""
    terminal = Console(force_terminal=True, color_system=None, width=request.param)
    monkeypatch.setattr(report, "out", terminal)
    width: int = request.param
    return width


@pytest.mark.parametrize("command", [None, *app.COMMANDS])
def test_help_fits_and_is_plain(
    dckpt: Run, monkeypatch: pytest.MonkeyPatch, columns: int, command: str | None
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    out = dckpt(*([command] if command else []), "--help").out
    assert max(map(len, out.splitlines())) <= columns
    assert "<bool>" not in out
    assert "..." not in out.partition("Commands:")[2]
    # Paragraphs are filled: no word would have fit into the line before.
    paragraphs = out.partition("Options:")[0].split("\n\n")[1:]
    for lines in (paragraph.splitlines() for paragraph in paragraphs if ":\n" not in paragraph):
        for line, after in itertools.pairwise(lines):
            assert len(line) + 1 + len(after.split()[0]) > min(columns, 80) - 2, (line, after)


def test_no_line_ends_in_blanks_and_tables_fit(
    tmp_path: Path, samples: Samples, dckpt: Run, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = samples("tensorstore").copied(Path("one")).folder
    with CheckpointManager("run") as manager:
        for step in (1, 2):
            manager.save(step, at_step(step))
    save(wholes({"model.layers.w": torch.ones(200)}), "a")
    save(wholes({"model.layers.w": torch.arange(200.0)}), "b")
    for arguments in (
        ["ls", one, "--all"],
        ["ls", "run"],
        ["show", one, "uneven"],
        ["show", one, "rng"],
        ["stats", one, "--scan"],
        ["diff", "a", "b"],
        ["diff", "a", "b", "--summary"],
        ["verify", one],
        ["plan", one, "--tp", "2", "--dp", "2"],
        ["plan", one, "--tp", "64"],
        ["ls", "a", "--follow"],
        ["map", one, "-o", "map.html", "--force"],
        ["convert", "a", "c.safetensors", "--to", "safetensors", "--force"],
        ["rm-prefix", one, "optimizer", "--dry-run"],
        ["rm-prefix", "a", "model", "--yes"],
    ):
        finished = dckpt(*arguments)
        assert (finished.code in (0, 1), finished.err) == (True, ""), arguments
        for line in finished.out.splitlines():
            assert line == line.rstrip(), arguments
            assert len(line) <= columns or arguments[0] in ("convert", "show"), (arguments, line)
        if arguments[0] == "rm-prefix" and arguments[-1] == "--yes":
            save(wholes({"model.layers.w": torch.ones(200)}), "a", overwrite=True)


def test_a_summary_is_one_line(tmp_path: Path, dckpt: Run) -> None:
    for step in (1, 2):
        save(at_step(step), tmp_path / str(step))
    pair = (tmp_path / "1", tmp_path / "2")
    finished = dckpt("diff", *pair, "--summary", code=1)
    assert finished.out == ("differences: 1 of 1 tensor differing, 1 in the common state\n")
    document = dckpt("diff", *pair, "--summary", "--json").json
    assert (document["num_differing"], document["num_common"]) == (1, 1)
    assert "tensors" not in document
    assert dckpt("diff", pair[0], pair[0], "--summary").out.startswith("the same: 1 tensor")


def test_a_small_conversion_has_a_speed(tmp_path: Path, dckpt: Run) -> None:
    save(at_step(1), tmp_path / "a")
    out = dckpt("convert", tmp_path / "a", tmp_path / "b", "--to", "zarr").out
    speed = out.partition("(")[2].rpartition("(")[2].partition("/s)")[0]
    assert float(speed.split()[0]) > 0
    assert "GB/s" not in out


@pytest.mark.parametrize(
    "arguments", [["diff", "{0}", "{0}"], ["convert", "{0}", "{0}x", "--to", "torch_file"]]
)
def test_memory_is_that_of_the_process(tmp_path: Path, dckpt: Run, arguments: list[str]) -> None:
    save(at_step(1), tmp_path / "a")
    words = [word.format(tmp_path / "a") for word in arguments]
    finished = dckpt(*words, "--memory", "1MB", code=2)
    assert "the memory budget is too small: the program itself takes most of it" in finished.err
    assert dckpt(*words, "--memory", "5GB").code == 0


def test_a_pattern_that_matches_nothing_is_no_equality(tmp_path: Path, dckpt: Run) -> None:
    save(at_step(1), tmp_path / "a")
    finished = dckpt("diff", tmp_path / "a", tmp_path / "a", "ww", code=2, out="")
    assert "neither checkpoint has a key that matches 'ww'" in finished.err
    assert dckpt("diff", tmp_path / "a", tmp_path / "a", "step").code == 0


def test_ls_suggests_keys(tmp_path: Path, dckpt: Run) -> None:
    save(wholes({"decoder.weight": torch.ones(2)}), tmp_path / "a")
    finished = dckpt("ls", tmp_path / "a", "decodr.weight", code=1)
    assert finished.err.endswith("stands for any text; did you mean 'decoder.weight'?\n")
    assert "--all looks at objects" in dckpt("ls", tmp_path / "a", "qqqq").err
    assert dckpt("ls", tmp_path / "a", "qqqq", "--json").json["tensors"] == []
