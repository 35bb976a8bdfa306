"""Draws a terminal: ``python docs/tools/terminal.py RUN`` runs ``dckpt`` there.

RUN is a folder below ``demo-output``, which ``make demo`` has made.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "screens" / "dckpt.svg"
COLUMNS = 92
COMMANDS = (
    "dckpt ls run",
    "dckpt ls run@4 layers.{x*}",
    "dckpt show run@4 layers.mlp.up.weight --slice 0,:3,:4",
    "dckpt verify run@4",
    "dckpt diff run@2 run@4 --summary",
)
_FONT = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
"""The fonts of the template lie on another host; a browser has one of its own."""


def drawn(run_folder: Path) -> str:
    """The SVG of all commands with what they print."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    for command in COMMANDS:
        words = [re.sub(r"^run(?=@|$)", str(run_folder), word) for word in command.split()]
        words[0] = str(Path(sys.executable).with_name(words[0]))
        run = subprocess.run(  # noqa: S603 - the commands above
            words, env=environment, capture_output=True, text=True, check=True
        )
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(run.stdout.replace(str(run_folder), "run")))
    template = _FONT.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="dckpt", theme=MONOKAI, code_format=template, unique_id="t")


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(parser.parse_args().run))


if __name__ == "__main__":
    main()
