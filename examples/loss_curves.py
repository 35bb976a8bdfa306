"""The loss curves of all runs on top of each other: in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from resume_checks import TOLERANCE_UNITS, relative_units
from training_runs import Run

mpl.use("Agg")  # a machine without a screen will do

HEIGHT = 12
MAX_WIDTH = 90


def _name(run: Run) -> str:
    return f"resumed with {run.tensor_parallel}"


def loss_chart(saved: Run, resumed: Sequence[Run]) -> Panel:
    """All curves in one chart; a cell with one curve only shows which."""
    last_step = max(saved.losses)
    width = min(last_step, MAX_WIDTH)
    low, high = min(saved.losses.values()), max(saved.losses.values())
    cells: dict[tuple[int, int], set[str]] = {}
    marks = {"\N{MIDDLE DOT}": saved} | {str(run.tensor_parallel): run for run in resumed}
    for mark, run in marks.items():
        for step, loss in run.losses.items():
            column = (step - 1) * width // last_step
            height = min(max((loss - low) / ((high - low) or 1.0), 0.0), 1.0)
            row = round((1 - height) * (HEIGHT - 1))
            cells.setdefault((row, column), set()).add(mark)
    chart = Text()
    for row in range(HEIGHT):
        value = high - (high - low) * row / (HEIGHT - 1)
        chart.append(f"{value:5.2f} ", style="dim")
        for column in range(width):
            chart.append_text(_cell(cells.get((row, column), set()), len(marks)))
        chart.append("\n")
    # The save sits between two columns; its mark is under the last step before it.
    saved_at = (saved.iteration - 1) * width // last_step
    chart.append(" " * (6 + saved_at) + f"^ saved after step {saved.iteration}\n", style="dim")
    chart.append("  \N{MIDDLE DOT} uninterrupted   ").append("#", style="bold green")
    chart.append(" all runs, on top of each other   ")
    chart.append(", ".join(str(run.tensor_parallel) for run in resumed), style="bold red")
    chart.append(" a resumed run that is elsewhere")
    return Panel(chart, title="Loss (nats a byte)", expand=False)


def _cell(marks: set[str], num_runs: int) -> Text:
    if not marks:
        return Text(" ")
    if len(marks) == num_runs:
        return Text("#", style="bold green")
    if marks == {"\N{MIDDLE DOT}"}:
        return Text("\N{MIDDLE DOT}")
    return Text(max(marks - {"\N{MIDDLE DOT}"}), style="bold red")


def loss_table(saved: Run, resumed: Sequence[Run]) -> Table:
    """A few steps after the save, in full float32 precision."""
    table = Table(title="Losses after the save")
    table.add_column("step", justify="right")
    table.add_column("uninterrupted")
    for run in resumed:
        table.add_column(_name(run))
    after = [step for step in saved.losses if step > saved.iteration]
    stride = max(1, len(after) // 6)
    for step in sorted({*after[::stride], after[-1]}):
        expected = saved.losses[step]
        table.add_row(
            str(step),
            f"{expected:.8g}",
            *(_compared(run.losses.get(step, float("nan")), expected) for run in resumed),
        )
    return table


def _compared(loss: float, expected: float) -> str:
    if loss == expected:
        return f"{loss:.8g} [green]same bits[/]"
    return f"{loss:.8g} [yellow]{relative_units(loss, expected):.1f} units[/]"


def draw_losses(saved: Run, resumed: Sequence[Run], path: Path) -> None:
    """Write the curves, and below them how far apart they are, as a PNG."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = list(saved.losses)
    label = f"uninterrupted, {saved.tensor_parallel} ranks"
    above.plot(steps, list(saved.losses.values()), color="0.75", linewidth=6, label=label)
    for run, style in zip(resumed, ("-", "--", ":"), strict=False):
        label = f"{_name(run)} rank{'s' if run.tensor_parallel > 1 else ''}"
        losses = list(run.losses.values())
        (line,) = above.plot(list(run.losses), losses, style, linewidth=1.8, label=label)
        units = [
            relative_units(loss, saved.losses.get(step, float("nan")))
            for step, loss in run.losses.items()
        ]
        below.plot(list(run.losses), units, "o", markersize=3, color=line.get_color())
    for axes in (above, below):
        axes.axvline(saved.iteration, color="0.4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    above.annotate("saved", (saved.iteration, above.get_ylim()[1]), ha="right", va="top")
    above.set_ylabel("loss (nats a byte)")
    above.legend(frameon=False)
    below.axhline(TOLERANCE_UNITS, color="tab:red", linewidth=0.8)
    below.annotate("allowed", (steps[0], TOLERANCE_UNITS), color="tab:red", va="top")
    below.set_ylim(-1, TOLERANCE_UNITS * 1.15)
    below.set_ylabel("apart\n(float32 units)")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
