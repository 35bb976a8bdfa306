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


def absent(*records: Record | None, **options: Any) -> dict[int, Absence] | None:
    """Who has not come; None while the others wait."""
    verdict = concluded(*records, **options)
    return None if verdict is None else dict(verdict.absent)


def gather(state: State, number: int = 5) -> Record:
    return Record(number, GATHER, state=state)


OUT = gather(OUTSIDE)
GATHERING: Any = {"step": OUT, "payload": True}


def test_an_agreement_holds_as_soon_as_all_have_come() -> None:
    other = Record(5, "'commit'", "b", state=OUTSIDE)
    verdict = concluded(STEP, other)
    assert verdict == Verdict("'commit'", {}, {0: "a", 1: "b"}, {}, is_lost=False)
    assert verdict is not None
    assert verdict.present == [0, 1]
    # One that is a step ahead had said what it brought.
    assert concluded(STEP, Record(6, "'next'", "x", last_value="b")) == verdict


def test_a_rank_inside_a_gather_has_time_to_come_back() -> None:
    for late, expected in enumerate((None, None, {1: Absence.INSIDE})):
        assert absent(OUT, gather(INSIDE), late=late, **GATHERING) == expected


def test_a_gather_that_nobody_has_ended_is_made_up_for() -> None:
    verdict = concluded(OUT, OUT, **GATHERING)
    assert verdict is not None
    assert (verdict.absent, verdict.is_lost) == ({}, False)


@pytest.mark.parametrize("ahead", [gather(DONE), Record(6, "'next'")])
def test_a_gather_that_some_have_ended_is_lost_for_the_others(ahead: Record) -> None:
    verdict = concluded(OUT, ahead, **GATHERING)
    assert verdict is not None
    assert (verdict.absent, verdict.is_lost) == ({}, True)


def test_the_one_that_is_frozen_is_told_from_those_that_went_on() -> None:
    records = (gather(DONE), OUT, gather(INSIDE), Record(6, "'next'"))
    assert absent(*records, late=2, **GATHERING) == {2: Absence.INSIDE}


def test_ranks_learn_one_after_the_other_that_a_tensor_is_lost() -> None:
    lost = Record(5, TENSORS, state=OUTSIDE)
    verdict = concluded(lost, Record(5, "'passing'", state=OUTSIDE), step=lost)
    assert verdict is not None
    assert (verdict.calls, verdict.is_lost) == ({}, True)
    for late, expected in ((1, None), (2, {1: Absence.LATE})):
        assert absent(lost, Record(4, "'preparing'"), step=lost, late=late) == expected
