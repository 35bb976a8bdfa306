"""The goals, and whether a backend reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from bench_cases import DCP_WAYS
from bench_ours import BACKENDS, Variant, contestant_name

MIB = 2**20

Report = Mapping[str, Any]
Verdict = Literal["pass", "falls short", "not measured"]


@dataclass(frozen=True, slots=True)
class Found:
    """One goal, one backend.

    Attributes:
        value: a ratio of speeds, bytes or a number; None if it was not measured.
        text: the value for people.
        verdict: about it.
    """

    value: float | None
    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class SpeedGoal:
    """So much faster than someone else.

    Attributes:
        case: name of the case.
        operation: "save" or "load".
        reference: contestants; the fastest of them counts.
        at_least: the ratio of speeds, median over rounds.
        variant: of our backend.
        stretch: would be nice, but is not asked for.
        only: the contestant that the goal is about, shown in the column of its backend.
    """

    case: str
    operation: str
    reference: tuple[str, ...]
    at_least: float
    variant: Variant = Variant.PLAIN
    stretch: bool = False
    only: str | None = None

    @property
    def what(self) -> str:
        if self.only is not None:
            return f"{self.operation} {self.case}, {self.only}, of {_fastest(self.reference)}"
        return f"{self.operation} {self.case}{self.variant.value}, of {_fastest(self.reference)}"

    @property
    def goal(self) -> str:
        return f">= {self.at_least:g}x" + (" (stretch)" if self.stretch else "")

    def check(self, cases: Mapping[str, Report], backend: tuple[str, int]) -> Found:
        entries = _entries(cases, self.case)
        if self.only is not None and contestant_name(backend) not in self.only:
            return _UNKNOWN
        ours = entries.get(self.only or contestant_name(backend, self.variant))
        others = [entries[name] for name in self.reference if name in entries]
        ratios = [speed_ratio(ours, other, self.operation) for other in others if ours]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            return _UNKNOWN
        value = min(known)
        return _found(value, f"{value:.2f}x", reached=value >= self.at_least)


@dataclass(frozen=True, slots=True)
class LimitGoal:
    """Not more than so much.

    Attributes:
        what: is limited.
        quantity: what to look up in a contestant's result.
        cases: in which; the worst of them counts.
        at_most: the limit.
        unit: bytes, files or a ratio are shown differently.
        variant: of our backend.
    """

    what: str
    quantity: Literal["peak", "files", "amplification"]
    cases: tuple[str, ...]
    at_most: float
    variant: Variant = Variant.PLAIN

    @property
    def goal(self) -> str:
        if self.quantity == "peak":
            return f"<= {self.at_most / MIB:g} MiB"
        return f"<= {self.at_most:g}"

    def check(self, cases: Mapping[str, Report], backend: tuple[str, int]) -> Found:
        name = contestant_name(backend, self.variant)
        entries = [_entries(cases, case).get(name) for case in self.cases or tuple(cases)]
        values = [value for entry in entries if entry for value in self._values(entry)]
        if not values:
            return _UNKNOWN
        worst = max(values)
        text = {
            "peak": f"{worst / MIB:.0f} MiB",
            "files": f"{worst:g}",
            "amplification": f"{worst:.3f}",
        }[self.quantity]
        return _found(worst, text, reached=worst <= self.at_most)

    def _values(self, entry: Report) -> list[float]:
        if self.quantity == "peak":
            return [value for value in entry["peak_bytes"].values() if value is not None]
        if self.quantity == "files":
            return [entry["num_files"]]
        read = entry["read_bytes"]
        return [] if read is None else [read / entry["needed_bytes"]]


Goal = SpeedGoal | LimitGoal

_RAW, _BEST, _DEFAULT = ("raw",), ("DCP best",), ("DCP default",)
_DCP = ("DCP best", "DCP default")
_PLAIN_CASES = ("one_fp32", "one_bf16", "small", "one_tensor", "two_ranks", "four_ranks")

GOALS: tuple[Goal, ...] = (
    SpeedGoal("one_fp32", "save", _RAW, 0.85),
    SpeedGoal("one_bf16", "save", _RAW, 0.85),
    SpeedGoal("one_fp32", "save", _BEST, 1.5),
    SpeedGoal("one_fp32", "save", _DEFAULT, 3),
    SpeedGoal("one_fp32", "save", _RAW, 0.75, Variant.CHECKSUM),
    SpeedGoal("two_ranks", "save", _RAW, 0.85),
    SpeedGoal("two_ranks", "save", _BEST, 1.2),
    SpeedGoal("durable", "save", _RAW, 0.85, Variant.CHECKSUM),
    SpeedGoal("one_fp32", "load", _RAW, 0.85),
    SpeedGoal("one_bf16", "load", _RAW, 0.85),
    SpeedGoal("two_ranks", "load", _RAW, 0.85),
    SpeedGoal("one_fp32", "load", _DCP, 2),
    SpeedGoal("two_ranks", "load", _BEST, 2),
    SpeedGoal("small", "save", _BEST, 10),
    SpeedGoal("small", "load", _BEST, 6),
    SpeedGoal("small", "save", ("safetensors",), 1, stretch=True),
    SpeedGoal("small", "load", ("safetensors",), 1, stretch=True),
    SpeedGoal("reshard_4_2_axis0", "load", _BEST, 1.5),
    SpeedGoal("reshard_4_2_axis1", "load", _BEST, 1.5),
    *(
        SpeedGoal(case, operation, _BEST, 1, only=contestant)
        for contestant in sorted(DCP_WAYS)
        for case in ("one_fp32", "small", "two_ranks")
        for operation in ("save", "load")
    ),
    LimitGoal(
        "bytes read / needed, 4 to 2 ranks, axis 0",
        "amplification",
        ("reshard_4_2_axis0",),
        1.05,
        Variant.PREAD,
    ),
    LimitGoal("memory beyond the state, no checksums", "peak", _PLAIN_CASES, 160 * MIB),
    LimitGoal(
        "the same with checksums, load verified",
        "peak",
        (*_PLAIN_CASES, "durable"),
        160 * MIB,
        Variant.CHECKSUM,
    ),
    LimitGoal("files of 5,000 tensors, two ranks", "files", ("small_two_ranks",), 39),
)

_UNKNOWN = Found(None, "-", "not measured")


def judge(cases: Mapping[str, Report]) -> list[dict[str, Any]]:
    """All goals for all backends that were measured: plain values, for tables and JSON."""
    present = {entry["name"] for case in cases.values() for entry in case["contestants"]}
    backends = [backend for backend in BACKENDS if contestant_name(backend) in present]
    verdicts = []
    for goal in GOALS:
        found = {contestant_name(backend): goal.check(cases, backend) for backend in backends}
        if all(one.verdict == "not measured" for one in found.values()):
            continue
        verdicts.append(
            {
                "what": goal.what,
                "goal": goal.goal,
                "found": {
                    name: {"value": one.value, "text": one.text, "verdict": one.verdict}
                    for name, one in found.items()
                },
            }
        )
    return verdicts


def speed_ratio(ours: Report, other: Report, operation: str) -> float | None:
    """How many times as fast as the other one: the median over rounds of each round's ratio."""
    pairs = list(zip(other["seconds"][operation], ours["seconds"][operation], strict=False))
    return median(their / own for their, own in pairs) if pairs else None


def _entries(cases: Mapping[str, Report], case: str) -> dict[str, Report]:
    if case not in cases:
        return {}
    return {entry["name"]: entry for entry in cases[case]["contestants"] if not entry["failed"]}


def _fastest(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the faster of {' and '.join(names)}"


def _found(value: float, text: str, *, reached: bool) -> Found:
    return Found(value, text, "pass" if reached else "falls short")
