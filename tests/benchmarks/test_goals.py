"""What the benchmarks make of their numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from goals import as_fast, at_most, judge, law, predicted


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
