"""What was found: tables for the terminal and for docs/benchmarks.md, and one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from cases import SPEED_COLUMNS, SPEED_ROWS
from goals import Report, law, number, series_of, speed_ratio, summary, unit_of

mpl.use("Agg")  # a machine without a screen will do

_REFERENCES = ("raw", "safetensors", "DCP best")
_STYLES = {"met": "green", "not met": "bold red", "not measured": "dim"}
_COLORS = {"raw": "#444444", "sync": "#444444", "ours": "#1b7837"}
_OTHER = "#9970ab"
_COLUMNS = 4


def case_table(report: Report) -> Table:
    """A row a way, a column a metric; seconds also as speeds of the references."""
    rows = _cells(report)
    table = Table(title=report["title"], title_justify="left", caption=_caption(report))
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left", no_wrap=not place)
    ours = {entry["name"] for entry in report["ways"] if entry["family"] == "ours"}
    for row in rows[1:]:
        table.add_row(*map(escape, row), style="bold" if row[0] in ours else "")
    return table


def _cells(report: Report) -> list[list[str]]:
    """The table as text, its head first."""
    series = {entry["name"]: series_of(report, entry["name"]) for entry in report["ways"]}
    metrics = list(dict.fromkeys(metric for found in series.values() for metric in found))
    head, columns = [""], list[tuple[str, str | None]]()
    for metric in metrics:
        head.append(metric)
        columns.append((metric, None))
        for reference in _REFERENCES:
            if unit_of(metric) == "s" and metric in series.get(reference, ()):
                head.append(f"x {reference}")
                columns.append((metric, reference))
    rows = [head]
    for name, found in series.items():
        values = [
            speed_ratio(found.get(metric, ()), series[of][metric])
            if of is not None
            else summary(metric, found[metric])
            if metric in found
            else None
            for metric, of in columns
        ]
        if found:
            rows.append([name, *("-" if value is None else number(value) for value in values)])
    return rows


def _caption(report: Report) -> str:
    rounds = [len(v) for entry in report["ways"] for v in entry["rounds"].values()]
    lines = [f"{max(rounds, default=0)} rounds"]
    lines += [f"{e['name']} is out: {e['failed']}" for e in report["ways"] if e["failed"]]
    lines += [f"{e['name']}: {e['detail']}" for e in report["ways"] if e["name"] == "DCP best"]
    for family in dict.fromkeys(entry["family"] for entry in report["ways"]):
        for metric in ("save plan s", "peak MiB"):
            fitted = law(report, family, metric)
            if fitted is not None:
                lines.append(f"{metric}, {family}: {fitted[0]:.2g} x ranks ^ {fitted[1]:.2f}")
    return escape("; ".join(lines))


def goals_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """A row a goal."""
    table = Table(
        title="Goals",
        title_justify="left",
        caption="A / B: seconds or bytes of A divided by those of B, in each round; the median",
    )
    for name in ("case", "", "goal", "found", ""):
        table.add_column(name)
    for one in verdicts:
        verdict = f"[{_STYLES[one['verdict']]}]{one['verdict']}[/]"
        table.add_row(one["case"], one["what"], one["goal"], one["found"], verdict)
    return table


def markdown(reports: Mapping[str, Report], verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/benchmarks.md, all goals, and the table of each case."""
    parts = [_markdown(_speed_rows(reports))]
    head = ["case", "", "goal", "found", ""]
    keys = ("case", "what", "goal", "found", "verdict")
    parts.append(_markdown([head, *([one[key] for key in keys] for one in verdicts)]))
    parts += [f"{r['title']}; {_caption(r)}\n\n{_markdown(_cells(r))}" for r in reports.values()]
    return "\n\n".join(parts) + "\n"


def _speed_rows(reports: Mapping[str, Report]) -> list[list[str]]:
    rows = [["tensorstore backend", *(f"of {title}" for _, title in SPEED_COLUMNS)]]
    for label, case, way, metrics in SPEED_ROWS:
        if case not in reports:
            continue
        own, cells = series_of(reports[case], way), [label]
        for reference, _ in SPEED_COLUMNS:
            other = series_of(reports[case], reference)
            ratios = [speed_ratio(own.get(m, ()), other.get(m, ())) for m in metrics]
            found = ["-" if ratio is None else f"{ratio:.2g}" for ratio in ratios]
            cells.append("" if set(found) == {"-"} else " / ".join(found))
        rows.append(cells)
    return rows


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rest])


def draw(reports: Iterable[Report], path: Path) -> None:
    """A panel a case and metric of time: bars of the ways, or lines where something grows."""
    panels = [
        (report, metric)
        for report in reports
        for metric in dict.fromkeys(
            metric
            for entry in report["ways"]
            for metric in series_of(report, entry["name"])
            if metric in ("save s", "load s") or _is_drawn(report, metric)
        )
    ]
    rows = max(1, -(-len(panels) // _COLUMNS))
    figure = Figure(figsize=(5 * _COLUMNS, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    for place, (report, metric) in zip(axes.flat, panels, strict=False):
        place.set_title(f"{report['name']}: {metric}", fontsize=8)
        place.tick_params(labelsize=7)
        place.spines[["top", "right"]].set_visible(False)
        if any(entry["point"] for entry in report["ways"]):
            _lines(place, report, metric)
        else:
            _bars(place, report, metric)
    figure.suptitle("Medians of interleaved rounds; less is better")
    figure.savefig(path, dpi=100)


def _is_drawn(report: Report, metric: str) -> bool:
    if any(entry["point"] for entry in report["ways"]):
        return metric in ("save plan s", "load plan s", "peak MiB", "index bytes")
    return metric in ("a slice us", "grown MiB", "blocked / memcpy", "training lost s", "convert s")


def _bars(place: Axes, report: Report, metric: str) -> None:
    found = {e["name"]: series_of(report, e["name"]).get(metric) for e in report["ways"]}
    values = {name: summary(metric, series) for name, series in found.items() if series}
    families = {entry["name"]: entry["family"] for entry in report["ways"]}
    colors = [_COLORS.get(families[name], _OTHER) for name in values]
    bars = place.barh(list(values), list(values.values()), color=colors)
    place.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    place.invert_yaxis()
    place.margins(x=0.15)


def _lines(place: Axes, report: Report, metric: str) -> None:
    place.set(xscale="log", yscale="log", xlabel="ranks")
    for family in dict.fromkeys(entry["family"] for entry in report["ways"]):
        points = sorted(
            (entry["point"], summary(metric, series))
            for entry in report["ways"]
            if entry["family"] == family and entry["point"]
            for series in [series_of(report, entry["name"]).get(metric)]
            if series
        )
        if points:
            color = _COLORS.get(family, _OTHER)
            place.plot(*zip(*points, strict=True), "o-", color=color, label=family)
    place.legend(frameon=False, fontsize=7)
