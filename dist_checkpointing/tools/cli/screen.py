"""What the commands share: arguments, and output styled for a terminal, plain for a pipe."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

CheckpointFolder = Annotated[Path, typer.Argument(help="Folder of a checkpoint.")]
Trusted = Annotated[
    bool, typer.Option("--trusted", help="Unpickle anything: lets the files run any code.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_NUMBER = re.compile(r"(?<=[./])[0-9]+(?=[./])")

out = Console(soft_wrap=False, highlight=False)
"""Where results go. rich itself leaves colours out for NO_COLOR and for pipes."""

errors = Console(stderr=True, highlight=False)
"""Where errors and progress go."""

_LEAST_FOR_BAR = 2**25
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def fail(message: str) -> None:
    """Print an error; the lines after the first are its details."""
    first, *rest = [one_line(line) for line in message.split("\n")]
    errors.print(f"[bold red]error:[/] {escaped(first)}", soft_wrap=True)
    for line in rest:
        errors.print(escaped(line), soft_wrap=True)


def escaped(text: str) -> str:
    """The text for rich, without markup."""
    return text.replace("[", r"\[")


def one_line(text: str) -> str:
    """A text of somebody else, such as a key, without what would move the cursor or colour it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(line: str = "") -> None:
    """Print a line of the result as it is."""
    sys.stdout.write(f"{line}\n")


def painted(text: str, style: str) -> str:
    """The text in a style if the terminal has colours and they are not turned off."""
    if out.color_system is None or out.no_color or not out.is_terminal:
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def print_json(value: Any) -> None:
    """One JSON document on the standard output, for scripts.

    JSON has no word for NaN and infinity: they become ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``. What JSON cannot say at all becomes its ``repr``.
    """
    json.dump(json_value(value), sys.stdout, indent=2, default=repr)
    sys.stdout.write("\n")


def json_value(value: Any) -> Any:
    """A value of plain types as JSON can say it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return [json_value(value.real), json_value(value.imag)]
    if isinstance(value, dict):
        return {str(key): json_value(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(below) for below in value]
    return value


def bytes_on_disk(paths: Iterable[Path]) -> int:
    """Bytes of the blocks that files take; a file that is missing takes 0."""
    return sum(path.lstat().st_blocks * 512 for path in paths if path.exists())


def same_for_all_layers(key: str) -> str:
    """A key with its numbers left out: what the same tensors of all layers have in common."""
    return _NUMBER.sub("*", key)


def counted(number: int, word: str) -> str:
    """``1 tensor``, ``1,234 tensors``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


class Bar:
    """How far a command is; shown on a terminal, and nowhere else."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)

    def reach(self, num_bytes: int, total: int) -> None:
        """So many bytes are done, of so many."""
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes, total=total)


@contextmanager
def progress_bar(title: str, total_bytes: int | None) -> Iterator[Bar]:
    """A bar on the standard error, with speed and the time that is left; gone at the end."""
    if not errors.is_terminal or (total_bytes is not None and total_bytes < _LEAST_FOR_BAR):
        yield Bar()
        return
    # Not at the top: most commands have none.
    from rich import progress  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=errors, transient=True) as bar:
        yield Bar(bar, bar.add_task(title, total=total_bytes))
