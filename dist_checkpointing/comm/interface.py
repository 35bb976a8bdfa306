"""What ranks can do together, and how the error of some ranks becomes the error of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch

from dist_checkpointing.comm.rank_failures import Failure, Outcome, merge_failures

T = TypeVar("T")


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
        """Where tensors must be for ``broadcast_tensor``."""
        return torch.device("cpu")

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` with that of rank ``source``: 1-D, uint8, equally long on all ranks."""
        # A copy: ranks that are threads get a reference, and the source may change its tensor.
        given = self.all_gather(tensor.clone() if self.rank == source else None)[source]
        if self.rank != source:
            assert given is not None
            tensor.copy_(given)

    def shift(
        self, sent: torch.Tensor, target: int | None, source: int | None, num_bytes: int
    ) -> torch.Tensor:
        """Send a tensor to rank ``target``, and return the ``num_bytes`` that ``source`` sends.

        Both are 1-D, uint8, on the CPU; empty where the rank is None. A rank may send to one other.
        """
        del target, num_bytes  # every rank gets a reference to what each sends
        given = self.all_gather(sent.clone())
        return sent.new_empty(0) if source is None else given[source]

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """``value`` of rank 0."""

    @abstractmethod
    def all_same(self, number: int | None) -> bool:
        """Whether every rank passes the same number (0 to 2**62 - 1), and no rank passes None."""

    @abstractmethod
    def duplicate(self) -> Comm:
        """A comm of the same ranks with a channel of its own, for another thread. Collective."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the channel of a duplicate, which must not be used again. Not collective."""

    @abstractmethod
    def _all_failures(self, step: str, failure: Failure | None) -> Mapping[int, Failure]:
        """The failures of all ranks in ``step``; an absent rank counts as failed."""

    def agree(self, step: str, error: Exception | None) -> None:
        """Raise the same error on every rank if any rank passes one; ``step`` is named in it.

        If all failed ranks have a CheckpointingException of one class, the error has that class and
        the findings of all ranks. Otherwise it is a RankFailedError with the tracebacks as text.
        """
        failures = self._all_failures(step, Outcome(step, error=error).failure)
        self._raise_any(step, failures, error)

    @contextmanager
    def agreed(self, step: str) -> Iterator[None]:
        """Run the body on every rank; if it fails on any, all ranks raise the same error."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - the other ranks must get any error
            error = raised
        self.agree(step, error)

    def exchange(
        self,
        step: str,
        produce: Callable[[], T],
        number_of: Callable[[T], int | None] = lambda _: None,
    ) -> list[T]:
        """``produce()`` of every rank, in rank order; if one fails, all raise the same error.

        ``number_of`` gives a number that stands for a value, from 0 to 2**62 - 1. If all ranks have
        the same one, nothing travels, and each gets its own value for that of every rank. None
        stands for nothing.
        """
        number: int | None = None

        def packed() -> Any:
            nonlocal number
            value = produce()
            number = number_of(value)
            return self._pack(value)

        values = self.exchange_bytes(step, packed, lambda: number)
        if number is not None and all(value is values[0] for value in values):
            return [self._unpack(values[0])] * len(values)
        return [self._unpack(value) for value in values]

    def exchange_bytes(
        self, step: str, produce: Callable[[], bytes], number: Callable[[], int | None]
    ) -> list[bytes]:
        """Like ``exchange``, for bytes, which are not packed; ``number`` is asked for theirs."""
        outcome = Outcome.of(step, produce)
        failures, values = self._all_outcomes(outcome, number())
        self._raise_any(step, failures, outcome.error)
        return values

    def to_rank0(self, step: str, produce: Callable[[], T]) -> list[T]:
        """Like ``exchange``, but only rank 0 gets the values; the other ranks get none."""
        outcome = Outcome.of(step, lambda: self._pack(produce()))
        failures, values = self._all_outcomes(outcome, None, everywhere=False)
        self._raise_any(step, failures, outcome.error)
        return [self._unpack(value) for value in values] if self.rank == 0 else []

    def from_rank0(
        self, step: str, produce: Callable[[], T], after: Outcome[Any] | None = None
    ) -> T:
        """``produce()`` of rank 0 alone, on all ranks; if it fails, all raise the same error.

        It is called when all ranks have come, and none with an error. ``after`` is what this rank
        has done before. It is agreed on with this step, so that ranks wait for each other once.
        """
        before = after or Outcome(step)
        self.agree(before.step, before.error)
        outcome = Outcome.of(step, lambda: self._pack(produce()) if self.rank == 0 else None)
        failure, packed = self._broadcast_agreed(step, (outcome.failure, outcome.result))
        self._raise_any(step, {} if failure is None else {0: failure}, outcome.error)
        result: T = self._unpack(packed)
        return result

    def _raise_any(
        self, step: str, failures: Mapping[int, Failure], error: Exception | None
    ) -> None:
        if not failures:
            return
        merged = merge_failures(step, failures, self.world_size, self.global_ranks)
        if merged is error:
            raise merged
        raise merged from error

    def _all_outcomes(
        self, outcome: Outcome[Any], number: int | None, *, everywhere: bool = True
    ) -> tuple[Mapping[int, Failure], list[Any]]:
        """The failures of all ranks, see ``_all_failures``; without any, the results of all ranks.

        A comm may look at ``number``, see ``exchange``, and pass no results if all have the same.
        If not ``everywhere``, only rank 0 needs the results.
        """
        del number, everywhere
        failures = self._all_failures(outcome.step, outcome.failure)
        return failures, [] if failures else self.all_gather(outcome.result)

    def _broadcast_agreed(self, step: str, value: T) -> T:
        """``value`` of rank 0, right after an agreement."""
        del step
        return self.broadcast(value)

    # A value that cannot be pickled is an error of the rank that brings it. In the collective, the
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
