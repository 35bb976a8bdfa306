"""What ``dckpt ls`` prints for the folder of a run: a line for each step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.tools.cli.screen import (
    counted,
    in_columns,
    one_line,
    painted,
    print_json,
    say,
    terminal_width,
)
from dist_checkpointing.tools.inspect.runs import Run, RunStep, StepState

_MOST_NAMED = 3
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def print_run(run: Run, *, as_json: bool) -> None:
    """Print the steps of a run, oldest first."""
    if as_json:
        print_json(_as_json(run))
        return
    say(painted(one_line(str(run.root)), "bold"))
    now = time.time()
    rows = [_row(step, run, now) for step in run.steps]
    headers = ("STEP", "STATE", "AGE", "SIZE", "OWN", "NOTES")
    lines = list(in_columns(headers, rows, right=[0, 2, 3, 4]))
    width = terminal_width()
    # If they do not fit beside the rest, notes get lines of their own.
    is_narrow = width is not None and max(map(len, lines)) > width
    if is_narrow:
        lines = list(in_columns(headers[:-1], [row[:-1] for row in rows], right=[0, 2, 3, 4]))
    say(lines[0])
    for line, row, step in zip(lines[1:], rows, run.steps, strict=True):
        is_fine = step.state in (StepState.WHOLE, StepState.COMMITTED)
        say(line if is_fine else painted(line, "yellow"))
        if is_narrow and row[-1]:
            say(painted(f"      {row[-1]}", "dim"))
    say()
    say(painted(_total(run), "bold"))
    if run.remark is not None:
        say(painted(one_line(run.remark), "yellow"))


def _row(step: RunStep, run: Run, now: float) -> tuple[str, ...]:
    files = step.files
    own = bytes_text(files.num_bytes - files.num_bytes_shared)
    age = age_text(now - step.saved_at)
    notes = ", ".join(_notes(step, run))
    return step.name, step.state.value, age, bytes_text(files.num_bytes), own, notes


def _notes(step: RunStep, run: Run) -> Iterator[str]:
    if step.name == run.latest:
        yield "latest"
    yield from step.notes
    if step.shared_with:
        nearest = step.shared_with[::-1]
        names = ", ".join(nearest[:_MOST_NAMED])
        more = len(nearest) - _MOST_NAMED
        yield f"shares with {names}{f' and {more} more' if more > 0 else ''}"


def _total(run: Run) -> str:
    """Steps and bytes; a file that several steps share counts once."""
    own = sum(step.files.num_bytes - step.files.num_bytes_shared for step in run.steps)
    shared = sum(size for _, _, size in {inode for step in run.steps for inode in step.inodes})
    latest = "none is committed" if run.latest is None else f"latest {run.latest}"
    return f"{counted(len(run.steps), 'step')}, {bytes_text(own + shared)}, {latest}"


def age_text(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _as_json(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.root),
        "latest": run.latest,
        "remark": run.remark,
        "steps": [
            {
                "step": step.name,
                "path": str(step.folder),
                "state": step.state.value,
                "saved_at": step.saved_at,
                "num_bytes": step.files.num_bytes,
                "num_bytes_shared": step.files.num_bytes_shared,
                "shared_with": step.shared_with,
                "notes": step.notes,
            }
            for step in run.steps
        ],
    }
