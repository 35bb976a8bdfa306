"""Who is measured in which round."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from runner import Case, Settings, SkippedError, Stage, Way, run_case
from world import WayFailedError, World


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


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
    report = run_case(case, Stage(World(), folder, Settings(), lambda _: None), seconds)
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
