"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from bench_goals import MIB, Report, speed_ratio

_STYLES = {"pass": "green", "falls short": "bold red", "not measured": "dim"}


def case_table(case: Report) -> Group:
    """One case: a row a contestant."""
    entries = case["contestants"]
    rounds = max((len(s) for e in entries for s in e["seconds"].values()), default=0)
    by_name = {entry["name"]: entry for entry in entries}
    references = [name for name in ("raw", "DCP best") if name in by_name]
    settings = [f"{e['name']}: {e['detail']}" for e in entries if e["name"] == "DCP best"]
    calls = case["calls_a_round"]
    counted = (
        f"{rounds} rounds of {calls} call{'s' if calls > 1 else ''}" if rounds else "no rounds"
    )
    caption = "; ".join([f"{case['num_bytes'] / MIB:.4g} MiB", counted, *settings])
    table = Table(title=case["title"], caption=caption, title_justify="left")
    table.add_column("", no_wrap=True)
    for operation in case["measures"]:
        table.add_column(f"{operation} s", justify="right")
        table.add_column("GB/s", justify="right")
        for name in references:
            table.add_column(f"x {name}", justify="right")
    for operation in ("save", "load"):
        if any(operation in entry["peak_bytes"] for entry in entries):
            table.add_column(f"MiB extra {operation}", justify="right")
    table.add_column("files", justify="right")
    if "load" in case["measures"]:
        table.add_column("read / needed", justify="right")
    failures: list[str] = []
    for entry in entries:
        style = "bold" if entry["family"] == "ours" else ""
        if entry["failed"]:
            failures.append(f"[red]{entry['name']} failed:[/] {escape(entry['failed'])}")
            continue
        table.add_row(*_cells(case, entry, [by_name[name] for name in references]), style=style)
    return Group(table, *failures)


def _cells(case: Report, entry: Report, references: Sequence[Report]) -> list[str]:
    cells = [entry["name"]]
    for operation in case["measures"]:
        seconds = entry["seconds"][operation]
        if not seconds:
            cells += ["-"] * (2 + len(references))
            continue
        middle = median(seconds)
        cells += [f"{middle:.3f}", f"{case['num_bytes'] / middle / 1e9:.2f}"]
        for reference in references:
            ratio = speed_ratio(entry, reference, operation)
            cells.append("-" if ratio is None else f"{ratio:.2f}x")
    for operation in ("save", "load"):
        if operation in entry["peak_bytes"]:
            peak = entry["peak_bytes"][operation]
            cells.append("n/a" if peak is None else f"{peak / MIB:.0f}")
    cells.append(str(entry["num_files"]))
    if "load" in case["measures"]:
        read = entry["read_bytes"]
        cells.append("n/a (mapped)" if read is None else f"{read / entry['needed_bytes']:.3f}")
    return cells


def goals_table(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """A row a goal, a column a backend."""
    table = Table(
        title="Goals",
        title_justify="left",
        caption="ratios of speeds: the median over the rounds of one interleaved run",
    )
    table.add_column("")
    table.add_column("goal")
    backends = list(verdicts[0]["found"]) if verdicts else []
    for name in backends:
        table.add_column(name, no_wrap=True)
    for verdict in verdicts:
        found = [verdict["found"][name] for name in backends]
        table.add_row(
            verdict["what"],
            verdict["goal"],
            *(f"[{_STYLES[one['verdict']]}]{one['text']} {one['verdict']}[/]" for one in found),
        )
    return table
