"""What the demo shows: tables, how a weight is cut, and the loss curves on top of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dist_checkpointing import Checkpoint
from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.filesystem.object_store import ObjectPath
from dist_checkpointing.tools.opening import count_files
from resume_checks import TOLERANCE_UNITS, Check, relative_units
from training_runs import Run

mpl.use("Agg")  # a machine without a screen will do

_GATE_UP = "layers.mlp.{}.weight"
_PARTS = ("gate", "up")
_LINES_PER_PART = 8
_COLUMN_WIDTH = 19
# Shade and color, so that the picture can be read without colors too.
_STYLES = (("\N{LIGHT SHADE}", "cyan"), ("\N{DARK SHADE}", "magenta"))
_CHART_HEIGHT = 12
_CHART_WIDTH = 90


def shape_text(shape: Sequence[int]) -> str:
    """``3 x 128``, or ``scalar``."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def saved_table(folder: Path | str, saved: Run) -> Table:
    """Every weight; the optimizer's moments, which are shaped alike, in one row each."""
    checkpoint = Checkpoint.open(folder)
    if isinstance(folder, str):
        place = ObjectPath.of(folder)
        sizes = [info.num_bytes for info in place.store.list_below(place.prefix)]
    else:
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    caption = f"{bytes_text(sum(sizes))} in {len(sizes)} files"
    table = Table(title="What was saved", caption=caption, expand=False)
    for name in ("key", "dtype", "global shape", f"each of {saved.tensor_parallel} ranks"):
        table.add_column(name, no_wrap=name == "key")
    table.add_column("chunks stored")
    table.add_column("bytes", justify="right")
    moments: dict[str, list[int]] = {}
    for key, tensor in sorted(checkpoint.items()):
        if key.startswith("optimizer."):
            moments.setdefault(key.split(".")[1], []).append(tensor.num_bytes)
            continue
        chunk = "pieces" if tensor.chunk_shape is None else f"of {shape_text(tensor.chunk_shape)}"
        shown = (tensor.dtype_name, shape_text(tensor.shape), _share(key, tensor.shape, saved))
        size = bytes_text(tensor.num_bytes)
        table.add_row(escape(key), *shown, f"{tensor.num_chunks} {chunk}", size)
    table.add_section()
    for name, own in moments.items():
        count, size = f"{len(own)} tensors", bytes_text(sum(own))
        table.add_row(f"optimizer.{name}.*", "", count, "as the weights", "as the weights", size)
    for name in checkpoint.objects:
        table.add_row(escape(name), "object", "", "the same one")
    table.add_row(", ".join(checkpoint.common), "common", "", "the same")
    return table


def shared_table(again: Mapping[int, Path]) -> Table:
    """How much of the checkpoints that resumed runs saved at once is shared with the first one."""
    table = Table(title="Saved again right after resuming, with the checkpoint as a base")
    for name in ("ranks", "values", "shared, not written", "of its own"):
        table.add_column(name, justify="right")
    for size, folder in again.items():
        values = sum(tensor.num_bytes for tensor in Checkpoint.open(folder).values())
        files = count_files(folder)
        own = files.num_bytes - files.num_bytes_shared
        table.add_row(str(size), *map(bytes_text, (values, files.num_bytes_shared, own)))
    return table


def _share(key: str, global_shape: Sequence[int], saved: Run) -> str:
    own = [tuple(shard["shape"]) for shard in saved.shards[key] if shard["rank"] == 0]
    whole = [1, *global_shape[1:]] if len(own) > 1 else global_shape
    text = f"{len(own)} times {shape_text(own[0])}" if len(own) > 1 else shape_text(own[0])
    return f"{text} (copy)" if own[0] == tuple(whole) else text


def check_table(checks: Sequence[Check]) -> Table:
    """What must hold, and what was found."""
    table = Table(title="Checks")
    for name in ("", "must hold", "found"):
        table.add_column(name, overflow="fold")
    for check in checks:
        mark = "[green]ok[/]" if check.holds else "[bold red]FAILED[/]"
        table.add_row(mark, escape(check.what), escape(check.found))
    return table


def cut_picture(saved: Run, resumed: Sequence[Run]) -> Panel:
    """The fused weight of layer 0, as each run's ranks hold it and as it lies in the checkpoint.

    Every rank keeps its rows of gate and its rows of up as one weight. The shade says which of the
    saving ranks the rows come from, so one sees where each loading rank finds its part.
    """
    in_checkpoint = Text()
    for part in _PARTS:
        in_checkpoint.append(f"{_GATE_UP.format(part).removesuffix('.weight')}\n")
        in_checkpoint.append_text(_block(part, 0, _num_rows(saved, part), saved))
    columns = {
        f"saved by {saved.tensor_parallel} ranks": _ranks_column(saved, saved),
        "in the checkpoint": in_checkpoint,
    }
    for run in resumed:
        plural = "s" if run.tensor_parallel > 1 else ""
        columns[f"loaded by {run.tensor_parallel} rank{plural}"] = _ranks_column(run, saved)
    grid = Table.grid(padding=(0, 2))
    for _ in columns:
        grid.add_column(width=_COLUMN_WIDTH)
    grid.add_row(*(Text(title, style="bold") for title in columns))
    grid.add_row(*columns.values())
    legend = Text("\n")
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
        for part in _PARTS:
            for first, last in _rows(run, part, rank):
                column.append_text(_block(part, first, last, saved))
    return column


def _block(part: str, first: int, last: int, saved: Run) -> Text:
    """Rows ``first .. last``, one line for each few of them."""
    block = Text()
    for row in range(first, last, max(1, _num_rows(saved, part) // _LINES_PER_PART)):
        label = f" {part} {first}:{last} " if row == first else ""
        (rank,) = (
            rank
            for rank in range(saved.tensor_parallel)
            if any(start <= row < stop for start, stop in _rows(saved, part, rank))
        )
        block.append(label).append_text(_fill(rank, _COLUMN_WIDTH - len(label))).append("\n")
    return block


def _fill(rank: int, width: int) -> Text:
    shade, color = _STYLES[rank % len(_STYLES)]
    return Text(shade * width, style=color)


def _rows(run: Run, part: str, rank: int) -> list[tuple[int, int]]:
    """Rows of layer 0 that a rank holds."""
    return [
        (shard["offset"][1], shard["offset"][1] + shard["shape"][1])
        for shard in run.shards[_GATE_UP.format(part)]
        if shard["rank"] == rank and shard["offset"][0] == 0
    ]


def _num_rows(run: Run, part: str) -> int:
    return max(last for rank in range(run.tensor_parallel) for _, last in _rows(run, part, rank))


def loss_chart(saved: Run, resumed: Sequence[Run]) -> Panel:
    """All curves in one chart; a cell with one curve only shows which."""
    last_step = max(saved.losses)
    width = min(last_step, _CHART_WIDTH)
    low, high = min(saved.losses.values()), max(saved.losses.values())
    cells: dict[tuple[int, int], set[str]] = {}
    marks = {"\N{MIDDLE DOT}": saved} | {str(run.tensor_parallel): run for run in resumed}
    for mark, run in marks.items():
        for step, loss in run.losses.items():
            height = min(max((loss - low) / ((high - low) or 1.0), 0.0), 1.0)
            row = round((1 - height) * (_CHART_HEIGHT - 1))
            cells.setdefault((row, (step - 1) * width // last_step), set()).add(mark)
    chart = Text()
    for row in range(_CHART_HEIGHT):
        value = high - (high - low) * row / (_CHART_HEIGHT - 1)
        chart.append(f"{value:5.2f} ", style="dim")
        for column in range(width):
            chart.append_text(_cell(cells.get((row, column), set()), len(marks)))
        chart.append("\n")
    # The save is between two columns; its mark is under the last step before it.
    saved_at = (saved.iteration - 1) * width // last_step
    chart.append(" " * (6 + saved_at) + f"^ saved after step {saved.iteration}\n", style="dim")
    chart.append("  \N{MIDDLE DOT} uninterrupted   ").append("#", style="bold green")
    chart.append(" all runs, on top of each other   ")
    chart.append(", ".join(str(run.tensor_parallel) for run in resumed), style="bold red")
    chart.append(" a resumed run that is elsewhere")
    return Panel(chart, title="Loss (nats a byte)", expand=False)


def _cell(marks: set[str], num_runs: int) -> Text:
    if len(marks) == num_runs:
        return Text("#", style="bold green")
    others = marks - {"\N{MIDDLE DOT}"}
    return Text(max(others), style="bold red") if others else Text(max(marks, default=" "))


def loss_table(saved: Run, resumed: Sequence[Run]) -> Table:
    """A few steps after the save, in full float32 precision."""
    table = Table(title="Losses after the save")
    table.add_column("step", justify="right")
    for name in ("uninterrupted", *(f"resumed with {run.tensor_parallel}" for run in resumed)):
        table.add_column(name)
    after = [step for step in saved.losses if step > saved.iteration]
    for step in sorted({*after[:: max(1, len(after) // 6)], after[-1]}):
        expected = saved.losses[step]
        losses = [run.losses.get(step, float("nan")) for run in resumed]
        table.add_row(str(step), f"{expected:.8g}", *(_compared(loss, expected) for loss in losses))
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
        label = f"resumed with {run.tensor_parallel}"
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
    below.set(ylabel="apart\n(float32 units)", xlabel="step")
    figure.savefig(path, dpi=120)
