"""The fields of ``--json`` are those that docs/cli.md names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointManager, ShardedObject, ShardedTensor, save
from samples import Run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "`ls`": (["ls", "a"], ["--all"]),
    "`ls RUN`": (["ls", "run"], []),
    "`show` of a tensor": (["show", "a", "w"], ["--plot"]),
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
