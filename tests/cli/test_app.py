import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dist_checkpointing
from damage import files_in
from dist_checkpointing import CheckpointManager, ShardedObject, ShardedTensor, save
from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.errors import CorruptCheckpointError, Finding, RankFailedError
from dist_checkpointing.tools import app, report
from samples import Run, Samples
from scripts import run_fresh
from states import at_step, cell, wholes

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130
GOLDEN = Path(__file__).parents[1] / "golden" / "mc0.15.3_zarr"
ROOT = Path(__file__).parents[2]


def test_one_finding_is_told_in_one_line(dckpt: Run, tmp_path: Path) -> None:
    finished = dckpt("ls", tmp_path / "nope", code=EXIT_BAD_INPUT)
    assert finished.err == (
        f"error: Checkpoint directory {tmp_path / 'nope'} does not exist: no such folder; "
        f"file {tmp_path / 'nope'}. Is this the right path?\n"
    )


BAD_INPUT = [
    ("lss", "No such command 'lss'"),
    ("ls", "Missing argument "),
    ("ls c --colour", "No such option"),
    ("plan c --tp x", "Invalid value for '--tp'"),
    ("convert c x --to", "Option '--to' requires an argument"),
    ("ls ''", "the path is empty"),
    ("ls file", "nor a file of safetensors or torch.save"),
    ("stats file", "nor a file of safetensors or torch.save"),
    ("ls bad.safetensors", "bad.safetensors"),
    ("stats bad.pt", "bad.pt"),
    ("ls hdfs://b/x", "'hdfs'"),
    ("convert c hdfs://b/y --to zarr", "'hdfs'"),
    ("ls s3://", "names no bucket"),
    ("ls s3:///x", "names no bucket"),
    ("ls memory://none/x", "memory://none/x does not exist"),
    ("verify memory://none/x", "memory://none/x does not exist"),
    ("rm-prefix memory://none/x optimizer. --yes", "memory://none/x does not exist"),
    ("ls empty", "empty is not a distributed checkpoint: metadata.json is missing"),
    ("ls torn", "metadata.json cannot be read"),
    ("ls c (", "'(' is not a regular expression"),
    ("ls c --depth 0", "--depth"),
    ("ls file --follow", "neither a folder nor a file of"),
    ("ls orbax --follow", "Orbax"),
    ("ls c w --follow", "--follow shows saves"),
    ("show c decoder.weightt", "did you mean 'decoder.weight'"),
    ("show c args.beta", "did you mean"),
    ("show c qqqqqq", "dckpt ls --all"),
    ("show c decoder.weight -s a:b", "cannot read 'a:b'"),
    ("show c decoder.weight -s 1:2:3:4", "0:4,:8"),
    ("show c rng -s 0", "only tensors have slices"),
    ("verify half", "never committed"),
    ("diff c nothing", "does not exist"),
    ("diff empty c", "is not a distributed checkpoint"),
    ("diff c c --rtol -1", "rtol must be"),
    ("diff c c --memory 0", "256MiB"),
    ("diff c c ww", "neither checkpoint has a key that matches 'ww'"),
    ("plan c --shard w", "not of the form"),
    ("plan c --shard =1", "not of the form"),
    ("plan c --shard flat=x", "is no axis; write a number"),
    ("plan c --shard flat(=1", "not a regular expression"),
    ("plan c --shard flat=2 --tp 2", "has no axis 2"),
    (
        "rm-prefix c mdel --dry-run",
        "begins with 'mdel'; keys begin with 'decoder', 'empty', 'flat'",
    ),
    ("rm-prefix c '' --dry-run", "an empty prefix means every tensor"),
    ("rm-prefix c decoder --json", "--json asks nothing"),
    ("convert c empty --to zarr", "empty already exists: the folder holds 'mine'"),
    ("convert c x --to nope", "no such backend and version"),
    ("convert c x --to zarr --include layer", "nothing matches rule 1 (keep ['layer']): a pattern"),
    ("convert c x --to zarr --rename decoder.{x}=w", "several tensors would have this name"),
    ("convert c x --to zarr --rename flat=", "a pattern or a name must be a text"),
    ("convert c x --to zarr --rename flat", "expected PATTERN=KEY"),
    ("convert c x --to zarr --cast floof", "'floof' is not one of bfloat16"),
    ("convert c x --to zarr --cast float16", "--lossy"),
    ("convert c x --to zarr --reshard axis", "axis=0,parts=8"),
    ("convert c x --to zarr --reshard axis=0,parts=0", "reshard"),
    ("convert c x --to zarr --reshard (:axis=0,parts=2", "reshard"),
    ("convert c x --to torch_file --reshard axis=0,parts=8", "reshard makes no sense"),
    ("convert c x --to zarr --recipe split.json", "rule 1 of the recipe does not fit"),
    ("convert c x --to zarr --recipe fill.json", "'uneven': no template says what fills it"),
    ("convert c x --to zarr --memory lots", "is not a size"),
    ("convert c x --to zarr --memory 10MiB", "--memory"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, samples: Samples) -> Path:
    """A checkpoint ``c``, and beside it what is none."""
    root = tmp_path_factory.mktemp("broken")
    for name in ("c", "half", "torn"):
        samples("tensorstore").copied(root / name)
    (root / "half" / "metadata.json").unlink()
    (root / "torn" / "metadata.json").write_text("{")
    (root / "empty").mkdir()
    (root / "empty" / "mine").touch()
    (root / "file").write_text("mine")
    (root / "bad.safetensors").write_bytes(b"\xff" * 100)
    (root / "bad.pt").write_bytes(b"PK\x03\x04" + b"x" * 100)
    (root / "orbax").mkdir()
    (root / "orbax" / "_CHECKPOINT_METADATA").touch()
    (root / "split.json").write_text('[{"split": "uneven", "into": ["a", "b", "c", "d"]}]')
    (root / "fill.json").write_text('[{"resize": "uneven", "size": 9, "fill": "template"}]')
    return root


def test_bad_input_is_an_error_and_changes_nothing(
    dckpt: Run, broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows in one test, so that the quick tier has them too."""
    monkeypatch.chdir(broken)
    before = files_in(broken)
    for command, words in BAD_INPUT:
        arguments = shlex.split(command)
        if "--json" not in arguments:
            finished = dckpt(*arguments, code=EXIT_BAD_INPUT, out="")
            assert finished.err.startswith("error: "), command
            assert words in finished.err, command
            assert "Traceback" not in finished.err, command
        if arguments[-1] != "--to":
            document = dckpt(*arguments, "--json", code=EXIT_BAD_INPUT)
            error = document.json["error"]
            assert error.keys() == {"type", "message", "findings"}, command
            assert error["message"] in document.err, command
            assert words in document.err, command
    assert files_in(broken) == before


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
        (EOFError("no data"), "error: a file ended early: no data\n"),
        (RecursionError("too deep"), "error: RecursionError: too deep\n"),
    ],
)
def test_errors_of_every_kind(
    dckpt: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Checkpoint, "open", fails)
    dckpt("verify" if isinstance(error, EOFError) else "ls", GOLDEN, code=EXIT_BAD_INPUT, err=text)
    with pytest.raises(OSError if isinstance(error, EOFError) else type(error)):
        dckpt("ls", GOLDEN, "--debug")


def test_no_arguments_are_answered_by_the_help(dckpt: Run) -> None:
    finished = dckpt()
    assert finished.code == EXIT_BAD_INPUT
    assert finished.err.startswith("Usage:")
    assert "rm-prefix" in finished.err


def test_keys_that_the_output_cannot_show_are_escaped(tmp_path: Path) -> None:
    save(wholes({"gr\xf6\xdfe": torch.ones(4)}), tmp_path / "\xfc")
    program, ascii_only = ("-m", "dist_checkpointing"), {"PYTHONIOENCODING": "ascii"}
    listed = run_fresh(*program, "ls", tmp_path / "\xfc", environment=ascii_only)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in listed.stdout
    missing = run_fresh(*program, "show", tmp_path / "\xfc", "nothing", environment=ascii_only)
    assert missing.returncode == EXIT_BAD_INPUT
    assert r"\xfc holds nothing called 'nothing'" in missing.stderr


STRANGE = {
    "[red]a[/red]": "[red]a[/red]",
    "line\nbreak": r"line\nbreak",
    "tab\tand\x1b[31mcolour": r"tab\tand\x1b[31mcolour",
    "right\u202eto left": r"right\u202eto left",
    "\u732b.\u00fc": "\u732b.\u00fc",
}


def test_keys_and_values_cannot_draw_on_the_screen(tmp_path: Path, dckpt: Run) -> None:
    for name, value in (("a", "\x1b[31m[red]"), ("b", "\x1b[2J")):
        state = {"c": value, "com\x1b[2Jmon": 1, "o": cell("o", {"\x1b[2J": f"[bold]{value}"})}
        save({**wholes({key: torch.ones(3) for key in STRANGE}), **state}, tmp_path / name)
    place = tmp_path / "a"
    for arguments in (
        ["ls", place],
        ["ls", place, "--all"],
        ["ls", place, "--tree"],
        ["rm-prefix", place, "[red]", "--dry-run"],
        ["diff", place, tmp_path / "b"],
        ["show", place, "o"],
        ["show", place, "c"],
        ["stats", place],
        ["plan", place],
    ):
        out = dckpt(*arguments, err="").out
        assert all(character.isprintable() for character in out if character != "\n"), arguments
        if arguments[0] == "ls" and "--tree" not in arguments:
            assert all(shown in out for shown in STRANGE.values())
        elif arguments[0] in ("rm-prefix", "diff"):
            assert "[red]" in out
    listed = dckpt("ls", place, "--json").json["tensors"]
    assert {row["key"] for row in listed} == set(STRANGE)


@pytest.mark.parametrize(
    ("output", "options", "code", "err"),
    [
        (">/dev/full", [], 2, b"error: No space left on device\n"),
        (">/dev/full", ["--json"], 2, b"error: No space left on device\n"),
        (">&-", [], 0, b""),
        (">&{}", [], 0, b""),
    ],
    ids=["full", "full-json", "closed", "pipe without a reader"],
)
def test_an_output_that_takes_nothing(
    output: str, options: list[str], code: int, err: bytes
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = f'exec "$0" -m dist_checkpointing ls "$@" {output.format(writing)}'
    finished = subprocess.run(
        ["bash", "-c", command, sys.executable, str(GOLDEN), *options],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
        pass_fds=[writing],
    )
    os.close(writing)
    assert (finished.returncode, finished.stderr) == (code, err)


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
    "`rm-prefix`": (["rm-prefix", "a", "w", "--dry-run"], []),
    "`selftest`": (["selftest"], []),
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


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("places")
def test_fields_are_documented(dckpt: Run, command: str) -> None:
    assert set(documented()) == set(COMMANDS)
    always, *optional = documented()[command]
    arguments, more = COMMANDS[command]
    assert {*dckpt(*arguments, "--json").json} == always
    if more:
        without = [word for word in arguments if f"WITHOUT {word}" not in more]
        options = [option for option in more if not option.startswith("WITHOUT")]
        assert {*dckpt(*without, *options, "--json").json} == always | optional[0]


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
    out = dckpt(*([command] if command else []), "--help", code=0).out
    assert max(map(len, out.splitlines())) <= columns
    assert "<bool>" not in out
    assert "..." not in out.partition("Commands:")[2]
    if command:
        assert f"Example: dckpt {command} " in " ".join(out.split())
        assert "--json" in out
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


@pytest.mark.parametrize(
    "arguments", [["diff", "{0}", "{0}"], ["convert", "{0}", "{0}x", "--to", "torch_file"]]
)
def test_memory_is_that_of_the_process(tmp_path: Path, dckpt: Run, arguments: list[str]) -> None:
    save(at_step(1), tmp_path / "a")
    words = [word.format(tmp_path / "a") for word in arguments]
    finished = dckpt(*words, "--memory", "1MB", code=2)
    assert "the memory budget is too small: the program itself takes most of it" in finished.err
    assert dckpt(*words, "--memory", "5GB").code == 0


def test_ls_suggests_keys(tmp_path: Path, dckpt: Run) -> None:
    save(wholes({"decoder.weight": torch.ones(2)}), tmp_path / "a")
    finished = dckpt("ls", tmp_path / "a", "decodr.weight", code=1)
    assert finished.err.endswith("stands for any text; did you mean 'decoder.weight'?\n")
    assert "--all looks at objects" in dckpt("ls", tmp_path / "a", "qqqq").err
    assert dckpt("ls", tmp_path / "a", "qqqq", "--json").json["tensors"] == []
