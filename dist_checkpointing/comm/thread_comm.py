"""Ranks that are threads of one process, for tests of many."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dist_checkpointing.comm import rank_failures
from dist_checkpointing.comm.interface import Comm

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

        def meet(self, comm: ThreadComm, label: str, value: T) -> list[T]:
            """The values of all ranks.

            Raises:
                RankFailedError: naming the ranks that do not come in time.
            """
            with self._changed:
                if not self._given_up:
                    this_round = self._round
                    self._values[comm.rank] = value
                    if len(self._values) == self.world_size:
                        self._last_round = [self._values[r] for r in range(self.world_size)]
                        self._values = {}
                        self._round += 1
                        self._changed.notify_all()
                    else:
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
                        return self._last_round
                    if not self._given_up:
                        # A rank that comes too late must not meet ranks that went on without it.
                        self._given_up = set(range(self.world_size)) - self._values.keys()
                        self._changed.notify_all()
            step = rank_failures.step_of(label)
            absent = dict.fromkeys(self._given_up, rank_failures.Absence.LATE)
            absent |= dict.fromkeys(self._given_up & self._gone, rank_failures.Absence.DEAD)
            failures = rank_failures.absent_ranks(absent, step, self.timeout_seconds)
            raise rank_failures.merge_failures(step, failures, self.world_size, comm.global_ranks)

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
        return self._meet(rank_failures.GATHER, value)

    def broadcast(self, value: T) -> T:
        return self._meet(rank_failures.BROADCAST, value)[0]

    def all_same(self, number: int | None) -> bool:
        return set(self._meet(rank_failures.COMPARISON, number)) == {number} - {None}

    def duplicate(self) -> ThreadComm:
        own = None
        if self.rank == 0:
            own = ThreadComm.Rendezvous(self.world_size, self._rendezvous.timeout_seconds)
        rendezvous = self.broadcast(own)
        assert rendezvous is not None
        self._rendezvous.duplicates.append(rendezvous)
        return ThreadComm(rendezvous, self.rank, self.global_ranks)

    def _all_failures(
        self, step: str, failure: rank_failures.Failure | None
    ) -> Mapping[int, rank_failures.Failure]:
        outcomes = enumerate(self._meet(rank_failures.agreement(step), failure, failure))
        return {rank: outcome for rank, outcome in outcomes if outcome is not None}

    def _all_outcomes(
        self, outcome: rank_failures.Outcome[Any], number: int | None, *, everywhere: bool = True
    ) -> tuple[Mapping[int, rank_failures.Failure], list[Any]]:
        del number, everywhere  # values pass by reference, so there is nothing to save
        failure = outcome.failure
        met = self._meet(rank_failures.collection(outcome.step), (failure, outcome.result), failure)
        failures = {rank: failed for rank, (failed, _) in enumerate(met) if failed is not None}
        return failures, [value for _, value in met]

    def _broadcast_agreed(self, step: str, value: T) -> T:
        return self._meet(step, value)[0]

    def _meet(self, label: str, value: T, failure: rank_failures.Failure | None = None) -> list[T]:
        met = self._rendezvous.meet(self, label, (label, value))
        if len({label for label, _ in met}) > 1:
            call = rank_failures.described(label, None if failure is None else failure.summary)
            calls = self._rendezvous.meet(self, label, call)
            raise rank_failures.different_calls(dict(enumerate(calls)), self.global_ranks)
        return [value for _, value in met]
