"""What ranks can do together, and how the error of some ranks becomes the error of all."""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

import torch

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
    """What a rank tells the others about its exception.

    Attributes:
        error: the exception itself, if it is a CheckpointingException that can be pickled.
        summary: class and message of the exception.
        traceback: the traceback as text.
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
            try:
                pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
            except Exception:  # noqa: BLE001 - a subclass that cannot be pickled goes as text
                return cls(None, summary, text)
            return cls(error, summary, text)
        return cls(None, summary, text)


def merge_failures(
    step: str,
    failures: Mapping[int, Failure],
    world_size: int,
    global_ranks: Sequence[int] | None = None,
) -> CheckpointingException:
    """The one error that all ranks raise for these failures.

    Args:
        step: name of the step that failed.
        failures: failure of each failed rank, by rank in the group.
        world_size: number of ranks in the group.
        global_ranks: see ``Comm.global_ranks``.
    """
    errors = {rank: failure.error for rank, failure in sorted(failures.items())}
    classes = {type(error) for error in errors.values()}
    first = next(iter(errors.values()))
    if first is not None and len(classes) == 1 and not isinstance(first, RankFailedError):
        if world_size == 1 and global_ranks is None:
            return first
        findings = []
        for rank, error in errors.items():
            assert error is not None
            own = (_global(rank, global_ranks),)
            if not error.findings or error.message != first.message:
                findings.append(Finding(error.message, ranks=own))
            findings += [
                f if f.ranks else replace(f, ranks=own) for f in _findings(error, global_ranks)
            ]
        merged = type(first)(first.message, merge_findings(findings))
        return _marked(merged, global_ranks)
    findings = []
    for rank, failure in sorted(failures.items()):
        if isinstance(failure.error, RankFailedError):
            findings += _findings(failure.error, global_ranks)
        else:
            findings.append(Finding(failure.summary, ranks=(_global(rank, global_ranks),)))
    ranks = ", ".join(str(_global(rank, global_ranks)) for rank in sorted(failures))
    whole = str(world_size)
    if global_ranks is not None and [*global_ranks] != [*range(world_size)]:
        whole = f"the {world_size} of its group"
    merged = RankFailedError(
        f"{step} failed on rank {ranks} of {whole}",
        merge_findings(findings),
        {
            _global(rank, global_ranks): failure.traceback
            for rank, failure in failures.items()
            if failure.traceback
        },
    )
    return _marked(merged, global_ranks)


def absent_rank(rank: int, step: str, timeout_seconds: float) -> Failure:
    problem = f"did not reach '{step}' within {timeout_seconds:g} s: dead, hung or far behind"
    return Failure(RankFailedError("", [Finding(problem=problem, ranks=(rank,))]), problem, "")


def different_calls(
    calls: Mapping[int, str], global_ranks: Sequence[int] | None = None
) -> CheckpointingException:
    """The error that all ranks raise when they do not make the same call.

    Args:
        calls: what each rank calls, by rank in the group.
        global_ranks: see ``Comm.global_ranks``.
    """
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
    """What this rank is doing, as text for an error.

    Args:
        label: label of the step.
        failure: what failed in it on this rank.
    """
    site = call_site()
    text = f"calls {site}, and is at {label}" if site is not None else f"is at {label}"
    return f"{text}, which failed: {failure}" if failure is not None else text


def _global(rank: int, global_ranks: Sequence[int] | None) -> int:
    is_known = global_ranks is not None and 0 <= rank < len(global_ranks)
    return global_ranks[rank] if is_known and global_ranks is not None else rank


def _findings(
    error: CheckpointingException, global_ranks: Sequence[int] | None
) -> tuple[Finding, ...]:
    """The findings of an error, with global ranks."""
    if global_ranks is None or error.names_global_ranks:
        return error.findings
    return tuple(
        replace(f, ranks=tuple(sorted(_global(rank, global_ranks) for rank in f.ranks)))
        for f in error.findings
    )


def _marked(
    error: CheckpointingException, global_ranks: Sequence[int] | None
) -> CheckpointingException:
    error.names_global_ranks = global_ranks is not None
    return error


class Comm(ABC):
    """A group of ranks. All methods are collective: every rank calls them in the same order."""

    rank: int
    world_size: int
    global_ranks: Sequence[int] | None = None
    """The number of each rank in the world, for errors; None if they have no other number."""

    @property
    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """Objects that this process keeps for these ranks, by name, as long as the ranks can talk.

        Every comm of the same ranks has the same dict.
        """

    @property
    def tensor_device(self) -> torch.device:
        """Where tensors must be for ``broadcast_tensor`` and ``all_to_all_tensor``."""
        return torch.device("cpu")

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` with that of rank ``source``: 1-D, uint8, equally long on all ranks."""
        # A copy: ranks that are threads get a reference, and the source may change its tensor.
        given = self.all_gather(tensor.clone() if self.rank == source else None)[source]
        if self.rank != source:
            assert given is not None
            tensor.copy_(given)

    def all_to_all_tensor(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """What all ranks send to this one, in rank order, as one tensor: 1-D, uint8.

        Args:
            tensor: what this rank sends to all ranks, in rank order: 1-D, uint8.
            sent: number of bytes for each rank.
            received: number of bytes from each rank.
        """
        del received
        parts = []
        for given, counts in self.all_gather((tensor.clone(), tuple(sent))):
            start = sum(counts[: self.rank])
            parts.append(given[start : start + counts[self.rank]])
        return torch.cat(parts)

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """``value`` of rank 0."""

    @abstractmethod
    def all_same(self, number: int | None) -> bool:
        """Whether every rank passes the same number, and no rank passes None.

        Args:
            number: from 0 to 2**62 - 1.
        """

    @abstractmethod
    def duplicate(self) -> Comm:
        """A comm of the same ranks with a channel of its own, for another thread. Collective."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the channel of a duplicate, which must not be used again. Not collective."""

    @abstractmethod
    def _all_failures(self, step: str, failure: Failure | None) -> Mapping[int, Failure]:
        """The failures of all ranks in ``step``; an absent rank counts as failed."""

    def agree(self, step: str, error: Exception | None) -> None:
        """Raise the same error on every rank if any rank passes one.

        If all failed ranks have a CheckpointingException of one class, the error has that class and
        the findings of all ranks. Otherwise it is a RankFailedError with the tracebacks as text.

        Args:
            step: name of the step, for the message.
            error: the error of this rank, or None.
        """
        failures = self._all_failures(step, None if error is None else Failure.of(error))
        if failures:
            merged = merge_failures(step, failures, self.world_size, self.global_ranks)
            if merged is error:
                raise merged
            raise merged from error

    @contextmanager
    def agreed(self, step: str) -> Iterator[None]:
        """Run the body on every rank; if it fails on any, all ranks raise the same error."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - the other ranks must get any error
            error = raised
        self.agree(step, error)

    def exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        """``produce()`` of every rank, in rank order; if one fails, all raise the same error."""
        with self.agreed(step):
            packed = self._pack(produce())
        return [self._unpack(value) for value in self.all_gather(packed)]

    def from_rank0(self, step: str, produce: Callable[[], T]) -> T:
        """``produce()`` of rank 0 alone, on all ranks; if it fails, all raise the same error."""
        packed: Any = None
        with self.agreed(step):
            if self.rank == 0:
                packed = self._pack(produce())
        packed = self.broadcast(packed)
        result: T = self._unpack(packed)
        return result

    # A value that cannot be pickled must fail inside the agreement. In the collective after it, the
    # other ranks would wait in vain.

    def _pack(self, value: Any) -> Any:
        return value

    def _unpack(self, packed: Any) -> Any:
        return packed


class SingleProcess(Comm):
    """One process alone, without a process group.

    Example:
        >>> # Rank 3 of a training writes something by itself, which no other rank takes part in.
        >>> save({"step": 7}, "ckpt/of-rank-3", comm=SingleProcess())
    """

    rank = 0
    world_size = 1
    _kept: ClassVar[dict[str, Any]] = {}

    @property
    def kept(self) -> dict[str, Any]:
        return self._kept

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def all_same(self, number: int | None) -> bool:
        return number is not None

    def duplicate(self) -> SingleProcess:
        return self

    def _all_failures(self, step: str, failure: Failure | None) -> Mapping[int, Failure]:  # noqa: ARG002
        return {} if failure is None else {0: failure}
