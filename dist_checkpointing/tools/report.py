"""What commands print: a report for people, styled for a terminal, plain for a pipe, or JSON."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from typer import Exit, Option

if TYPE_CHECKING:
    from dist_checkpointing.storage.progress import Progress

EXIT_INTERRUPTED: Final = 130
AsJson = Annotated[bool, Option("--json", help="Print one JSON document.")]

out: Console = Console(soft_wrap=False, highlight=False)
"""The standard output. rich prints no colours for NO_COLOR and for pipes."""

errors: Console = Console(stderr=True, highlight=False)
"""The standard error, for errors and progress."""

PIPE_WIDTH = 100
"""Width of what is drawn or wrapped, where there is no terminal."""

_NUMBER = re.compile(r"(?<=[./])[0-9]+(?=[./])")
_GAP = "  "
_MIN_FIRST = 20
_LINES_AT_ONCE = 1000
_MIN_BYTES_FOR_BAR = 2**25
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Report:
    """What a command found: sections of lines, tables and named facts, an empty line between them.

    Tables are formatted only when they are printed, because they may be long.
    """

    def __init__(self, title: str | None = None, style: str | None = "bold") -> None:
        self._sections: list[tuple[str, list[Iterable[str]]]] = []
        self.section()
        if title is not None:
            self.line(title, style)

    def section(self, heading: str | None = None, style: str | None = "bold") -> None:
        """Begin a section, which is printed, with its heading, only if lines follow."""
        head = "" if heading is None else f"{painted(one_line(heading), style)}\n"
        self._sections.append((head, []))

    def paragraph(self, text: str, style: str | None) -> None:
        self.section()
        self.line(text, style)

    def raw(self, lines: Iterable[str]) -> None:
        self._sections[-1][1].append(lines)

    def line(self, text: str, style: str | None = None) -> None:
        """Add a line: control characters, as in keys, are escaped, and a terminal wraps words."""
        self.raw(painted(part, style) for part in _wrapped(one_line(text), terminal_width()))

    def lines(self, texts: Sequence[str], style: str | None, most: int) -> None:
        """Add a line for each of the first texts, and say how many are left out."""
        for text in texts[:most]:
            self.line(text, style)
        self.left_out(len(texts) - most)

    def left_out(self, number: int) -> None:
        if number > 0:
            self.line(f"  and {number:,} more (--json lists all)", "dim")

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add named facts, in two columns; none for an empty text."""
        self.raw(_facts([(name, fact) for name, fact in rows if fact]))

    def table(
        self, headers: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
    ) -> None:
        """Add a table, see ``in_columns``, with keys in the first column; none without rows."""
        cells = ((one_line(row[0]), *row[1:]) for row in rows)
        self.raw(in_columns(headers, cells, right))

    def print(self) -> None:
        gap = ""
        for heading, parts in self._sections:
            lines = chain.from_iterable(parts)
            before = gap + heading
            while some := list(islice(lines, _LINES_AT_ONCE)):
                sys.stdout.write(before + "\n".join(some) + "\n")
                before, gap = "", "\n"
        sys.stdout.flush()

    def finish(self, document: Mapping[str, Any], *, as_json: bool, code: int = 0) -> None:
        """Print this, or as JSON the document that says the same; exit if the code is not 0."""
        if as_json:
            print_json(document)
        else:
            self.print()
        if code:
            raise Exit(code)


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on the standard output, for scripts; a line for each row of its lists.

    NaN and infinities become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, because JSON has no
    numbers for them. Values of other types become their ``repr``.
    """
    separator = "{\n"
    for name, value in document.items():
        sys.stdout.write(f"{separator}  {json.dumps(name)}: ")
        separator = ",\n"
        if isinstance(value, list | tuple) and isinstance(next(iter(value), None), list | dict):
            # json itself writes indented text ten times more slowly.
            rows = ",\n".join(f"    {json_text(row)}" for row in value)
            sys.stdout.write(f"[\n{rows}\n  ]")
        else:
            sys.stdout.write(json_text(value))
    sys.stdout.write("\n}\n")
    sys.stdout.flush()


def json_text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value), default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, dict):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return value


def fail(message: str) -> None:
    first, *rest = [one_line(line).replace("[", r"\[") for line in message.split("\n")]
    for line in (f"[bold red]error:[/] {first}", *rest):
        errors.print(line, soft_wrap=True)


def one_line(text: str) -> str:
    """A text such as a key, with its control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shape_text(shape: Iterable[int] | None) -> str:
    """``512x4096``: a shape without spaces, so that ``awk`` sees one column."""
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


class Total(NamedTuple):
    num_tensors: int = 0
    num_bytes: int = 0


def totals(sizes: Iterable[tuple[Any, int]]) -> dict[Any, Total]:
    """What the tensors of each group take, given the group and bytes of each; largest first."""
    found: dict[Any, Total] = {}
    for group, num_bytes in sizes:
        count, total = found.get(group, (0, 0))
        found[group] = Total(count + 1, total + num_bytes)
    return dict(sorted(found.items(), key=lambda row: (-row[1].num_bytes, row[0])))


def same_for_all_layers(key: str) -> str:
    """A key with ``*`` for its numbers, which is the same for all layers."""
    return _NUMBER.sub("*", key)


def painted(text: str, style: str | None) -> str:
    """The text in a style if the terminal has colours and they are not turned off."""
    if style is None or out.color_system is None or out.no_color or not out.is_terminal:
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def terminal_width() -> int | None:
    """Number of columns of the terminal; None for a pipe or a file."""
    return out.width if out.is_terminal else None


def is_narrower_than(width: int) -> bool:
    return out.is_terminal and out.width < width


def _facts(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    available = terminal_width()
    room = None if available is None else max(_MIN_FIRST, available - width - len(_GAP))
    for name, fact in rows:
        label = painted(f"{name:<{width}}", "dim") if name else " " * width
        for line in _wrapped(one_line(fact), room):
            yield f"{label}{_GAP}{line}".rstrip()
            label = " " * width


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()))
    # Paths and keys stay whole, so that they can be copied.
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def in_columns(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> Iterator[str]:
    """A text for the header and each row of a table; rich takes a minute for 100,000 rows.

    Columns whose numbers are in ``right`` are aligned to the right. Without rows there are no
    lines, and if all headers are empty, no header. If the table is wider than the terminal, the
    first column gets narrower, and a text that is too long for it gets its own line. So nothing is
    cut off, and keys can be copied.
    """
    rows = list(rows)
    if not rows:
        return
    columns = list(zip(headers, *rows, strict=True))
    is_plain = all(all(map(str.isascii, column)) for column in columns)
    width_of = len if is_plain else cell_len
    widths = [max(map(width_of, column)) for column in columns]
    available = terminal_width()
    rest = sum(len(_GAP) + width for width in widths[1:] if width)
    if available is not None and widths[0] + rest > available:
        widths[0] = max(min(widths[0], _MIN_FIRST), available - rest)
    # One formatting operation for each row, because there may be very many rows.
    form = _GAP.join(f"%{w if n in right else -w}s" for n, w in enumerate(widths))

    def line(row: Sequence[str]) -> str:
        if is_plain:
            return (form % tuple(row)).rstrip()
        cells = []
        for number, (text, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(text))
            cells.append(space + text if number in right else text + space)
        return _GAP.join(cells).rstrip()

    if any(headers):
        yield painted(line(headers), "bold")
    for row in rows:
        fits = width_of(row[0]) <= widths[0]
        yield line(row) if fits else f"{row[0]}\n{line(('', *row[1:]))}"


class Bar:
    """The progress of a command, shown only on a terminal."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, num_bytes)

    def show(self, progress: Progress) -> None:
        if self._bar is not None:
            done, total = progress.bytes_done, progress.bytes_total or None
            self._bar.update(self._task, description=progress.phase, completed=done, total=total)


@contextmanager
def progress_bar(title: str, total_bytes: int | None) -> Iterator[Bar]:
    """A bar on the standard error, with speed and remaining time; removed at the end."""
    if not errors.is_terminal or (total_bytes is not None and total_bytes < _MIN_BYTES_FOR_BAR):
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
