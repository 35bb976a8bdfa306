"""The growth of planning with the number of ranks, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from plan_growth import Growth


def draw(ours: Sequence[Growth], theirs: Sequence[Growth], path: Path) -> None:
    """Seconds, bytes exchanged and bytes of the index over ranks, both axes logarithmic."""
    tensors = ours[0].tensors
    lines = (
        ("dist_checkpointing", [row for row in ours if row.tensors == tensors], "C0"),
        ("torch DCP", list(theirs), "C3"),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    titles = ("exchange, check and plan, s", "exchanged, bytes a shard", "index, bytes")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log")
        axis.grid(visible=True, alpha=0.3)
    for label, rows, color in lines:
        ranks = [row.ranks for row in rows]
        values = (
            [row.exchange_seconds + row.plan_seconds for row in rows],
            [row.exchanged_bytes / row.ranks / row.tensors for row in rows],
            [row.index_bytes for row in rows],
        )
        for axis, points in zip(axes, values, strict=True):
            axis.plot(ranks, points, "o-", color=color, label=label)
    load_plans = [(row.ranks, row.load_plan_seconds) for row in lines[0][1]]
    axes[0].plot(*zip(*load_plans, strict=True), "o--", color="C0", label="load plan of one rank")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Planning with {tensors:,} tensors a rank, on one core")
    figure.savefig(path, dpi=110)
    plt.close(figure)
