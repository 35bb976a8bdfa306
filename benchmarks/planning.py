"""What planning costs as ranks grow: exchange, coverage, save plan, index, load plan.

python benchmarks/planning.py            # to 16,384 ranks; torch DCP to 1,024; a few minutes
python benchmarks/planning.py --quick    # that it runs

All ranks are simulated in one process: every rank's table is made, and one rank plans with all of
them, as each rank of a real job does. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from plan_cached import CachedSave, measure_cached
from plan_growth import Growth, measure_dcp, measure_ours
from plan_plot import draw

T = TypeVar("T")

RANKS = (64, 256, 1024, 4096, 16384)
TENSORS = 1000
DCP_RANKS = (64, 256, 1024)
SMALL_RANKS = 100_000
SMALL_TENSORS = 10
GOAL_RANKS = 1024


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few ranks, few tensors")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="JSON and plot")
    return parser.parse_args()


def main() -> None:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    arguments.output.mkdir(parents=True, exist_ok=True)
    ranks, dcp_ranks, tensors = (
        ((64, 128), (64,), 50) if arguments.quick else (RANKS, DCP_RANKS, TENSORS)
    )
    ours = [
        _said(console, f"{n:,} ranks x {tensors:,} tensors", measure_ours, n, tensors)
        for n in ranks
    ]
    if not arguments.quick:
        title = f"{SMALL_RANKS:,} ranks x {SMALL_TENSORS} tensors"
        ours.append(_said(console, title, measure_ours, SMALL_RANKS, SMALL_TENSORS))
    theirs = [
        _said(console, f"torch DCP, {n:,} ranks x {tensors:,} tensors", measure_dcp, n, tensors)
        for n in dcp_ranks
    ]
    cached = measure_cached(50 if arguments.quick else 5000)
    report = {
        "ours": [asdict(row) for row in ours],
        "torch_dcp": [asdict(row) for row in theirs],
        "cached": asdict(cached),
    }
    (arguments.output / "planning.json").write_text(json.dumps(report, indent=2))
    draw(ours, theirs, arguments.output / "planning.png")
    console.print(_growth_table("dist_checkpointing", ours), "")
    console.print(_growth_table("torch DCP", theirs), "")
    if arguments.quick:
        console.print("A quick run: numbers mean nothing.")
    else:
        console.print(_goals_table(ours, theirs, cached), "")
    console.print(f"planning.json and planning.png are in {arguments.output}/")


def _said(console: Console, title: str, work: Callable[[int, int], T], *numbers: int) -> T:
    begin = time.perf_counter()
    result = work(*numbers)
    console.print(f"{title}: {time.perf_counter() - begin:.0f} s", style="dim")
    return result


def _growth_table(title: str, rows: list[Growth]) -> Table:
    table = Table(title=title)
    for name in (
        "ranks",
        "tensors a rank",
        "exchanged, bytes a shard",
        "exchange s",
        "check + plan s",
        "index bytes",
        "load plan of a rank, s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.ranks:,}",
            f"{row.tensors:,}",
            f"{row.exchanged_bytes / row.ranks / row.tensors:.1f}",
            f"{row.exchange_seconds:.2f}",
            f"{row.plan_seconds:.2f}",
            f"{row.index_bytes:,}",
            "-" if row.load_plan_seconds is None else f"{row.load_plan_seconds:.3f}",
        )
    return table


def _goals_table(ours: list[Growth], theirs: list[Growth], cached: CachedSave) -> Table:
    own = {row.ranks: row for row in ours}
    dcp = {row.ranks: row for row in theirs}
    at_goal, smallest = own[GOAL_RANKS], own[RANKS[0]]
    seconds = at_goal.exchange_seconds + at_goal.plan_seconds
    dcp_seconds = dcp[GOAL_RANKS].exchange_seconds + dcp[GOAL_RANKS].plan_seconds
    load = max(row.load_plan_seconds or 0.0 for row in ours)
    models = [row for row in ours if row.tensors == TENSORS]
    shard = max(row.exchanged_bytes / row.ranks / row.tensors for row in models)
    table = Table(title="Goals", caption="on one core, best of three for what takes under a minute")
    for name in ("what", "goal", "found", ""):
        table.add_column(name)

    def add(what: str, goal: str, found: str, *, reached: bool) -> None:
        verdict = "[green]pass[/]" if reached else "[red]falls short[/]"
        table.add_row(what, goal, found, verdict)

    where = f"{GOAL_RANKS:,} ranks x {TENSORS:,} tensors"
    add(f"coverage and save plan, {where}", "<= 2 s", f"{seconds:.2f} s", reached=seconds <= 2)
    ratio = dcp_seconds / seconds
    add("the same, of torch DCP", ">= 20x", f"{ratio:.0f}x", reached=ratio >= 20)
    add(
        "load plan of a rank, any number of ranks", "<= 0.1 s", f"{load:.3f} s", reached=load <= 0.1
    )
    add(
        f"exchanged, a shard of {TENSORS:,} on a rank",
        "<= 16 bytes",
        f"{shard:.1f} bytes",
        reached=shard <= 16,
    )
    grown = at_goal.index_bytes / smallest.index_bytes
    add("index at 1,024 ranks, of that at 64", "1.00x", f"{grown:.2f}x", reached=grown <= 1)
    same = cached.seconds * 1000
    what = f"second save, {cached.tensors:,} tensors: planning"
    add(what, "<= 10 ms", f"{same:.1f} ms", reached=same <= 10)
    add(
        "exchanged then, in total a rank",
        "<= 64 bytes",
        f"{cached.exchanged_bytes} bytes",
        reached=cached.exchanged_bytes <= 64,
    )
    return table


if __name__ == "__main__":
    main()
