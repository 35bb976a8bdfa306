"""What ranks note about themselves, and what follows for a step that the group could not end.

A collective tells nobody whom it waits for. So each rank notes in the key-value store of
torch.distributed which step it enters, and one rank concludes for all from these notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

GATHER: Final = "gathering values"
BROADCAST: Final = "broadcasting a value"
COMPARISON: Final = "comparing a number"
TENSORS: Final = "handing on tensors"
"""Label of a step that exists only on ranks on which handing on tensors has failed."""


def agreement(step: str) -> str:
    """The label of an agreement about a step."""
    return f"'{step}'"


def is_agreement(label: str) -> bool:
    """Whether it is that of an agreement."""
    return label.startswith("'")


class State(Enum):
    """Where a rank is in its step."""

    INSIDE = "it has entered, and maybe left without noting it"
    DONE = "it has what it wanted"
    OUTSIDE = "it could not end it with the group, and asks what to do"


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank notes about itself.

    Attributes:
        number: of the step, counted alike on all ranks.
        label: what the step is, the same on all ranks if they make the same call.
        value: what it brings, if that is small: a failure, a number.
        last_value: what it brought to the step before.
        state: where it is.
        call: which call of the user led here; only with ``State.OUTSIDE``.
    """

    number: int
    label: str
    value: Any = None
    last_value: Any = None
    state: State = State.INSIDE
    call: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks that are here believe about a step.

    Attributes:
        label: of the step.
        absent: ranks that did not come, or did not come back.
        values: of the other ranks.
        calls: what each rank does, if they do not do the same.
        is_lost: whether the step cannot be made up for, because some have what others lack.
    """

    label: str
    absent: tuple[int, ...]
    values: Mapping[int, Any]
    calls: Mapping[int, str]
    is_lost: bool

    @property
    def present(self) -> list[int]:
        """The ranks that are here."""
        return sorted(self.values)


def conclude(
    records: Mapping[int, Record],
    step: Record,
    world_size: int,
    *,
    has_payload: bool,
    is_late: bool,
    is_too_late: bool,
) -> Verdict | None:
    """What follows from the notes of all ranks; None if it is too early to say.

    Args:
        records: those that are there.
        step: the note of the rank that asks.
        world_size: number of ranks.
        has_payload: whether the step hands over more than its records say.
        is_late: whether the time to come is over.
        is_too_late: whether those that were inside have had time to come back.
    """
    number = step.number
    came = {rank: record for rank, record in records.items() if record.number >= number}
    here = {rank: record for rank, record in came.items() if record.number == number}
    labels = {record.label for record in here.values()}
    # Ranks learn one after the other that a tensor did not arrive.
    has_tensors = TENSORS in labels
    missing = set(range(world_size)) - came.keys()
    inside: set[int] = set()
    if has_payload or len(labels) > 1 or has_tensors:
        inside = {rank for rank, record in here.items() if record.state is State.INSIDE}
    if missing and not (is_late and (is_too_late or not has_tensors)):
        return None
    if inside and not is_too_late:
        return None
    absent = missing | inside
    values = {
        rank: record.value if record.number == number else record.last_value
        for rank, record in came.items()
        if rank not in absent and record.number <= number + 1
    }
    calls = {}
    if not absent and len(labels) > 1 and not has_tensors:
        calls = {rank: record.call or f"is at {record.label}" for rank, record in here.items()}
    has_left = any(record.number > number or record.state is State.DONE for record in came.values())
    is_lost = has_tensors or (has_payload and has_left)
    return Verdict(step.label, tuple(sorted(absent)), values, calls, is_lost)
