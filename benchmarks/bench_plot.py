"""The picture: one panel a case and operation, one bar a contestant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench_goals import Report

_COLORS = {"raw": "#444444", "ours": "#1b7837"}
_OTHER = "#9970ab"
_COLUMNS = 4


def draw(cases: Sequence[Report], path: Path) -> None:
    """GB/s of everybody; the dashed line is raw."""
    panels = [
        (case, operation)
        for case in cases
        for operation in case["measures"]
        if any(entry["seconds"][operation] for entry in case["contestants"])
    ]
    rows = max(1, -(-len(panels) // _COLUMNS))
    figure, axes = plt.subplots(
        rows, _COLUMNS, figsize=(5 * _COLUMNS, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place, (case, operation) in zip(axes.flat, panels, strict=False):
        _panel(place, case, operation)
    figure.suptitle("Save and load: GB/s, median of interleaved rounds (dashed: raw)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(place: Axes, case: Report, operation: str) -> None:
    # Copying small tensors is so fast that the other bars would vanish; the table has it.
    entries = [
        entry
        for entry in case["contestants"]
        if entry["seconds"][operation] and entry["family"] != "memcpy"
    ]
    names = [entry["name"] for entry in entries]
    speeds = [case["num_bytes"] / median(entry["seconds"][operation]) / 1e9 for entry in entries]
    colors = [_COLORS.get(entry["family"], _OTHER) for entry in entries]
    bars = place.barh(names, speeds, color=colors)
    place.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    place.invert_yaxis()
    place.margins(x=0.15)
    place.set_title(f"{operation}: {case['title']}", fontsize=8)
    place.tick_params(labelsize=7)
    if "raw" in names:
        place.axvline(speeds[names.index("raw")], color="#444444", linestyle="--", linewidth=0.8)
