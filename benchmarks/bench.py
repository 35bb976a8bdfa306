"""Compare with what the machine can do and with what others do, and say which goals are met.

python benchmarks/bench.py                             # saves and loads, 12 minutes
python benchmarks/bench.py --planning                  # plans, 5 minutes
python benchmarks/bench.py --only small-tensors async  # some cases; --list names them
python benchmarks/bench.py --store                     # an object store: Ceph, or the one of a URL
python benchmarks/bench.py --tiny                      # that all of it runs
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.multiprocessing.spawn import ProcessException

from cases import CASES
from goals import judge
from object_store import store_url
from probes import environment
from report import case_table, draw, goals_table, markdown
from runner import Case, Settings, Stage, run_case
from world import World, start_world

_BENCH_MINUTES, _PLANNING_MINUTES = 12.0, 5.0
_START_SECONDS = 4.0


def say(text: str) -> None:
    """A line of progress, with the time."""
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")


@dataclass(frozen=True, slots=True)
class Job:
    """One case, run in its processes; rank 0 writes ``report.json``."""

    name: str
    settings: Settings
    seconds: float

    def __call__(self, world: World, folder: Path) -> None:
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        stage = Stage(world, scratch, self.settings, say)
        report = run_case(CASES[self.name], stage, self.seconds)
        if world.rank == 0:
            (folder / "report.json").write_text(json.dumps(report))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run these cases")
    parser.add_argument("--list", action="store_true", help="name the cases, and end")
    parser.add_argument("--planning", action="store_true", help="the cases about planning")
    parser.add_argument(
        "--store", nargs="?", const="", metavar="URL", help="the object store of a URL, or Ceph"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes; numbers mean nothing")
    parser.add_argument("--rounds", type=int, help="counted rounds of every case")
    parser.add_argument("--loads", type=int, default=default.loads, help="of repeated-loads")
    parser.add_argument("--async-mib", type=int, default=default.async_mib, help="of async")
    parser.add_argument("--minutes", type=float, help="no round begins after its time")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default --output")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="for the results")
    arguments = parser.parse_args()
    if arguments.store is not None:
        arguments.only = [*(arguments.only or ()), "object-store"]
    unknown = sorted(set(arguments.only or ()) - CASES.keys())
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are: {', '.join(CASES)}")
    if arguments.minutes is None:
        arguments.minutes = _PLANNING_MINUTES if arguments.planning else _BENCH_MINUTES
    return arguments


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    if arguments.only:
        return [CASES[name] for name in dict.fromkeys(arguments.only)]
    return [c for c in CASES.values() if c.planning == arguments.planning and not c.by_name]


def run(cases: Sequence[Case], settings: Settings, folder: Path, minutes: float) -> dict[str, Any]:
    """Case name -> report; a case that breaks has a report without ways.

    Args:
        cases: What to measure.
        settings: How.
        folder: An existing folder on the disk to measure.
        minutes: What all cases together may take; each has its share.
    """
    end = time.monotonic() + 60 * minutes
    left = sum(case.seconds for case in cases)
    reports = {}
    for case in cases:
        # Alone a case takes what it takes in a whole run.
        seconds = min(end - time.monotonic(), 1.5 * left) * case.seconds / left - _START_SECONDS
        left -= case.seconds
        with tempfile.TemporaryDirectory(prefix=f"{case.name}-", dir=folder) as name:
            place = Path(name).resolve()
            try:
                if shutil.disk_usage(place).free < case.gib * 2**30 and not settings.tiny:
                    raise OSError(f"{folder} needs {case.gib:g} GiB of free space")
                start_world(case.ranks, Job(case.name, settings, seconds), place)
                reports[case.name] = json.loads((place / "report.json").read_text())
            except (OSError, ProcessException) as error:
                say(f"{case.name} broke: {error}")
                reports[case.name] = {"name": case.name, "title": case.title, "ways": []}
    return reports


def main() -> None:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.list:
        for case in CASES.values():
            console.print(f"{case.name:22} {case.title}", highlight=False)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder or arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    # So that a run that is stopped removes its gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    settings = Settings(arguments.tiny, arguments.rounds, arguments.loads, arguments.async_mib)
    begin = time.monotonic()
    with nullcontext("") if arguments.store is None else store_url(arguments.store) as url:
        settings = replace(settings, store=url)
        reports = run(_chosen(arguments), settings, folder, arguments.minutes)
    seconds = time.monotonic() - begin
    verdicts = [v for name, report in reports.items() for v in judge(report, CASES[name].goals)]
    result = {"environment": environment(), "settings": vars(arguments), "seconds": seconds}
    result |= {"cases": list(reports.values()), "goals": verdicts}
    stem = arguments.output / ("planning" if arguments.planning else "bench")
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1, default=str))
    stem.with_suffix(".md").write_text(markdown(reports, verdicts))
    draw(reports.values(), stem.with_suffix(".png"))
    for report in reports.values():
        console.print(case_table(report), "")
    console.print(goals_table(verdicts), "")
    if arguments.tiny:
        console.print("A tiny run: the numbers mean nothing.")
    console.print(f"{seconds:.0f} s; {stem}.json, .md and .png have all of it")
    if not all(report["ways"] for report in reports.values()):
        raise SystemExit("a case broke, see above")


if __name__ == "__main__":
    main()
