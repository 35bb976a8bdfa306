"""Every case runs, in small, and every goal names what its case measures."""

from __future__ import annotations

import gc
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.serialization import get_crc32_options

import bench
from cases import CASES, SPEED_COLUMNS, SPEED_ROWS
from goals import Report, judge, series_of
from report import case_table, draw, goals_table, markdown
from runner import Case, Settings, Stage, run_case
from world import World

TINY = Settings(tiny=True, loads=5, store="memory://bench/tiny")
IN_PROCESS = [name for name, case in CASES.items() if case.ranks == 1 and name != "async"]
SPAWNED = [name for name in CASES if name not in IN_PROCESS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Peers warn about many things; nothing stays switched off or frozen."""
    before = get_crc32_options()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.unfreeze()
    assert get_crc32_options() == before


def stage(folder: Path, settings: Settings = TINY) -> Stage:
    return Stage(World(), folder, settings, lambda _: None)


def check(case: Case, report: Report) -> None:
    """Nobody fails, everything that goals speak of is measured, and all of it can be shown."""
    assert report["ways"]
    assert {way["name"]: way["failed"] for way in report["ways"] if way["failed"]} == {}
    measured = {metric for way in report["ways"] for metric in series_of(report, way["name"])}
    assert measured
    assert {goal.metric for goal in case.goals} <= measured
    verdicts = judge(json.loads(json.dumps(report)), case.goals)
    console = Console(record=True, width=400, file=io.StringIO())
    console.print(case_table(report), goals_table(verdicts))
    text = console.export_text()
    assert all(way["name"] in text for way in report["ways"])
    assert case.title in markdown({case.name: report}, verdicts)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_case_of_one_rank_runs(name: str, tmp_path: Path) -> None:
    check(CASES[name], run_case(CASES[name], stage(tmp_path), 60.0))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SPAWNED)
def test_a_case_of_many_ranks_runs(name: str, tmp_path: Path) -> None:
    reports = bench.run([CASES[name]], TINY, tmp_path, 5.0)
    check(CASES[name], reports[name])
    assert list(tmp_path.iterdir()) == []


def test_goals_name_ways_that_there_are(tmp_path: Path) -> None:
    """Also of sizes that a tiny run leaves out: planning does no work before the warm-up."""
    named = {(name, goal.way) for name, case in CASES.items() for goal in case.goals}
    named |= {(name, goal.of) for name, case in CASES.items() for goal in case.goals if goal.of}
    named |= {(case, way) for _, case, way, _ in SPEED_ROWS}
    named |= {("one-rank", reference) for reference, _ in SPEED_COLUMNS}
    for name, case in CASES.items():
        if case.ranks == 1 and name not in ("async", "conversions"):
            folder = tmp_path / name
            folder.mkdir()
            found = {
                way.name for way in case.open(stage(folder, replace(TINY, tiny=not case.planning)))
            }
            assert {way for where, way in named if where == name} <= found


def test_a_case_that_breaks_is_shown_and_the_others_run(tmp_path: Path) -> None:
    large = Case("bf16", "needs more space than there is", CASES["bf16"].open, gib=2.0**40)
    reports = bench.run([large, CASES["plan-again"]], Settings(rounds=1), tmp_path, 1.0)
    assert reports["bf16"]["ways"] == []
    assert reports["plan-again"]["ways"][0]["failed"] is None
    assert large.title in markdown(reports, [])


def test_the_picture_has_bars_and_lines(tmp_path: Path) -> None:
    way: dict[str, Any] = {"family": "ours", "detail": "", "once": {}, "failed": None}
    bars = [{**way, "name": name, "point": None, "rounds": {"save s": [1.0]}} for name in "ab"]
    lines = [
        {**way, "name": str(n), "point": n, "rounds": {"save plan s": [float(n)]}} for n in (1, 2)
    ]
    reports = [{"name": "a", "title": "", "ways": bars}, {"name": "b", "title": "", "ways": lines}]
    draw(reports, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000
