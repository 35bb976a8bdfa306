"""Draws the rooms of the package, from the import contract in ``pyproject.toml``.

python docs/tools/house.py            print the picture
python docs/tools/house.py --write    put it into CONTRIBUTING.md
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_checkpointing"
BEGIN = "<!-- drawn by docs/tools/house.py -->"
END = "<!-- end of the picture -->"


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = content["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [re.split(r" [|:] ", layer) for layer in layers if layer != "__main__"]


def sentence(room: str) -> str:
    """What a room is for: the first line of its docstring."""
    path = PACKAGE / f"{room}.py"
    if not path.exists():
        path = PACKAGE / room / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path} has no docstring"
    return text.splitlines()[0]


def picture() -> str:
    """The rooms floor by floor, as text."""
    rows = floors()
    width = max(len(room) for rooms in rows for room in rooms)
    lines = []
    for number, rooms in zip(range(len(rows), 0, -1), rows, strict=True):
        for position, room in enumerate(rooms):
            floor = f"{number}" if position == 0 else " "
            lines.append(f"{floor} | {room:{width}} | {sentence(room)}")
        lines.append(f"--+-{'-' * width}-+-{'-' * 40}")
    return "\n".join(lines[:-1])


def written(text: str) -> str:
    """A text with the picture between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{picture()}\n```\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        page = ROOT / "CONTRIBUTING.md"
        page.write_text(written(page.read_text()))
    else:
        print(picture())  # noqa: T201 - that is what it is for
