"""The chunks of a tensor drawn with characters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dist_checkpointing.tools.cli.screen import painted
from dist_checkpointing.tools.inspect.chunk_layout import ChunkLayout

_MOST_ROWS = 12
# By which of the four neighbours a line goes on to: up, right, down, left.
_CORNERS = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"


def draw(plane: ChunkLayout, width: int, marked: Collection[int] = ()) -> Iterator[str]:
    """The lines of a drawing: a box a chunk, with its number, and ranges of elements beside them.

    Args:
        plane: what to draw.
        width: columns there are; where they do not suffice, the middle is left out.
        marked: chunks to set off, with a star and a colour.
    """
    has_columns = len(plane.axes) > 1
    rows = _some(len(plane.row_cuts) - 1, _MOST_ROWS)
    row_labels = [_range(plane.row_cuts, row) if plane.axes else "" for row in rows]
    margin = max(map(len, row_labels), default=0)
    last = plane.owner(len(plane.row_cuts) - 2, len(plane.column_cuts) - 2) or 0
    # The ranges far to the right have the longest numbers.
    behind = range(max(0, len(plane.column_cuts) - 3), len(plane.column_cuts) - 1)
    longest = max((len(_range(plane.column_cuts, c)) for c in behind), default=0)
    cell = max(len(str(last)) + 2, longest if has_columns else 0, 6)
    columns = _some(len(plane.column_cuts) - 1, max(1, (width - margin - 3) // (cell + 1)))
    owners = [
        [None if row is None or c is None else plane.owner(row, c) for c in columns] for row in rows
    ]
    if has_columns:
        texts = ["" if c is None else _range(plane.column_cuts, c) for c in columns]
        yield f"{'':{margin}}  {' '.join(f'{text:^{cell}}' for text in texts)}".rstrip()
    for place in range(len(rows) + 1):
        yield f"{'':{margin}} {_border(owners, rows, columns, place, cell)}"
        if place < len(rows):
            cells = _cells(owners, rows, columns, place, cell, marked)
            yield f"{row_labels[place]:>{margin}} {cells}"


def _some(count: int, most: int) -> list[int | None]:
    """The numbers below ``count``; None for those in the middle that are left out."""
    if count <= most:
        return list(range(count))
    before = max(1, most // 2)
    behind = max(0, most - before - 1)
    return [*range(before), None, *range(count - behind, count)]


def _range(cuts: Sequence[int], place: int | None) -> str:
    return "⋮" if place is None else f"{cuts[place]}:{cuts[place + 1]}"


Owners = Sequence[Sequence[int | None]]
Places = Sequence[int | None]


def _is_one(
    owners: Owners, rows: Places, columns: Places, a: tuple[int, int], b: tuple[int, int]
) -> bool:
    """Whether two neighbours belong to one chunk; the outside belongs to none."""
    for row, column in (a, b):
        if not (0 <= row < len(rows) and 0 <= column < len(columns)):
            return False
    if None in (rows[a[0]], rows[b[0]], columns[a[1]], columns[b[1]]):
        return False
    return owners[a[0]][a[1]] == owners[b[0]][b[1]]


def _border(owners: Owners, rows: Places, columns: Places, place: int, cell: int) -> str:
    """The line above row ``place``."""

    def goes_right(column: int) -> bool:
        inside = 0 <= column < len(columns)
        return inside and not _is_one(owners, rows, columns, (place - 1, column), (place, column))

    def goes_down(row: int, column: int) -> bool:
        inside = 0 <= row < len(rows)
        return inside and not _is_one(owners, rows, columns, (row, column - 1), (row, column))

    text = ""
    for column in range(len(columns) + 1):
        ways = (
            goes_down(place - 1, column),
            goes_right(column),
            goes_down(place, column),
            goes_right(column - 1),
        )
        text += _CORNERS[sum(bit << number for number, bit in enumerate(ways))]
        if column < len(columns):
            text += ("─" if goes_right(column) else " ") * cell
    return text


def _cells(
    owners: Owners, rows: Places, columns: Places, place: int, cell: int, marked: Collection[int]
) -> str:
    text = ""
    for column in range(len(columns) + 1):
        joined = _is_one(owners, rows, columns, (place, column - 1), (place, column))
        text += " " if joined else "│"
        if column == len(columns):
            break
        text += _cell(owners, rows, columns, (place, column), cell, marked)
    return text


def _cell(
    owners: Owners,
    rows: Places,
    columns: Places,
    at: tuple[int, int],
    cell: int,
    marked: Collection[int],
) -> str:
    row, column = at
    if rows[row] is None or columns[column] is None:
        return f"{'⋮' if rows[row] is None else '…':^{cell}}"
    number = owners[row][column]
    # A chunk is named where it begins.
    above = _is_one(owners, rows, columns, (row - 1, column), at)
    left = _is_one(owners, rows, columns, (row, column - 1), at)
    if number is None:
        return f"{'none':^{cell}}"
    if above or left:
        return " " * cell
    if number in marked:
        return painted(f"{f'*{number}':^{cell}}", "cyan")
    return f"{number:^{cell}}"
