"""The code in markdown files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NOT_RUN: Final = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced listing.

    Attributes:
        line: of its first line of code, from 1.
        is_run: False if the comment ``<!-- not run: REASON -->`` stands above it.
    """

    language: str
    line: int
    code: str
    is_run: bool


def blocks(text: str) -> list[Block]:
    """All fenced listings of a markdown text, in order."""
    found: list[Block] = []
    language, start = None, 0
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if language is None:
            language, start = line.removeprefix("```").partition(" ")[0], number
            continue
        above = lines[start - 2] if start > 1 else ""
        code = "\n".join(lines[start : number - 1]) + "\n"
        found.append(Block(language, start + 1, code, _NOT_RUN.fullmatch(above) is None))
        language = None
    assert language is None, f"the listing in line {start} does not end"
    return found


def run(block: Block, path: Path, names: dict[str, object]) -> None:
    """Execute a listing; a traceback shows the line of the markdown file."""
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, str(path), "exec"), names)
