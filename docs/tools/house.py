"""Draws the rooms of the package, from the import contract in ``pyproject.toml``, and counts them.

python docs/tools/house.py            print the picture
python docs/tools/house.py --write    put it into CONTRIBUTING.md, and lower the budgets there
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_checkpointing"
BEGIN = "<!-- drawn by docs/tools/house.py -->"
END = "<!-- end of the picture -->"
BUDGETS = "<!-- budgets, lowered by docs/tools/house.py -->"
BUDGETS_END = "<!-- end of the budgets -->"


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


def size(paths: Iterable[Path]) -> tuple[int, int]:
    """Lines and files."""
    lines = [path.read_bytes().count(b"\n") for path in paths]
    return sum(lines), len(lines)


def sizes() -> dict[str, tuple[int, int]]:
    """Lines and files of each room, of the top-level modules, of the whole, and of the tests."""
    rooms = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    return {room.name: size(room.rglob("*.py")) for room in rooms} | {
        "(top)": size(PACKAGE.glob("*.py")),
        "dist_checkpointing": size(PACKAGE.rglob("*.py")),
        "tests": size((ROOT / "tests").rglob("*.py")),
    }


def budgets(text: str) -> dict[str, tuple[int, int]]:
    """The table of budgets in a text."""
    table = text.partition(BUDGETS)[2].partition(BUDGETS_END)[0]
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    return {room: (int(lines), int(files)) for room, lines, files in rows}


def lowered(text: str) -> str:
    """A text whose budgets are the sizes of now, where these are lower."""
    before, _, rest = text.partition(BUDGETS)
    _, _, after = rest.partition(BUDGETS_END)
    old = budgets(text)
    rows = ["| room | lines | files |", "|---|---:|---:|"]
    for room, now in sizes().items():
        lines, files = map(min, now, old.get(room, now))
        rows.append(f"| `{room}` | {lines} | {files} |")
    return "\n".join([f"{before}{BUDGETS}", *rows, f"{BUDGETS_END}{after}"])


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        page = ROOT / "CONTRIBUTING.md"
        page.write_text(lowered(written(page.read_text())))
    else:
        print(picture())  # noqa: T201 - that is what it is for
