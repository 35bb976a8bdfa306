"""Ranks that are threads of one process, for tests of many."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dist_checkpointing.comm.interface import Comm
from dist_checkpointing.comm.rank_failures import (
    BROADCAST,
    COMPARISON,
    GATHER,
    Failure,
    Outcome,
    absent_error,
    agreement,
    collection,
    described,
    different_calls,
    step_of,
)

T = TypeVar("T")


class ThreadComm(Comm):
    """One of many ranks that are threads of this process; see ``testing.run_ranks``.

    Ranks pass values by reference: treat what you receive as read-only.

    Args:
        rendezvous: the object that all ranks share.
        rank: rank of this thread.
        global_ranks: the number of each rank in the world, if the ranks are a part of it.

    Example:
        >>> from dist_checkpointing.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.all_gather(comm.rank * 10))
        [[0, 10, 20], [0, 10, 20], [0, 10, 20]]
    """

    class Rendezvous:
        """What the ranks of one world share: here they wait for each other."""

        def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
            self.world_size = world_size
            self.timeout_seconds = timeout_seconds
            self.first_to_leave: int | None = None
            self.duplicates: list[ThreadComm.Rendezvous] = []
            self.kept: list[dict[str, Any]] = [{} for _ in range(world_size)]
            self._changed = threading.Condition()
            self._round = 0
            self._values: dict[int, Any] = {}
            self._last_round: list[Any] = []
            self._gone: set[int] = set()
            self._given_up: set[int] = set()

        def leave(self, rank: int) -> None:
            """Tell the other ranks not to wait for this one any more."""
            with self._changed:
                if self.first_to_leave is None:
                    self.first_to_leave = rank
                self._gone.add(rank)
                self._changed.notify_all()
            for rendezvous in self.duplicates:
                rendezvous.leave(rank)

        def meet(self, rank: int, value: Any) -> tuple[list[Any], set[int]]:
            """The values of all ranks, and the ranks that did not come in time (then no values)."""
            with self._changed:
                if self._given_up:
                    return [], self._given_up
                this_round = self._round
                self._values[rank] = value
                if len(self._values) == self.world_size:
                    self._last_round = [self._values[r] for r in range(self.world_size)]
                    self._values = {}
                    self._round += 1
                    self._changed.notify_all()
                    return self._last_round, set()
                self._changed.wait_for(
                    lambda: (
                        self._round != this_round
                        or self._given_up
                        or self._gone - self._values.keys()
                    ),
                    self.timeout_seconds,
                )
                if self._round != this_round:
                    # The next round needs this rank: until then it cannot replace the last one.
                    return self._last_round, set()
                if not self._given_up:
                    # A rank that comes too late must not meet ranks that went on without it.
                    self._given_up = set(range(self.world_size)) - self._values.keys()
                    self._changed.notify_all()
                return [], self._given_up

    def __init__(
        self,
        rendezvous: ThreadComm.Rendezvous,
        rank: int,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.global_ranks = global_ranks
        self.world_size: int = rendezvous.world_size
        self._rendezvous = rendezvous

    @property
    def kept(self) -> dict[str, Any]:
        return self._rendezvous.kept[self.rank]

    def all_gather(self, value: T) -> list[T]:
        values: list[T] = self._meet(GATHER, value)
        return values

    def broadcast(self, value: T) -> T:
        result: T = self._meet(BROADCAST, value)[0]
        return result

    def all_same(self, number: int | None) -> bool:
        return set(self._meet(COMPARISON, number)) == {number} - {None}

    def duplicate(self) -> ThreadComm:
        own = None
        if self.rank == 0:
            own = ThreadComm.Rendezvous(self.world_size, self._rendezvous.timeout_seconds)
        rendezvous = self.broadcast(own)
        assert rendezvous is not None
        self._rendezvous.duplicates.append(rendezvous)
        return ThreadComm(rendezvous, self.rank, self.global_ranks)

    def _all_failures(self, step: str, failure: Failure | None) -> Mapping[int, Failure]:
        outcomes: list[Failure | None] = self._meet(agreement(step), failure, failure)
        return {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}

    def _all_outcomes(
        self, outcome: Outcome[Any], number: int | None, *, everywhere: bool = True
    ) -> tuple[Mapping[int, Failure], list[Any]]:
        del number, everywhere  # values pass by reference, so there is nothing to save
        failure = outcome.failure
        met = self._meet(collection(outcome.step), (failure, outcome.result), failure)
        failures = {rank: failed for rank, (failed, _) in enumerate(met) if failed is not None}
        return failures, [value for _, value in met]

    def _broadcast_agreed(self, step: str, value: T) -> T:
        result: T = self._meet(step, value)[0]
        return result

    def _meet(self, label: str, value: Any, failure: Failure | None = None) -> list[Any]:
        met = self._met(label, (label, value))
        if len({label for label, _ in met}) > 1:
            calls = self._met(label, described(label, None if failure is None else failure.summary))
            raise different_calls(dict(enumerate(calls)), self.global_ranks)
        return [value for _, value in met]

    def _met(self, label: str, value: Any) -> list[Any]:
        values, absent = self._rendezvous.meet(self.rank, value)
        if absent:
            step, seconds = step_of(label), self._rendezvous.timeout_seconds
            raise absent_error(absent, step, seconds, self.world_size, self.global_ranks)
        return values
