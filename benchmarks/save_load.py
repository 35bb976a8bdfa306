"""Compare saving and loading with what the machine can do and with what others do.

python benchmarks/save_load.py                        # everything, about twelve minutes
python benchmarks/save_load.py --quick                # that it runs, in half a minute
python benchmarks/save_load.py --cases small durable --rounds 9
python benchmarks/save_load.py --cases async --async-mib 256
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import async_goals
import async_plot
import async_save
from bench_cases import CASES, Case, choose
from bench_contestants import Contestant, Memcpy, Raw, Safetensors, TorchSave
from bench_goals import judge
from bench_megatron import megatron_contestants, megatron_is_installed
from bench_ours import our_contestants
from bench_plot import draw
from bench_probes import environment
from bench_rounds import CaseRun
from bench_tables import case_table, goals_table
from bench_torch_dcp import dcp_contestants
from bench_world import World, start_world

_FREE_FACTOR = 3


def all_contestants() -> list[Contestant]:
    """In the order of the tables."""
    return [
        Raw(),
        Memcpy(),
        TorchSave(),
        Safetensors(),
        *dcp_contestants(),
        *megatron_contestants(),
        *our_contestants(),
    ]


def _say(text: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")


@dataclass(frozen=True, slots=True)
class Job:
    """The cases of one world size, run in its processes.

    Attributes:
        cases: with the share that each may take of the time that is left when it begins.
        end: ``time.monotonic()`` when all cases of all worlds should be done.
    """

    cases: Sequence[tuple[Case, float]]
    end: float

    def __call__(self, world: World, folder: Path) -> None:
        def say(text: str) -> None:
            if world.rank == 0:
                _say(text)

        for case, share in self.cases:
            now = time.monotonic()
            deadline = now + share * (self.end - now)
            run = CaseRun(case, world, folder, say)
            report = run.measure(all_contestants(), deadline)
            if world.rank == 0:
                (folder / f"{case.name}.json").write_text(json.dumps(report))


def run_cases(
    cases: Sequence[Case], folder: Path, end: float, *, weight_after: float
) -> dict[str, Any]:
    """Case name -> report, in the order of ``cases``.

    Args:
        cases: to run.
        folder: to work in.
        end: ``time.monotonic()`` when everything should be done.
        weight_after: of what else must be done by then.
    """
    left = sum(case.weight for case in cases) + weight_after
    for size in sorted({case.world_size for case in cases}):
        shares = []
        for case in cases:
            if case.world_size == size:
                shares.append((case, case.weight / left))
                left -= case.weight
        start_world(size, Job(shares, end), folder, group_of_one=megatron_is_installed())
    return {case.name: json.loads((folder / f"{case.name}.json").read_text()) for case in cases}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join([*(case.name for case in CASES), async_save.NAME])
    parser.add_argument("--cases", nargs="+", metavar="NAME", help=f"some of: {names}")
    parser.add_argument("--rounds", type=int, help="counted rounds of every case")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, one call")
    parser.add_argument("--async-mib", type=int, default=1024, help="size of the case async")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="no round begins after its time"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default --output")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="JSON and plot")
    arguments = parser.parse_args()
    names_given = arguments.cases
    arguments.behind = None
    if names_given is None or async_save.NAME in names_given:
        arguments.behind = async_save.async_case(
            max(16, arguments.async_mib), quick=arguments.quick, rounds=arguments.rounds
        )
    if names_given is not None:
        names_given = [name for name in names_given if name != async_save.NAME]
    try:
        arguments.cases = choose(names_given, quick=arguments.quick, rounds=arguments.rounds)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = _parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    arguments.output.mkdir(parents=True, exist_ok=True)
    place = arguments.folder or arguments.output
    place.mkdir(parents=True, exist_ok=True)
    behind: Case | None = arguments.behind
    everything = [*arguments.cases, *([] if behind is None else [behind])]
    needed = _FREE_FACTOR * max(case.num_bytes for case in everything)
    if shutil.disk_usage(place).free < needed:
        raise SystemExit(f"{place} needs {needed / 2**30:.0f} GiB of free space")
    begin = time.monotonic()
    # So that a run that is stopped removes its gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    end = begin + 60 * arguments.minutes
    async_report = None
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=place) as name:
        folder = Path(name).resolve()
        weight = 0.0 if behind is None else behind.weight
        cases = run_cases(arguments.cases, folder, end, weight_after=weight)
        if behind is not None:
            minutes = (end - time.monotonic()) / 60
            async_report = async_save.run_async(behind, folder, minutes, _say)
    verdicts = judge(cases)
    async_verdicts = [] if async_report is None else async_goals.async_verdicts(async_report)
    report = {
        "environment": environment(),
        "quick": arguments.quick,
        "seconds": time.monotonic() - begin,
        "cases": list(cases.values()),
        "goals": verdicts,
        "async": async_report,
        "async_goals": async_verdicts,
    }
    (arguments.output / "save_load.json").write_text(json.dumps(report, indent=2))
    if cases:
        draw(list(cases.values()), arguments.output / "save_load.png")
    for case in cases.values():
        console.print(case_table(case), "")
    if async_report is not None:
        async_plot.draw_async(async_report, arguments.output / "async_save.png")
        console.print(async_goals.async_table(async_report), "")
    if arguments.quick:
        console.print("A quick run: numbers mean nothing.")
    if verdicts and not arguments.quick:
        console.print(goals_table(verdicts), "")
    if async_verdicts and not arguments.quick:
        console.print(async_goals.goals_table(async_verdicts), "")
    console.print(
        f"{report['seconds']:.0f} s; save_load.json and the pictures are in {arguments.output}/"
    )


if __name__ == "__main__":
    main()
