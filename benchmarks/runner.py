"""Runs a case: all its ways in every round, A B C, B C A, C A B, ..."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from goals import Goal, unit_of
from world import WayFailedError, World

Values = Mapping[str, float]
"""Metric -> value. The last word of a metric is its unit: ``"save s"``, ``"load MiB"``."""

_LARGE_SHARE = 0.1
"""A peer whose calls take more than this part of the case's time is called once."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says.

    Attributes:
        tiny: Small sizes and one round: to see that everything runs.
        rounds: Counted rounds of every case; None: as the case says.
        loads: Loads of the case ``repeated-loads``.
        async_mib: Size of the state of the case ``async``.
        store: URL below which the case ``object-store`` works.
    """

    tiny: bool = False
    rounds: int | None = None
    loads: int = 100
    async_mib: int = 512
    store: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a case runs: its ranks, an empty folder, the settings, and a way to tell progress."""

    world: World
    folder: Path
    settings: Settings
    say: Callable[[str], None]


class SkippedError(Exception):
    """A way cannot be measured on this machine; the text says why. Raised on all ranks."""


class Way(ABC):
    """One way to do what the case is about: ours, a peer's, or the raw limit. Collective.

    Attributes:
        name: Name in tables, goals and JSON.
        family: "ours", "raw" or a peer's name; for colours and growth laws.
        detail: Its settings.
        point: Place on the horizontal axis, for cases that show growth.
    """

    name: str
    family: str
    detail: str = ""
    point: float | None = None

    def warm_up(self) -> Values:
        """Imports and first calls, not counted in rounds; returns what is measured only once."""
        return {}

    @abstractmethod
    def round(self) -> Values:
        """The values of one round."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        name: Name for ``--only``.
        title: What it is, for people.
        open: Makes the ways ready, on every rank.
        ranks: Processes that it needs.
        rounds: Counted rounds.
        seconds: About how long it takes: its share of the time of a run.
        goals: What should be found.
        planning: It belongs to ``make bench-planning``.
        by_name: It runs only if it is named.
        gib: Free disk space that it needs, in GiB.
    """

    name: str
    title: str
    open: Callable[[Stage], Sequence[Way]]
    ranks: int = 1
    rounds: int = 5
    seconds: float = 30.0
    goals: tuple[Goal, ...] = ()
    planning: bool = False
    by_name: bool = False
    gib: float = 1.0


@dataclass(slots=True)
class Result:
    """What one way did.

    Attributes:
        name: Name of the way.
        family: Family of the way.
        detail: Settings of the way.
        point: Place of the way on the horizontal axis.
        once: Metric -> value, measured in the warm-up.
        rounds: Metric -> one value a round.
        failed: Why the way is out.
    """

    name: str
    family: str
    detail: str
    point: float | None
    once: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    failed: str | None = None


def run_case(case: Case, stage: Stage, seconds: float) -> dict[str, Any]:
    """The report of a case, as plain values.

    Args:
        case: What to measure.
        stage: Where.
        seconds: No round begins after so long, but for what the warm-up did not measure.
    """
    run = _Run(case, stage, seconds)
    try:
        run.measure()
    finally:
        for way in run.ways:
            way.close()
    return {
        "name": case.name,
        "title": case.title,
        "ways": [asdict(result) for result in run.results.values()],
    }


class _Run:
    def __init__(self, case: Case, stage: Stage, seconds: float) -> None:
        self._case = case
        self._stage = stage
        self._seconds = seconds
        self._begin = time.monotonic()
        self.ways = list(case.open(stage))
        # Neither modules nor the objects of the other ways are for a collection to look through.
        gc.collect()
        gc.freeze()
        self.results = {
            way.name: Result(way.name, way.family, way.detail, way.point) for way in self.ways
        }
        self._longest = dict.fromkeys(self.results, 0.0)

    def measure(self) -> None:
        for way in self.ways:
            self._say(f"warm-up, {way.name}")
            self.results[way.name].once.update(self._guarded(way, way.warm_up))
        settings = self._stage.settings
        rounds = self._case.rounds if settings.rounds is None else settings.rounds
        for number in range(min(rounds, 1) if settings.tiny else rounds):
            names = self._stage.world.from_rank0(self._takers(number))
            if not names:
                break
            self._say(f"round {number + 1} of {rounds}, {len(names)} ways")
            first = number % len(names)
            by_name = {way.name: way for way in self.ways}
            for name in names[first:] + names[:first]:
                series = self.results[name].rounds
                for metric, value in self._guarded(by_name[name], by_name[name].round).items():
                    series.setdefault(metric, []).append(value)

    def _takers(self, number: int) -> list[str]:
        """Who takes part in the next round, in the order of the table."""
        late = time.monotonic() > self._begin + self._seconds
        large = _LARGE_SHARE * self._seconds
        return [
            name
            for name, result in self.results.items()
            if result.failed is None
            and (
                (not late and (result.family == "ours" or self._longest[name] <= large))
                or (number == 0 and not any(unit_of(metric) == "s" for metric in result.once))
            )
        ]

    def _guarded(self, way: Way, step: Callable[[], Values]) -> Values:
        result = self.results[way.name]
        if result.failed is not None:
            return {}
        try:
            values = step()
        except (WayFailedError, SkippedError) as error:
            result.failed = str(error)
            self._say(f"{way.name} is out: {error}")
            return {}
        seconds = sum(value for metric, value in values.items() if unit_of(metric) == "s")
        self._longest[way.name] = max(self._longest[way.name], seconds)
        return values

    def _say(self, text: str) -> None:
        if self._stage.world.rank == 0:
            self._stage.say(f"{self._case.name}: {text}")
