"""What saves behind a training must reach, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from async_contestants import dcp_name, our_name
from bench_goals import MIB, Report

_BLOCKED_OF_MEMCPY = 1.25
_BLOCKED_SECONDS = 0.020
_BACKGROUND_OF_SYNCHRONOUS = 0.8
_EXTRA_BYTES = 160 * MIB
_NOISE = 0.95
"""Two that do the same thing come out so far apart."""


def async_table(report: Report) -> Group:
    """A row a contestant."""
    rounds = max((len(entry["blocked"]) for entry in report["contestants"]), default=0)
    table = Table(
        title=report["title"],
        caption=f"{rounds} rounds; medians; x memcpy: of one copy of the state just before",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in (
        "blocked ms",
        "x memcpy",
        "captured x memcpy",
        "in all s",
        "behind GB/s",
        "first blocked ms",
        "MiB extra",
        "in training s",
        "step speed",
        "training lost s",
    ):
        table.add_column(name, justify="right")
    notes = []
    for entry in report["contestants"]:
        if entry["failed"]:
            notes.append(f"[red]{entry['name']} failed:[/] {escape(entry['failed'])}")
            continue
        style = "bold" if entry["family"] == "ours" else ""
        table.add_row(entry["name"], *_cells(report, entry), style=style)
    notes += [f"[dim]{name}: {why}[/]" for name, why in report["left_out"].items()]
    return Group(table, *notes)


def _cells(report: Report, entry: Report) -> list[str]:
    if not entry["blocked"]:
        return ["-"] * 10
    behind = [total - capt for total, capt in zip(entry["total"], entry["captured"], strict=True)]
    peak = entry["peak_bytes"]
    return [
        f"{1000 * median(entry['blocked']):.1f}",
        f"{_of_memcpy(entry, 'blocked'):.2f}x",
        f"{_of_memcpy(entry, 'captured'):.2f}x",
        f"{median(entry['total']):.2f}",
        "-" if entry["family"] == "sync" else f"{report['num_bytes'] / median(behind) / 1e9:.2f}",
        f"{1000 * entry['first_blocked']:.0f}",
        "n/a" if peak is None else f"{peak / MIB:.0f}",
        f"{median(entry['in_flight']):.2f}" if entry["in_flight"] else "-",
        f"{100 * median(entry['slowed']):.0f} %" if entry["slowed"] else "-",
        f"{median(entry['lost']):.2f}" if entry["lost"] else "-",
    ]


def async_verdicts(report: Report) -> list[dict[str, Any]]:
    """Plain values, for the table and JSON: what, goal, found, verdict."""
    entries = {e["name"]: e for e in report["contestants"] if e["blocked"] and not e["failed"]}
    verdicts = []
    for worker in ("thread", "process"):
        copy = entries.get(our_name("copy", worker=worker))
        behind = entries.get(our_name("background", worker=worker))
        if copy is None or behind is None:
            continue
        verdicts += _own_verdicts(report, copy, behind, entries.get("ours, synchronous save"))
    copy, behind = entries.get(our_name("copy")), entries.get(our_name("background"))
    if copy is not None and behind is not None:
        verdicts += _comparisons(entries, copy, behind)
    return verdicts


def _own_verdicts(
    report: Report, copy: Report, behind: Report, synchronous: Report | None
) -> list[dict[str, Any]]:
    limit = _BLOCKED_OF_MEMCPY
    verdicts = [
        _at_most(f"{copy['name']}: blocked, of a memcpy", _of_memcpy(copy, "blocked"), limit),
        _at_most(
            f"{behind['name']}: blocked",
            median(behind["blocked"]),
            _BLOCKED_SECONDS,
            lambda seconds: f"{1000 * seconds:.1f} ms",
        ),
        _at_most(f"{behind['name']}: captured, of a memcpy", _of_memcpy(behind, "captured"), limit),
    ]
    for entry in (copy, behind):
        if synchronous is not None:
            rest = [t - c for t, c in zip(entry["total"], entry["captured"], strict=True)]
            ratio = _ratio(synchronous["total"], rest)
            verdicts.append(
                _at_least(
                    f"{entry['name']}: speed behind, of the synchronous save",
                    ratio,
                    _BACKGROUND_OF_SYNCHRONOUS,
                )
            )
        if entry["peak_bytes"] is not None:
            verdicts.append(
                _at_most(
                    f"{entry['name']}: memory beyond the state",
                    entry["peak_bytes"],
                    report["num_bytes"] + _EXTRA_BYTES,
                    lambda size: f"{size / MIB:.0f} MiB",
                )
            )
    return verdicts


def _comparisons(
    entries: Mapping[str, Report], copy: Report, behind: Report
) -> list[dict[str, Any]]:
    """Like with like: those that copy first with ours that does, the others with the other."""
    verdicts = []
    for name, other in entries.items():
        if other["family"] in ("ours", "sync"):
            continue
        if other["copies_first"]:
            ratio = _ratio(other["blocked"], copy["blocked"])
            verdicts.append(_not_slower(f"{copy['name']}: blocked, {name} / ours", ratio))
            continue
        ratio = _ratio(other["blocked"], behind["blocked"])
        what = f"{behind['name']}: blocked, {name} / ours"
        # A thousandth of a second more or less is nothing to a training.
        near = median(behind["blocked"]) <= median(other["blocked"]) + _BLOCKED_SECONDS / 10
        verdicts.append(_not_slower(what, ratio, anyway=near))
        ratio = _ratio(other["captured"], behind["captured"])
        verdicts.append(_not_slower(f"{behind['name']}: captured, {name} / ours", ratio))
    plain = entries.get(dcp_name("thread", background=False))
    if plain is not None and plain["lost"] and copy["lost"]:
        found = f"{median(copy['lost']):.2f} s, DCP {median(plain['lost']):.2f} s"
        what = f"{copy['name']}: training lost to a save"
        verdicts.append(
            {"what": what, "goal": "stated", "found": found, "verdict": "stated", "value": None}
        )
    return verdicts


def goals_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """A row a goal."""
    table = Table(
        title="Goals of saves behind a training",
        title_justify="left",
        caption=f"ratios: medians over the rounds; 'not slower' allows for {1 - _NOISE:.0%} noise",
    )
    for name in ("", "goal", "found", "verdict"):
        table.add_column(name)
    styles = {"pass": "green", "falls short": "bold red", "stated": "dim"}
    for verdict in verdicts:
        style = styles[verdict["verdict"]]
        table.add_row(
            verdict["what"], verdict["goal"], verdict["found"], f"[{style}]{verdict['verdict']}[/]"
        )
    return table


def _of_memcpy(entry: Report, what: str) -> float:
    return _ratio(entry[what], entry["memcpy"])


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=False))


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _at_most(what: str, value: float, limit: float, text: Any = _times) -> dict[str, Any]:
    return _verdict(what, f"<= {text(limit)}", text(value), value, reached=value <= limit)


def _at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return _verdict(what, f">= {limit:g}x", _times(value), value, reached=value >= limit)


def _not_slower(what: str, value: float, *, anyway: bool = False) -> dict[str, Any]:
    reached = anyway or value >= _NOISE
    return _verdict(what, "not slower", _times(value), value, reached=reached)


def _verdict(what: str, goal: str, found: str, value: float, *, reached: bool) -> dict[str, Any]:
    verdict = "pass" if reached else "falls short"
    return {"what": what, "goal": goal, "found": found, "verdict": verdict, "value": value}
