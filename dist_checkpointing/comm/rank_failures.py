"""How the errors of some ranks become one error of all, and what each rank reports for that.

A collective does not tell which rank it waits for. So each rank writes into the key-value store of
torch.distributed which step it enters, and one rank concludes from these records for all.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    RankFailedError,
    merge_findings,
)

T = TypeVar("T")
_PACKAGE: Final = __name__.partition(".")[0]
_SIMULATION: Final = f"{_PACKAGE}.testing"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as the other ranks get it: the exception itself, if it is a
    CheckpointingException that can be pickled; its class and message; and its traceback as text.
    """

    error: CheckpointingException | None
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        try:
            text = "".join(traceback.format_exception(error))
            summary = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - an error whose __str__ fails must still be reported
            text = "".join(traceback.format_tb(error.__traceback__))
            summary = f"{type(error).__name__} (which cannot be printed)"
        if isinstance(error, CheckpointingException):
            # A subclass that cannot be pickled goes as text.
            with suppress(Exception):
                pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
                return cls(error, summary, text)
        return cls(None, summary, text)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What came of a step on one rank, before the other ranks know of it: a result, None if it
    failed, or an error.
    """

    step: str
    result: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, step: str, produce: Callable[[], T]) -> Outcome[T]:
        """What comes of calling ``produce``."""
        try:
            return cls(step, produce())
        except Exception as error:  # noqa: BLE001 - the other ranks must get any error
            return cls(step, error=error)

    @property
    def failure(self) -> Failure | None:
        """What this rank tells the others, if the step failed."""
        return None if self.error is None else Failure.of(self.error)


def merge_failures(
    step: str,
    failures: Mapping[int, Failure],
    world_size: int,
    global_ranks: Sequence[int] | None = None,
) -> CheckpointingException:
    """The one error that all ranks raise for these failures, given by rank in the group."""
    named = {_global(rank, global_ranks): failure for rank, failure in sorted(failures.items())}
    first = next(iter(named.values())).error
    classes = {type(failure.error) for failure in named.values()}
    if first is None or len(classes) > 1 or isinstance(first, RankFailedError):
        findings = [
            finding
            for rank, failure in named.items()
            for finding in (
                _findings(failure.error, global_ranks)
                if isinstance(failure.error, RankFailedError)
                else [Finding(failure.summary, ranks=(rank,))]
            )
        ]
        whole = str(world_size)
        if global_ranks is not None and [*global_ranks] != [*range(world_size)]:
            whole = f"the {world_size} of its group"
        message = f"{step} failed on rank {', '.join(map(str, named))} of {whole}"
        tracebacks = {rank: failure.traceback for rank, failure in named.items()}
        tracebacks = {rank: text for rank, text in tracebacks.items() if text}
        return _marked(RankFailedError(message, merge_findings(findings), tracebacks), global_ranks)
    if world_size == 1 and global_ranks is None:
        return first
    findings = []
    for rank, failure in named.items():
        error = failure.error
        assert error is not None
        if not error.findings or error.message != first.message:
            findings.append(Finding(error.message, ranks=(rank,)))
        of_error = _findings(error, global_ranks)
        findings += [f if f.ranks else replace(f, ranks=(rank,)) for f in of_error]
    return _marked(type(first)(first.message, merge_findings(findings)), global_ranks)


class Absence(Enum):
    """Why other ranks do not wait for a rank any longer."""

    LATE = "did not reach '{step}' within {seconds:g} s: dead, hung or far behind"
    INSIDE = "entered '{step}' and did not come back: dead or hung"
    DEAD = "died, or was stopped, before '{step}' was done: it gives no sign of life"


def absent_ranks(absent: Mapping[int, Absence], step: str, seconds: float) -> dict[int, Failure]:
    """The failures of ranks that do not come, of which the late ones had so many seconds."""
    texts = {r: reason.value.format(step=step, seconds=seconds) for r, reason in absent.items()}
    return {
        rank: Failure(RankFailedError("", [Finding(text, ranks=(rank,))]), text, "")
        for rank, text in texts.items()
    }


def contact_lost(step: str, problem: object, global_ranks: Iterable[int]) -> RankFailedError:
    """The error of a collective that does not end."""
    finding = Finding(
        f"lost contact at {step}: {problem}",
        ranks=tuple(sorted(global_ranks)),
        remedy="A process or the network probably failed; see the logs of all ranks.",
    )
    error = RankFailedError("a collective failed", [finding])
    error.names_global_ranks = True
    return error


def different_calls(
    calls: Mapping[int, str], global_ranks: Sequence[int] | None = None
) -> CheckpointingException:
    """The error that all ranks raise when they do not make the same call, given by rank."""
    remedy = "Every rank must make the same calls, in the same order."
    findings = [
        Finding(call, ranks=(_global(rank, global_ranks),), remedy=remedy)
        for rank, call in sorted(calls.items())
    ]
    error = CheckpointingException("ranks call different functions", merge_findings(findings))
    return _marked(error, global_ranks)


def call_site() -> str | None:
    """Which function of this library the user called, and in which line; None in other threads."""
    called = None
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if module == "contextlib":
            continue
        if module.partition(".")[0] == _PACKAGE and not module.startswith(_SIMULATION):
            called = frame.f_code.co_qualname
        elif called is not None:
            is_user = module != "threading"
            return f"{called} ({frame.f_code.co_filename}:{line})" if is_user else None
    return None


def described(label: str, failure: str | None = None) -> str:
    """What this rank is doing, and what failed in it, as text for an error."""
    site = call_site()
    text = f"calls {site}, and is at {label}" if site is not None else f"is at {label}"
    return f"{text}, which failed: {failure}" if failure is not None else text


def _global(rank: int, global_ranks: Sequence[int] | None) -> int:
    if global_ranks is None or not 0 <= rank < len(global_ranks):
        return rank
    return global_ranks[rank]


def _findings(
    error: CheckpointingException, global_ranks: Sequence[int] | None
) -> Sequence[Finding]:
    """The findings of an error, with global ranks."""
    if global_ranks is None or error.names_global_ranks:
        return error.findings
    return [
        replace(f, ranks=tuple(sorted(_global(rank, global_ranks) for rank in f.ranks)))
        for f in error.findings
    ]


def _marked(
    error: CheckpointingException, global_ranks: Sequence[int] | None
) -> CheckpointingException:
    error.names_global_ranks = global_ranks is not None
    return error


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
    """What a rank writes about itself: the number of its step, which counts alike on all ranks; the
    label of the step, the same on all ranks if they make the same call; and what the rank passes in
    this step and passed in the last one, if that is small (a failure, a number).

    ``call`` is the call of the user that led here, only with ``State.OUTSIDE``.
    """

    number: int
    label: str
    value: Any = None
    last_value: Any = None
    state: State = State.INSIDE
    call: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks that are here decide about a step: which ranks did not come, or did not come
    back, and why; the values of the others; and what each rank calls, if they do not call the same.

    A step that ``is_lost`` cannot be repeated: some ranks have its result and others do not.
    """

    label: str
    absent: Mapping[int, Absence]
    values: Mapping[int, Any]
    calls: Mapping[int, str]
    is_lost: bool

    @property
    def present(self) -> list[int]:
        """The ranks that are here."""
        return sorted(self.values)


def decide(
    records: Mapping[int, Record],
    step: Record,
    world_size: int,
    *,
    has_payload: bool,
    is_late: bool,
    is_too_late: bool,
    dead: AbstractSet[int] = frozenset(),
) -> Verdict | None:
    """The verdict that follows from the records that exist, by rank; None if it is too early.

    ``step`` is the record of the rank that asks. ``has_payload`` says whether ranks pass more in
    this step than what is in their records, ``is_late`` whether the time to come is over,
    ``is_too_late`` whether the time to come back is over, for ranks that were inside. Nobody waits
    for the ``dead``.
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
    if missing.difference(dead) and not (is_late and (is_too_late or not has_tensors)):
        return None
    if inside.difference(dead) and not is_too_late:
        return None
    absent = dict.fromkeys(missing, Absence.LATE) | dict.fromkeys(inside, Absence.INSIDE)
    absent |= dict.fromkeys(absent.keys() & dead, Absence.DEAD)
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
    return Verdict(step.label, absent, values, calls, is_lost)
