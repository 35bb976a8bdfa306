"""What ``dckpt stats --compare`` prints: which tensors moved most between two checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.tools.cli.screen import (
    check_page,
    counted,
    in_columns,
    one_line,
    painted,
    print_json,
    progress_bar,
    say,
    terminal_width,
    write_page,
)

if TYPE_CHECKING:
    from dist_checkpointing.tools.inspect.movement import Moved, Movement

_NARROW = 90


def print_movement(
    earlier: Checkpoint,
    later: Checkpoint,
    *,
    top: int,
    page: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare two checkpoints; print the ``top`` tensors that moved most, and write the page."""
    # Not at the top: it imports torch.
    from dist_checkpointing.tools.inspect.movement import movement, movement_page  # noqa: PLC0415

    if page is not None:
        check_page(page, force=force)
    num_bytes = sum(tensor.num_bytes for key, tensor in later.items() if key in earlier)
    with progress_bar("comparing", num_bytes) as bar:
        found = movement(earlier, later, report=bar.advance)
    summary = _summary(found)
    if page is not None:
        write_page(page, movement_page(found, f"{earlier.path} -> {later.path}", summary))
    if as_json:
        print_json(_as_json(earlier, later, found))
        return
    say(painted(one_line(f"{earlier.path} -> {later.path}"), "bold"))
    for line in _lines(found, top):
        say(line)
    say(painted(summary, "bold"))
    if page is not None:
        say(f"written: {page}")


def _lines(found: Movement, top: int) -> Iterator[str]:
    if not found.moved or not top:
        return
    headers: tuple[str, ...] = ("KEY", "MOVED BY", "MAX CHANGE", "CHANGED", "NORM BEFORE", "AFTER")
    shown = itertools.islice(found.moved.items(), top)
    rows = [(one_line(key), *_cells(moved)) for key, moved in shown]
    if (terminal_width() or _NARROW) < _NARROW:
        headers, rows = headers[:4], [row[:4] for row in rows]
    yield from in_columns(headers, rows, right=range(1, 6))
    if len(found.moved) > top:
        yield painted(f"... {len(found.moved) - top:,} more (--top, --json, --output)", "dim")
    yield ""


def _cells(moved: Moved) -> tuple[str, ...]:
    from dist_checkpointing.tools.inspect.movement import percent_text  # noqa: PLC0415

    before, after, _ = moved.norms
    return (
        percent_text(moved.relative),
        f"{moved.max_change:.3g}",
        percent_text(moved.fraction),
        f"{before:.4g}",
        f"{after:.4g}",
    )


def _summary(found: Movement) -> str:
    from dist_checkpointing.tools.inspect.movement import percent_text  # noqa: PLC0415

    number = len(found.moved) + found.num_same
    text = f"{len(found.moved):,} of {counted(number, 'tensor')} moved"
    if found.moved:
        text += f", together by {percent_text(found.total.relative)}"
        odd = found.total.num_not_finite
        text += f"; {counted(odd, 'NaN or infinite element')} left out of the norms" if odd else ""
    if found.not_compared:
        text += f"; {len(found.not_compared):,} not compared (only in one, or of another shape)"
    return text


def _as_json(earlier: Checkpoint, later: Checkpoint, found: Movement) -> dict[str, Any]:
    return {
        "earlier": str(earlier.path),
        "later": str(later.path),
        "num_same": found.num_same,
        "not_compared": found.not_compared,
        "total": _row(found.total),
        "tensors": [{"key": key, **_row(moved)} for key, moved in found.moved.items()],
    }


def _row(moved: Moved) -> dict[str, Any]:
    before, after, change = moved.norms
    facts = dataclasses.asdict(moved)
    del facts["squares"]
    return {
        **facts,
        "fraction_changed": moved.fraction,
        "norm_before": before,
        "norm_after": after,
        "norm_of_change": change,
        "relative_change": moved.relative,
    }
