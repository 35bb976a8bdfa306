"""A picture of how one fused weight is cut: by the run that saved it and by those that loaded it.

Every rank keeps its rows of gate and its rows of up as one weight. The shade says which of the
saving ranks the rows come from, so one sees where each loading rank finds its part.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from training_runs import Run

KEY = "layers.mlp.{}.weight"
PARTS = ("gate", "up")
LINES_PER_PART = 8
COLUMN_WIDTH = 19
# Shade and colour, so that the picture can be read without colours too.
STYLES = (("\N{LIGHT SHADE}", "cyan"), ("\N{DARK SHADE}", "magenta"))


def cut_picture(saved: Run, resumed: Sequence[Run]) -> Panel:
    """The weight of layer 0, as each run's ranks hold it and as it lies in the checkpoint."""
    grid = Table.grid(padding=(0, 2))
    titles, columns = ["in the checkpoint"], [_global_column(saved)]
    for word, run in [("saved by", saved), *(("loaded by", run) for run in resumed)]:
        number = run.tensor_parallel
        titles.append(f"{word} {number} rank{'s' if number > 1 else ''}")
        columns.append(_ranks_column(run, saved))
    titles[0], titles[1], columns[0], columns[1] = titles[1], titles[0], columns[1], columns[0]
    for _ in columns:
        grid.add_column(width=COLUMN_WIDTH)
    grid.add_row(*(Text(title, style="bold") for title in titles))
    grid.add_row(*columns)
    grid.add_row("")
    legend = Text()
    for rank in range(saved.tensor_parallel):
        legend.append_text(_fill(rank, 3)).append(f" saved by rank {rank}   ")
    legend.append("numbers are rows of the global gate and up")
    outer = Table.grid()
    outer.add_row(grid)
    outer.add_row(legend)
    return Panel(outer, title="One fused gate-up weight (layer 0), cut and cut again", expand=False)


def _ranks_column(run: Run, saved: Run) -> Text:
    column = Text()
    for rank in range(run.tensor_parallel):
        column.append(f"rank {rank}\n", style="underline")
        for part in PARTS:
            for first, last in _rows(run, part, rank):
                column.append_text(_block(part, first, last, saved))
    return column


def _global_column(saved: Run) -> Text:
    column = Text()
    for part in PARTS:
        column.append(KEY.format(part).removesuffix(".weight") + "\n", style="underline")
        column.append_text(_block(part, 0, _num_rows(saved, part), saved))
    return column


def _block(part: str, first: int, last: int, saved: Run) -> Text:
    """Rows ``first .. last``, one line for each few of them."""
    rows_per_line = max(1, _num_rows(saved, part) // LINES_PER_PART)
    block = Text()
    for line, row in enumerate(range(first, last, rows_per_line)):
        label = f" {part} {first}:{last} " if line == 0 else ""
        block.append(label)
        block.append_text(_fill(_saved_by(saved, part, row), COLUMN_WIDTH - len(label)))
        block.append("\n")
    return block


def _fill(rank: int, width: int) -> Text:
    shade, colour = STYLES[rank % len(STYLES)]
    return Text(shade * width, style=colour)


def _rows(run: Run, part: str, rank: int) -> list[tuple[int, int]]:
    """Rows of layer 0 that a rank holds."""
    return [
        (shard["offset"][1], shard["offset"][1] + shard["shape"][1])
        for shard in run.shards[KEY.format(part)]
        if shard["rank"] == rank and shard["offset"][0] == 0
    ]


def _num_rows(run: Run, part: str) -> int:
    return max(last for rank in range(run.tensor_parallel) for _, last in _rows(run, part, rank))


def _saved_by(saved: Run, part: str, row: int) -> int:
    for rank in range(saved.tensor_parallel):
        if any(first <= row < last for first, last in _rows(saved, part, rank)):
            return rank
    raise ValueError(f"no rank saved row {row} of {part}")
