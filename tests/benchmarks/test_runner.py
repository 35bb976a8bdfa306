"""Who is measured in which round."""

import gc
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.serialization import get_crc32_options

import bench
from cases import CASES, SPEED_COLUMNS, SPEED_ROWS
from goals import Report, as_fast, at_most, judge, law, predicted, series_of
from real_ranks import run_script
from report import case_table, goals_table, markdown
from runner import Case, Settings, SkippedError, Stage, Way, run_case
from world import WayFailedError, World


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Peers warn about many things; nothing stays switched off or frozen."""
    before = get_crc32_options()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.unfreeze()
    assert get_crc32_options() == before


class Told(Way):
    """A way whose calls take as long as it is told to claim, and that writes a diary."""

    def __init__(
        self, diary: list[str], name: str, once: Mapping[str, float], seconds: float = 0.0
    ) -> None:
        self.name, self.family = name, "ours" if name == "ours" else "peer"
        self._diary = diary
        self._once = once
        self._seconds = seconds

    def warm_up(self) -> Mapping[str, float]:
        return self._once

    def round(self) -> Mapping[str, float]:
        self._diary.append(self.name)
        return {"save s": self._seconds}

    def close(self) -> None:
        self._diary.append(f"{self.name} closed")


class Failing(Told):
    def round(self) -> Mapping[str, float]:
        raise WayFailedError("OSError: no space")


class TooLarge(Told):
    def warm_up(self) -> Mapping[str, float]:
        raise SkippedError("needs 17 GiB")


def diary_of(
    *ways: Way, diary: list[str], folder: Path, seconds: float = 60.0, rounds: int = 3
) -> dict[str, str | None]:
    case = Case("case", "", lambda _: ways, rounds=rounds)
    report = run_case(case, stage(folder, Settings()), seconds)
    diary[:] = [line for line in diary if "closed" not in line]
    return {way["name"]: way["failed"] for way in report["ways"]}


def test_each_round_begins_with_another_way(tmp_path: Path) -> None:
    diary: list[str] = []
    diary_of(*(Told(diary, name, {}) for name in "abc"), diary=diary, folder=tmp_path)
    assert "".join(diary) == "abcbcacab"


def test_a_slow_peer_is_called_once_and_ours_always(tmp_path: Path) -> None:
    diary: list[str] = []
    ways = [Told(diary, "ours", {}, 9.0), Told(diary, "raw", {}, 1.0), Told(diary, "dcp", {}, 9.0)]
    ways.append(Told(diary, "slow warm-up", {"save s": 9.0}))
    diary_of(*ways, diary=diary, folder=tmp_path)
    assert [diary.count(name) for name in ("ours", "raw", "dcp", "slow warm-up")] == [3, 3, 1, 0]


def test_out_of_time_only_what_was_not_measured_runs(tmp_path: Path) -> None:
    diary: list[str] = []
    ways = [Told(diary, "ours", {"save s": 1.0}), Told(diary, "raw", {"save MiB": 1.0})]
    diary_of(*ways, diary=diary, folder=tmp_path, seconds=-1.0)
    assert diary == ["raw"]


def test_who_fails_or_does_not_fit_is_out(tmp_path: Path) -> None:
    diary: list[str] = []
    ways = [Told(diary, "ours", {}), Failing(diary, "raw", {}), TooLarge(diary, "dcp", {})]
    failed = diary_of(*ways, diary=diary, folder=tmp_path)
    assert failed == {"ours": None, "raw": "OSError: no space", "dcp": "needs 17 GiB"}
    assert diary == ["ours"] * 3


def test_ways_are_closed_also_after_an_error(tmp_path: Path) -> None:
    class Broken(Told):
        def round(self) -> Mapping[str, float]:
            raise KeyError("a bug of the benchmark")

    diary: list[str] = []
    ways = [Told(diary, "ours", {}), Broken(diary, "raw", {})]
    case = Case("case", "", lambda _: ways)
    with pytest.raises(KeyError):
        run_case(case, Stage(World(), tmp_path, Settings(), lambda _: None), 60.0)
    assert diary[-2:] == ["ours closed", "raw closed"]


# Every case runs, in small, and every goal names what its case measures.


TINY = Settings(tiny=True, loads=5, store="memory://bench/tiny")
IN_PROCESS = [name for name, case in CASES.items() if case.ranks == 1 and name != "async"]
RANK = Path(__file__).with_name("cases_rank.py")


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
@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES.values()} - {1}))
def test_cases_of_many_ranks_run(ranks: int, tmp_path: Path) -> None:
    reports = run_script(ranks, RANK, reports=tmp_path, timeout_seconds=280)[0]
    assert reports
    for name, report in reports.items():
        check(CASES[name], report)


@pytest.mark.exhaustive
def test_a_case_runs_in_processes_of_its_own(tmp_path: Path) -> None:
    check(CASES["async"], bench.run([CASES["async"]], TINY, tmp_path, 1.0)["async"])
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


# What the benchmarks make of their numbers.


def way(name: str, **changed: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"name": name, "family": name, "detail": "", "point": None}
    return {**values, "once": {}, "failed": None, "rounds": {"save s": [1.0, 1.0, 1.0]}, **changed}


def report(*ways: dict[str, Any]) -> dict[str, Any]:
    return {"name": "case", "title": "A case", "ways": list(ways)}


def verdict(found: dict[str, Any], goal: Any) -> str:
    (one,) = judge(found, [goal])
    return str(one["verdict"])


def test_a_ratio_is_taken_in_each_round() -> None:
    """A round that was slow for everybody is no round in which we were slow."""
    found = report(
        way("ours", rounds={"save s": [0.11, 1.1, 0.11]}),
        way("raw", rounds={"save s": [0.1, 1.0, 0.1]}),
    )
    assert verdict(found, as_fast("ours", "save s", "raw", 0.9)) == "met"
    assert verdict(found, as_fast("ours", "save s", "raw", 0.92)) == "not met"
    assert verdict(found, as_fast("raw", "save s", "ours", 1.2)) == "not met"  # faster, not enough


def test_a_peer_with_fewer_rounds_is_compared_in_those_that_it_had() -> None:
    found = report(
        way("ours", rounds={"save s": [0.5, 9.0, 9.0]}),
        way("dcp", once={"save s": 2.0}, rounds={"save s": [1.0]}),
    )
    assert verdict(found, as_fast("ours", "save s", "dcp", 2)) == "met"


def test_of_memory_the_worst_round_counts() -> None:
    found = report(way("ours", rounds={"grown MiB": [0.0, 0.0, 9.0], "load s": [1.0, 1.0, 9.0]}))
    assert verdict(found, at_most("ours", "grown MiB", 8)) == "not met"
    assert verdict(found, at_most("ours", "load s", 1)) == "met"


def test_a_little_more_may_count_as_equal() -> None:
    found = report(
        way("ours", rounds={"blocked ms": [3.0]}), way("dcp", rounds={"blocked ms": [1.5]})
    )
    assert verdict(found, as_fast("ours", "blocked ms", "dcp", 0.95)) == "not met"
    assert verdict(found, as_fast("ours", "blocked ms", "dcp", 0.95, slack=2)) == "met"


def test_who_failed_or_is_not_there_is_not_measured() -> None:
    found = report(way("ours"), way("dcp", failed="RuntimeError: no"))
    assert verdict(found, as_fast("ours", "save s", "dcp")) == "not measured"
    assert verdict(found, as_fast("ours", "save s", "raw")) == "not measured"
    assert verdict(found, at_most("dcp", "save s", 9)) == "not measured"


def test_a_size_that_did_not_fit_is_judged_by_the_law_of_the_others() -> None:
    sizes = [
        way(f"{n}", family="ours", point=n, once={"peak MiB": 3.0 * n**1.5}, rounds={})
        for n in (4, 8, 16)
    ]
    large = way("64", family="ours", point=64, failed="too large", rounds={})
    found = report(*sizes, large)
    assert law(found, "ours", "peak MiB") == pytest.approx((3.0, 1.5))
    assert predicted(found, "64", "peak MiB") == pytest.approx(3.0 * math.pow(64, 1.5))
    (one,) = judge(found, [at_most("64", "peak MiB", 1600)])
    assert one["verdict"] == "met"
    assert "by the law" in one["found"]
    assert verdict(found, at_most("64", "peak MiB", 1500)) == "not met"
