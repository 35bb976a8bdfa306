"""Records that ranks write about themselves, and the verdict on a step that the group cannot end.

A collective does not tell which rank it waits for. So each rank writes into the key-value store of
torch.distributed which step it enters, and one rank concludes from these records for all.
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
"""Label of a step that only ranks have on which passing tensors has failed."""


def agreement(step: str) -> str:
    """The label of the agreement about a step."""
    return f"'{step}'"


def collection(step: str) -> str:
    """The label of an agreement about a step in which ranks also pass what came of it."""
    return f"'{step}', passing values"


def is_agreement(label: str) -> bool:
    """Whether this is the label of an agreement."""
    return label.startswith("'")


def step_of(label: str) -> str:
    """The name of the step that a label is about."""
    return label[1:].rpartition("'")[0] if is_agreement(label) else label


class State(Enum):
    """Where a rank is in its step."""

    INSIDE = "the rank has entered, and maybe left without writing so"
    DONE = "the rank has its result"
    OUTSIDE = "the rank could not end the step with the group, and asks for a verdict"


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank writes about itself.

    Attributes:
        number: Number of the step; all ranks count the same steps.
        label: Name of the step, the same on all ranks if they make the same call.
        value: What the rank passes, if that is small: a failure, a number.
        last_value: What the rank passed in the step before.
        state: Where the rank is in the step.
        call: The call of the user that led here; only with ``State.OUTSIDE``.
    """

    number: int
    label: str
    value: Any = None
    last_value: Any = None
    state: State = State.INSIDE
    call: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks that are here decide about a step.

    Attributes:
        label: Label of the step.
        absent: Ranks that did not come, or did not come back.
        values: Values of the other ranks.
        calls: What each rank calls, if the ranks do not call the same.
        is_lost: Whether the step cannot be repeated: some ranks have its result and others do not.
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
    """The verdict that follows from the records of all ranks; None if it is too early.

    Args:
        records: the records that exist, by rank.
        step: the record of the rank that asks.
        world_size: number of ranks.
        has_payload: whether ranks pass more in this step than what is in their records.
        is_late: whether the time to come is over.
        is_too_late: whether the time to come back is over, for ranks that were inside.
    """
    number = step.number
    came = {rank: record for rank, record in records.items() if record.number >= number}
    here = {rank: record for rank, record in came.items() if record.number == number}
    labels = {record.label for record in here.values()}
    # The ranks find out one after the other that a tensor did not arrive.
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
