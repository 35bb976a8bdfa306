"""The goals, and whether they are met: pure functions of a case's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a way should reach: made by ``at_most`` or ``as_fast``.

    Attributes:
        metric: Which of its values.
        way: Name of the way.
        limit: The value, or the ratio of speeds to another way.
        of: The other way; None: the value itself counts, and may not be above the limit.
        slack: A value that is above the other way's by this much at most counts as equal.
    """

    metric: str
    way: str
    limit: float
    of: str | None = None
    slack: float = 0.0


def at_most(way: str, metric: str, limit: float) -> Goal:
    """The value is not above a limit, in the unit of the metric."""
    return Goal(metric, way, limit)


def as_fast(way: str, metric: str, of: str, ratio: float = 1.0, slack: float = 0.0) -> Goal:
    """The seconds of another way, divided by those of this one, are not below a ratio."""
    return Goal(metric, way, ratio, of, slack)


def judge(report: Report, goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Each goal with what was found, as plain values: for tables and JSON."""
    return [{"case": report["name"], **_verdict(report, goal)} for goal in goals]


def _verdict(report: Report, goal: Goal) -> dict[str, Any]:
    unit = unit_of(goal.metric)
    words = goal.metric.removesuffix(f" {unit}")
    if goal.of is None:
        what = f"{words}: {goal.way}"
        text, value = f"<= {number(goal.limit)} {unit}".rstrip(), value_of(report, goal)
        by_law = value is None
        value = predicted(report, goal.way, goal.metric) if value is None else value
        met = value is not None and value <= goal.limit
        found = "" if value is None else f"{number(value)} {unit}".rstrip()
        found += " (by the law of the smaller ones)" if by_law and found else ""
    else:
        what, text = f"{words}: {goal.of} / {goal.way}", f">= {number(goal.limit)}"
        own, other = series_of(report, goal.way), series_of(report, goal.of)
        value = speed_ratio(own.get(goal.metric, ()), other.get(goal.metric, ()))
        met = value is not None and (value >= goal.limit or _is_near(own, other, goal))
        found = "" if value is None else number(value)
    verdict = "not measured" if value is None else "met" if met else "not met"
    return {"what": what, "goal": text, "found": found, "value": value, "verdict": verdict}


def _is_near(own: Mapping[str, Any], other: Mapping[str, Any], goal: Goal) -> bool:
    difference: float = median(own[goal.metric]) - median(other[goal.metric])
    return goal.slack > 0 and difference <= goal.slack


def series_of(report: Report, way: str) -> dict[str, list[float]]:
    """Metric -> values of a way that did not fail: one a round, or the one of the warm-up."""
    for entry in report["ways"]:
        if entry["name"] == way and not entry["failed"]:
            once = {metric: [value] for metric, value in entry["once"].items()}
            return once | {metric: values for metric, values in entry["rounds"].items() if values}
    return {}


def value_of(report: Report, goal: Goal) -> float | None:
    """The median of the rounds; of memory the largest."""
    values = series_of(report, goal.way).get(goal.metric)
    return None if not values else summary(goal.metric, values)


def summary(metric: str, values: Sequence[float]) -> float:
    """One number for the values of all rounds: of memory the largest, else the median."""
    return max(values) if unit_of(metric) == "MiB" else median(values)


def speed_ratio(own: Sequence[float], other: Sequence[float]) -> float | None:
    """How many times as fast: the median over the rounds of each round's ratio."""
    ratios = [b / a for a, b in zip(own, other, strict=False) if a > 0]
    return median(ratios) if ratios else None


def law(report: Report, family: str, metric: str) -> tuple[float, float] | None:
    """``value = factor * point ** exponent``, fitted to the ways of a family; None without two."""
    points = [
        (math.log(entry["point"]), math.log(summary(metric, values)))
        for entry in report["ways"]
        if entry["family"] == family and entry["point"]
        for values in [series_of(report, entry["name"]).get(metric, [])]
        if values and summary(metric, values) > 0
    ]
    if len({x for x, _ in points}) < 2:
        return None
    # The largest three: what is fixed does not hide what grows.
    points = sorted(points)[-3:]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in points)
    exponent /= sum((x - mean_x) ** 2 for x, _ in points)
    return math.exp(mean_y - exponent * mean_x), exponent


def predicted(report: Report, way: str, metric: str) -> float | None:
    """What the law of its family says about a way that was too large for the machine."""
    for entry in report["ways"]:
        if entry["name"] == way and entry["point"]:
            fitted = law(report, entry["family"], metric)
            return None if fitted is None else fitted[0] * entry["point"] ** fitted[1]
    return None


def unit_of(metric: str) -> str:
    """The last word of a metric; nothing for ratios and counts."""
    last = metric.rsplit(" ", 1)[-1]
    return last if last in ("s", "ms", "us", "MiB", "bytes") else ""


def number(value: float) -> str:
    """Three digits, and all digits of whole numbers."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
