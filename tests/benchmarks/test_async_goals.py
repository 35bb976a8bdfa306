"""What the benchmark of saves behind a training makes of its numbers."""

from __future__ import annotations

from typing import Any

from async_goals import async_verdicts

MIB = 2**20


def entry(name: str, family: str, **changed: Any) -> dict[str, Any]:
    return {
        "name": name,
        "family": family,
        "copies_first": True,
        "memcpy": [0.1, 0.2, 0.1],
        "blocked": [0.11, 0.22, 0.11],
        "captured": [0.11, 0.22, 0.11],
        "total": [1.11, 1.22, 1.11],
        "lost": [0.5, 0.5, 0.5],
        "slowed": [0.5, 0.5, 0.5],
        "in_flight": [1.0, 1.0, 1.0],
        "peak_bytes": 1024 * MIB,
        "failed": None,
        **changed,
    }


BEHIND = {"blocked": [0.003] * 3, "copies_first": False}


def verdicts(*entries: dict[str, Any]) -> dict[str, str]:
    report = {"num_bytes": 1024 * MIB, "contestants": entries, "left_out": {}}
    return {verdict["what"]: verdict["verdict"] for verdict in async_verdicts(report)}


def ours(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    copy = entry("ours, copy", "ours", **changed)
    return copy, entry("ours, background", "ours", **BEHIND)


def test_all_goals_are_judged() -> None:
    synchronous = entry("ours, synchronous save", "sync", total=[1.0] * 3)
    plain = entry("DCP, thread", "dcp")
    staged = entry("DCP, thread, async staging", "dcp", **BEHIND)
    found = verdicts(*ours(), synchronous, plain, staged)
    stated = found.pop("ours, copy: training lost to a save")
    assert stated == "stated"
    assert set(found.values()) == {"pass"}
    assert len(found) == 3 + 2 * 2 + 1 + 2


def test_ratios_are_taken_in_each_round() -> None:
    """A round that was slow for everybody is no round in which we were slow."""
    slow_machine = {"memcpy": [0.1, 1.0, 0.1], "blocked": [0.11, 1.1, 0.11]}
    found = verdicts(*ours(**slow_machine))
    assert found["ours, copy: blocked, of a memcpy"] == "pass"


def test_what_falls_short_is_said() -> None:
    copy, behind = ours(blocked=[0.13, 0.26, 0.13], peak_bytes=1185 * MIB)
    behind |= {"blocked": [0.021] * 3, "captured": [0.13, 0.26, 0.13]}
    synchronous = entry("ours, synchronous save", "sync", total=[0.79] * 3)
    plain = entry("DCP, thread", "dcp")
    found = verdicts(copy, behind, synchronous, plain)
    assert found["ours, copy: blocked, of a memcpy"] == "falls short"
    assert found["ours, background: blocked"] == "falls short"
    assert found["ours, background: captured, of a memcpy"] == "falls short"
    assert found["ours, copy: speed behind, of the synchronous save"] == "falls short"
    assert found["ours, copy: memory beyond the state"] == "falls short"
    assert found["ours, copy: blocked, DCP, thread / ours"] == "falls short"


def test_who_failed_is_left_out() -> None:
    broken = entry("DCP, thread", "dcp", failed="RuntimeError: no")
    assert not any("DCP" in what for what in verdicts(*ours(), broken))
