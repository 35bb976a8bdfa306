"""Plain columns for lists of any length; rich's tables take a minute for 100,000 rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from dist_checkpointing.tools.cli.screen import out, painted

_GAP = "  "
_LEAST_FIRST = 24


def terminal_width() -> int | None:
    """Columns of the terminal; None for a pipe or a file, which have no width."""
    return out.width if out.is_terminal else None


def in_columns(
    headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: Iterable[int] = ()
) -> Iterator[str]:
    """The lines of a table.

    Where it does not fit into the terminal the first column gets narrower, and a text that is too
    long for it has a line of its own: nothing is cut off, and keys can be copied.

    Args:
        headers: one a column; none at all if they are empty.
        rows: the cells.
        right: columns that are aligned at their right side.
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
    # One formatting operation a row: there may be very many.
    form = _GAP.join(
        f"%{width}s" if place in to_right else f"%-{width}s" for place, width in enumerate(widths)
    )
    for row in rows:
        line = form % row if len(row[0]) <= widths[0] else _line(row, widths, to_right)
        yield line.rstrip()


def _cells(text: str) -> int:
    """Terminal columns that a text takes."""
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
