"""What every command prints on terminals of different widths."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dist_checkpointing import CheckpointManager, save
from dist_checkpointing.tools import app, report
from samples import Run, Samples
from states import at_step, wholes

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
        ["show", one, "uneven", "--plot"],
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
    finished = dckpt("diff", *pair, "--summary")
    assert finished.code == 1
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
    "arguments", [["diff", "{0}", "{0}"], ["convert", "{0}", "{0}x", "--to", "torch"]]
)
def test_memory_is_that_of_the_process(tmp_path: Path, dckpt: Run, arguments: list[str]) -> None:
    save(at_step(1), tmp_path / "a")
    words = [word.format(tmp_path / "a") for word in arguments]
    finished = dckpt(*words, "--memory", "1MB")
    assert finished.code == 2
    assert "the memory budget is too small: the program itself takes most of it" in finished.err
    assert dckpt(*words, "--memory", "5GB").code == 0


def test_a_pattern_that_matches_nothing_is_no_equality(tmp_path: Path, dckpt: Run) -> None:
    save(at_step(1), tmp_path / "a")
    finished = dckpt("diff", tmp_path / "a", tmp_path / "a", "ww")
    assert (finished.code, finished.out) == (2, "")
    assert "neither checkpoint has a key that matches 'ww'" in finished.err
    assert dckpt("diff", tmp_path / "a", tmp_path / "a", "step").code == 0


def test_ls_suggests_keys(tmp_path: Path, dckpt: Run) -> None:
    save(wholes({"decoder.weight": torch.ones(2)}), tmp_path / "a")
    finished = dckpt("ls", tmp_path / "a", "decodr.weight")
    assert finished.code == 1
    assert finished.err.endswith("matches 'decodr.weight'; did you mean 'decoder.weight'?\n")
    assert "--all looks at objects" in dckpt("ls", tmp_path / "a", "qqqq").err
    assert dckpt("ls", tmp_path / "a", "qqqq", "--json").json["tensors"] == []
