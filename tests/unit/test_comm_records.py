"""What follows from what ranks note about themselves; with real ranks: tests/distributed."""

from typing import Any

import pytest

from dist_checkpointing.comm.rank_failures import (
    GATHER,
    TENSORS,
    Absence,
    Record,
    State,
    Verdict,
    decide,
)

STEP = Record(5, "'commit'", "a")
INSIDE, OUTSIDE, DONE = State.INSIDE, State.OUTSIDE, State.DONE


def concluded(
    *records: Record | None,
    step: Record = STEP,
    late: int = 0,
    payload: bool = False,
    dead: frozenset[int] = frozenset(),
) -> Verdict | None:
    """``late``: 0 in time, 1 late, 2 too late."""
    return decide(
        {rank: record for rank, record in enumerate(records) if record is not None},
        step,
        len(records),
        has_payload=payload,
        is_late=late > 0,
        is_too_late=late > 1,
        dead=dead,
    )


def gather(state: State, number: int = 5) -> Record:
    return Record(number, GATHER, state=state)


def test_an_agreement_holds_as_soon_as_all_have_come() -> None:
    other = Record(5, "'commit'", "b", state=OUTSIDE)
    verdict = concluded(STEP, other)
    assert verdict == Verdict("'commit'", {}, {0: "a", 1: "b"}, {}, is_lost=False)
    assert verdict is not None
    assert verdict.present == [0, 1]


def test_a_rank_that_is_one_step_ahead_had_said_what_it_brought() -> None:
    verdict = concluded(STEP, Record(6, "'next'", "x", last_value="b"))
    assert verdict is not None
    assert verdict.values == {0: "a", 1: "b"}
    assert not verdict.is_lost


@pytest.mark.parametrize("missing", [None, Record(4, "'before'")])
def test_a_rank_that_has_not_come_has_time_until_the_deadline(missing: Record | None) -> None:
    assert concluded(STEP, missing) is None
    verdict = concluded(STEP, missing, late=1)
    assert verdict is not None
    assert verdict.absent == {1: Absence.LATE}
    assert verdict.values == {0: "a"}


def test_nobody_waits_for_the_dead() -> None:
    missing, step = Record(4, "'before'"), gather(OUTSIDE)
    assert concluded(STEP, missing, None, dead=frozenset({1})) is None  # rank 2 may be slow
    verdict = concluded(STEP, missing, STEP, dead=frozenset({1}))
    assert verdict is not None
    assert verdict.absent == {1: Absence.DEAD}
    verdict = concluded(step, gather(INSIDE), step=step, payload=True, dead=frozenset({1}))
    assert verdict is not None
    assert verdict.absent == {1: Absence.DEAD}


def test_a_rank_inside_a_gather_has_time_to_come_back() -> None:
    step = gather(OUTSIDE)
    for late in (0, 1):
        assert concluded(step, gather(INSIDE), step=step, late=late, payload=True) is None
    verdict = concluded(step, gather(INSIDE), step=step, late=2, payload=True)
    assert verdict is not None
    assert verdict.absent == {1: Absence.INSIDE}


def test_a_gather_that_nobody_has_ended_is_made_up_for() -> None:
    step = gather(OUTSIDE)
    verdict = concluded(step, step, step=step, payload=True)
    assert verdict is not None
    assert (verdict.absent, verdict.is_lost) == ({}, False)


@pytest.mark.parametrize("ahead", [gather(DONE), Record(6, "'next'")])
def test_a_gather_that_some_have_ended_is_lost_for_the_others(ahead: Record) -> None:
    step = gather(OUTSIDE)
    verdict = concluded(step, ahead, step=step, payload=True)
    assert verdict is not None
    assert (verdict.absent, verdict.is_lost) == ({}, True)


def test_the_one_that_is_frozen_is_told_from_those_that_went_on() -> None:
    step = gather(OUTSIDE)
    records = (gather(DONE), step, gather(INSIDE), Record(6, "'next'"))
    verdict = concluded(*records, step=step, late=2, payload=True)
    assert verdict is not None
    assert verdict.absent == {2: Absence.INSIDE}


def test_different_calls_are_told_when_all_have_said_what_they_call() -> None:
    own = Record(5, "'commit'", state=OUTSIDE, call="calls save")
    other = Record(5, GATHER, state=OUTSIDE, call="calls load")
    verdict = concluded(own, other)
    assert verdict is not None
    assert verdict.calls == {0: "calls save", 1: "calls load"}
    silent: Any = Record(5, GATHER)
    assert concluded(own, silent, late=1) is None
    verdict = concluded(own, silent, late=2)
    assert verdict is not None
    assert verdict.absent == {1: Absence.INSIDE}


def test_ranks_learn_one_after_the_other_that_a_tensor_is_lost() -> None:
    lost = Record(5, TENSORS, state=OUTSIDE)
    went_on = Record(5, "'passing'", state=OUTSIDE)
    verdict = concluded(lost, went_on, step=lost)
    assert verdict is not None
    assert (verdict.calls, verdict.is_lost) == ({}, True)
    before = Record(4, "'preparing'")
    assert concluded(lost, before, step=lost, late=1) is None
    verdict = concluded(lost, before, step=lost, late=2)
    assert verdict is not None
    assert verdict.absent == {1: Absence.LATE}
