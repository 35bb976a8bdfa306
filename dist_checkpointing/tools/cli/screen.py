"""What the commands share: arguments, and output styled for a terminal, plain for a pipe."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.location import as_location

if TYPE_CHECKING:
    from dist_checkpointing.storage.progress import Progress

_NUMBER = re.compile(r"(?<=[./])[0-9]+(?=[./])")

out = Console(soft_wrap=False, highlight=False)
"""The standard output. rich prints no colours for NO_COLOR and for pipes."""

errors = Console(stderr=True, highlight=False)
"""The standard error, for errors and progress."""

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        parser=as_location,
        help="Folder or URL of a checkpoint; RUN@1000 or RUN@latest is a step of a run.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Regex = Annotated[bool, typer.Option("--regex", "-E", help="PATTERN is a regular expression.")]
Trusted = Annotated[
    bool, typer.Option("--trusted", help="Unpickle anything: lets the files run any code.")
]

_GAP = "  "
_LEAST_FIRST = 20
_LEAST_FOR_BAR = 2**25
_SECONDS_BETWEEN_REPORTS = 0.05
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def fail(message: str) -> None:
    """Print an error; the lines after the first are its details."""
    first, *rest = [one_line(line) for line in message.split("\n")]
    errors.print(f"[bold red]error:[/] {escaped(first)}", soft_wrap=True)
    for line in rest:
        errors.print(escaped(line), soft_wrap=True)


def escaped(text: str) -> str:
    """The text such that rich prints it as it is."""
    return text.replace("[", r"\[")


def one_line(text: str) -> str:
    """A text such as a key, with its control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(line: str = "") -> None:
    """Print a line of the result as it is."""
    sys.stdout.write(f"{line}\n")


def say_wrapped(line: str, style: str | None = None) -> None:
    """Print a line of words; on a terminal none is cut at its edge."""
    for part in _wrapped(line, terminal_width()):
        say(part if style is None else painted(part, style))


def facts_lines(rows: Sequence[tuple[str, str]], style: str = "dim") -> Iterator[str]:
    """Lines of named facts, in two columns."""
    width = max(len(name) for name, _ in rows)
    available = terminal_width()
    room = None if available is None else max(_LEAST_FIRST, available - width - len(_GAP))
    for name, fact in rows:
        first, *rest = _wrapped(fact, room) or [""]
        yield f"{painted(f'{name:<{width}}', style) if name else ' ' * width}{_GAP}{first}".rstrip()
        yield from (f"{' ' * width}{_GAP}{line}" for line in rest)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()))
    # Paths and keys stay whole, so that they can be copied.
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def painted(text: str, style: str) -> str:
    """The text in a style if the terminal has colours and they are not turned off."""
    if out.color_system is None or out.no_color or not out.is_terminal:
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def terminal_width() -> int | None:
    """Number of columns of the terminal; None for a pipe or a file."""
    return out.width if out.is_terminal else None


def in_columns(
    headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: Iterable[int] = ()
) -> Iterator[str]:
    """The lines of a table of any length; rich takes a minute for a table of 100,000 rows.

    If the table is wider than the terminal, the first column gets narrower, and a text that is too
    long for it gets its own line. So nothing is cut off, and keys can be copied.

    Args:
        headers: header of each column; no header line if all are empty.
        rows: cells of each row.
        right: numbers of the columns that are aligned to the right.
    """
    shown = [headers] if any(headers) else []
    widths = [max(map(_cells, column)) for column in zip(*shown, strict=True)]
    is_plain = True
    for place, column in enumerate(zip(*rows, strict=True)):
        is_ascii = all(map(str.isascii, column))
        is_plain = is_plain and is_ascii
        width = max(map(len if is_ascii else _cells, column))
        if shown:
            widths[place] = max(widths[place], width)
        else:
            widths.append(width)
    available = terminal_width()
    rest = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    if available is not None and widths and widths[0] + rest > available:
        widths[0] = max(min(widths[0], _LEAST_FIRST), available - rest)
    to_right = set(right)
    for header in shown:
        yield painted(_line(header, widths, to_right), "bold")
    if not is_plain:
        yield from (_line(row, widths, to_right) for row in rows)
        return
    # One formatting operation for each row, because there may be very many rows.
    form = _GAP.join(
        f"%{width}s" if place in to_right else f"%-{width}s" for place, width in enumerate(widths)
    )
    for row in rows:
        line = form % row if len(row[0]) <= widths[0] else _line(row, widths, to_right)
        yield line.rstrip()


def _cells(text: str) -> int:
    """Number of terminal columns that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _line(row: Sequence[str], widths: Sequence[int], right: set[int]) -> str:
    cells = []
    for place, (text, width) in enumerate(zip(row, widths, strict=True)):
        space = " " * (width - _cells(text))
        cells.append(f"{space}{text}" if place in right else f"{text}{space}")
    if _cells(row[0]) > widths[0]:
        cells[0] = " " * widths[0]
        return f"{row[0]}\n{_GAP.join(cells).rstrip()}"
    return _GAP.join(cells).rstrip()


def print_json(value: Any) -> None:
    """One JSON document on the standard output, for scripts.

    NaN and infinities become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, because JSON has no
    numbers for them. Values of other types become their ``repr``.
    """
    json.dump(json_value(value), sys.stdout, indent=2, default=repr)
    sys.stdout.write("\n")


def json_value(value: Any) -> Any:
    """A value of plain types, converted for JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return [json_value(value.real), json_value(value.imag)]
    if isinstance(value, dict):
        return {str(key): json_value(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(below) for below in value]
    return value


def check_page(output: Path, *, force: bool) -> None:
    """Refuse a path that a web page is not to be written to, before the work for it is done."""
    if output.suffix.lower() != ".html":
        page = output.with_suffix(".html")
        raise ValueError(
            f"{str(output)!r} must end in .html: write {str(page)!r} and open it in a browser"
        )
    if output.exists() and not force:
        raise FileExistsError(f"{output} exists: name another file, or pass --force")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {output.absolute().parent} does not exist")


def write_page(output: Path, page: str) -> int:
    """Write a web page as a whole; returns its bytes."""
    data = page.encode(errors="backslashreplace")
    local_folder.write_atomic(output, data, local_folder.Durability.PAGE_CACHE)
    return len(data)


def same_for_all_layers(key: str) -> str:
    """A key with ``*`` for its numbers, which is the same for all layers."""
    return _NUMBER.sub("*", key)


def counted(number: int, word: str) -> str:
    """``1 tensor``, ``1,234 tensors``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


class Bar:
    """The progress of a command, shown only on a terminal."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task
        self._shown_at = 0.0
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more bytes as done."""
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)

    def show(self, progress: Progress) -> None:
        """Show a report, unless the last one was shown a moment ago: many threads may report."""
        if self._bar is None:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._shown_at < _SECONDS_BETWEEN_REPORTS and progress.bytes_done:
                return
            self._shown_at = now
        self._bar.update(
            self._task,
            description=progress.phase,
            completed=progress.bytes_done,
            total=progress.bytes_total or None,
        )


@contextmanager
def progress_bar(title: str, total_bytes: int | None) -> Iterator[Bar]:
    """A bar on the standard error, with speed and remaining time; removed at the end."""
    if not errors.is_terminal or (total_bytes is not None and total_bytes < _LEAST_FOR_BAR):
        yield Bar()
        return
    # Imported here, because most commands show no bar.
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
