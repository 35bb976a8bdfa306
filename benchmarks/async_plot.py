"""The picture of saves behind a training."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench_goals import Report

_COLORS = {"ours": "#1b7837", "sync": "#444444"}
_OTHER = "#9970ab"


def draw_async(report: Report, path: Path) -> None:
    """How long training stands still, until all is captured, and what a save costs it."""
    entries = [entry for entry in report["contestants"] if entry["blocked"] and not entry["failed"]]
    waits = [entry for entry in entries if entry["family"] != "sync"]
    trained = [entry for entry in entries if entry["lost"]]
    figure, (blocked, captured, lost) = plt.subplots(
        1, 3, figsize=(17, 0.8 + 0.42 * len(entries)), layout="constrained"
    )
    for axes, key, title in (
        (blocked, "blocked", "blocked, of one memcpy"),
        (captured, "captured", "until the state may change, of one memcpy"),
    ):
        values = [
            median(own / copy for own, copy in zip(entry[key], entry["memcpy"], strict=False))
            for entry in waits
        ]
        _bars(axes, waits, values, title)
        axes.axvline(1.25, color="tab:red", linestyle="--", linewidth=0.8)
    values = [median(entry["lost"]) for entry in trained]
    _bars(lost, trained, values, "training lost to one save, s")
    figure.suptitle(f"{report['title']} (dashed: the goal)", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: Axes, entries: list[Report], values: list[float], title: str) -> None:
    colors = [_COLORS.get(entry["family"], _OTHER) for entry in entries]
    bars = axes.barh([entry["name"] for entry in entries], values, color=colors)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
