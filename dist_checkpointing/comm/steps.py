"""Steps that all ranks take together, in the same order, and what happens when one fails."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist
import xxhash

from dist_checkpointing.comm.board import Board, StoreSilentError, asked
from dist_checkpointing.comm.channel import Channel, ContactLostError
from dist_checkpointing.comm.failures import (
    Failure,
    absent_rank,
    described,
    different_calls,
    merge_failures,
)
from dist_checkpointing.comm.records import (
    TENSORS,
    Record,
    State,
    Verdict,
    is_agreement,
    step_of,
)
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAKING: Final = "making a channel"
_CLEARING_SECONDS: Final = 5.0
_HEARING_SECONDS: Final = 5.0
_SHORTEST_PATIENCE_SECONDS: Final = 5.0
_LONGEST_PATIENCE_SECONDS: Final = 30.0

_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class Settled(NamedTuple):
    """A step that was ended through the store.

    Attributes:
        number: Number of the step.
        verdict: Verdict on the step.
        payloads: Payloads of the ranks that passed one.
    """

    number: int
    verdict: Verdict
    payloads: list[bytes]


class Steps:
    """The steps of one comm. Creating one is collective.

    Args:
        group: process group of the ranks, with a CPU (gloo) backend.
        tensor_group: process group that carries tensors.
        timeout_seconds: how long a step waits for the slowest rank, this first one included.
    """

    def __init__(
        self, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup, timeout_seconds: float
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.is_broken = False
        self._rank, self._world_size = group.rank(), group.size()
        self._global_ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._number = 0
        self._last_value: Any = None
        self._store_is_lost = False
        # torch has no public way to the store that every process group has already joined.
        default_store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        number = next(_numbers.setdefault(group, itertools.count()))
        name = f"dist_checkpointing/{group.group_name}/{number}"
        # A connection of its own: a thread that waits for a key blocks all users of its connection.
        store = self._answered(_MAKING, lambda: asked(default_store.clone, timeout_seconds))
        self._arrivals = dist.distributed_c10d.PrefixStore(name, store)
        self._board = Board(self._arrivals, self._rank, self._world_size)
        self.channel = Channel(group, tensor_group, self._board.is_flagged)
        own = dist.distributed_c10d.PrefixStore(self._drawn_name(), self._arrivals)
        self._board = Board(own, self._rank, self._world_size)
        self.channel = Channel(group, tensor_group, self._board.is_flagged)

    def _drawn_name(self) -> str:
        """A random name, chosen by rank 0, for a part of the store that only this comm uses."""
        store, step = self._arrivals, _MAKING
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], "1")
        drawn = [uuid.uuid4().int >> 66 if self._rank == 0 else 0 for _ in range(2)]
        deadline = time.monotonic() + self.timeout_seconds
        try:
            first, second = self.channel.maxima(drawn, deadline)
        except ContactLostError as error:

            def absent() -> list[int]:
                self._board.raise_flag()
                return [rank for rank, key in enumerate(keys) if not store.check([key])]

            gone = self._asked(absent, _patience(self.timeout_seconds), step)
            if gone:
                raise self._absent_error(gone, step) from error
            raise self._contact_lost(step, str(error), [self._rank]) from error
        return f"{first:x}.{second:x}"

    def clear(self) -> None:
        """Delete the keys of this rank in the store, once no rank will read them."""
        try:
            asked(self._clear, _CLEARING_SECONDS)
        except (StoreSilentError, dist.DistError) as error:
            logger.debug("keys stay in the store: %s", error)

    def _clear(self) -> None:
        if self._number < 2:  # the second step has deleted it
            self._arrivals.delete_key(f"here/{self._rank}")
        self._board.clear()

    @contextmanager
    def turn(self, label: str, value: Any = None) -> Iterator[tuple[Record, float]]:
        """One step of all ranks, by one thread at a time: its record, and its deadline."""
        with self._one_thread():
            deadline = time.monotonic() + self.timeout_seconds
            self._number += 1
            record = Record(self._number, label, value, self._last_value)
            self._answered(label, lambda: self._board.require_answer(self.timeout_seconds))
            # Written before the collective, because that does not tell who is missing if it fails.
            self._note(record)
            if self._number == 2:
                # All ranks have been in the first step, so this comm exists on all of them.
                self._arrivals.delete_key(f"here/{self._rank}")
            self._last_value = value
            yield record, deadline

    @contextmanager
    def tensor_turn(self) -> Iterator[float]:
        """One step that passes a tensor. It is fast: a record is only written if the step fails."""
        with self._one_thread():
            deadline = time.monotonic() + self.timeout_seconds
            try:
                yield deadline
            except ContactLostError as error:
                self._lose_group(TENSORS, error)
                self._number += 1
                step = Record(self._number, TENSORS, None, self._last_value)
                self._last_value = None
                self.settle(step, deadline)
                raise AssertionError("a tensor that did not arrive is lost") from error

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if self._owner != os.getpid():
            raise forked_error(self._owner)
        if not self._busy.acquire(blocking=False):
            finding = Finding(
                "another thread of this process is in a step with the other ranks",
                ranks=(self._rank,),
                remedy="Give each thread a duplicate() of the comm, or let them take turns.",
            )
            raise CheckpointingException("two threads use one comm at once", [finding])
        try:
            yield
        finally:
            self._busy.release()

    def sum_of_extras(
        self, step: Record, deadline: float, *, content: str = "", extra: int = 0
    ) -> int | None:
        """The sum of ``extra`` over all ranks at the same step; None if the group failed.

        It takes one all-reduce of one number, which costs half as much as one of four numbers: each
        rank adds ``extra`` to a digest of the step. If the ranks are at different steps, or
        ``content`` differs, the result is a random number of 64 bits, the same on every rank. Then
        all ranks see that it cannot be the sum, and call ``meet``.

        Args:
            step: record of the step.
            deadline: deadline on the monotonic clock.
            content: text that should be the same on all ranks too.
            extra: number that this rank adds.
        """
        if self.is_broken:
            return None
        expected = xxhash.xxh3_64_intdigest(f"{step.label}: {content}".encode())
        try:
            total = self.channel.total(expected + extra, deadline)
        except ContactLostError as error:
            self._lose_group(step.label, error)
            return None
        return (total - self._world_size * expected) % 2**64

    def meet(
        self, step: Record, numbers: tuple[int, int], deadline: float
    ) -> tuple[int, int] | None:
        """The maxima of two numbers over all ranks; None if the group failed.

        Raises:
            CheckpointingException: on all ranks, if they do not make the same call.
        """
        if self.is_broken:
            return None
        signature = xxhash.xxh3_64_intdigest(step.label.encode()) >> 2
        try:
            first, second, highest, lowest = self.channel.maxima(
                (*numbers, signature, -signature), deadline
            )
        except ContactLostError as error:
            self._lose_group(step.label, error)
            return None
        if highest != -lowest:
            self.settle(step, deadline)
            raise AssertionError("the records of the ranks do not show what they call")
        return first, second

    def transferred(self, step: Record, transfer: Callable[[], T]) -> T | None:
        """The result of ``transfer``; None if the group failed."""
        try:
            result = transfer()
        except ContactLostError as error:
            self._lose_group(step.label, error)
            return None
        # This rank may have its result while another one waits for ever.
        self._note(_with_state(step, State.DONE))
        return result

    def _lose_group(self, label: str, error: ContactLostError) -> None:
        logger.debug("at %s: %s", label, error)
        self.is_broken = True

    def settle(
        self,
        step: Record,
        deadline: float,
        payload: bytes | None = None,
        *,
        sources: Sequence[int] = (0,),
        everywhere: bool = True,
    ) -> Settled:
        """End a step through the store.

        Args:
            step: record of the step.
            deadline: when the time of the other ranks to come ends.
            payload: what this rank passes; None for a step without payloads.
            sources: ranks whose payloads are passed.
            everywhere: whether all ranks get them; else only rank 0 does.

        Raises:
            CheckpointingException: the same on all ranks that are here.
        """
        patience = _patience(self.timeout_seconds)
        failure = step.value.summary if isinstance(step.value, Failure) else None
        call = described(step.label, failure)

        def settled() -> Settled:
            if self.is_broken:
                self._board.raise_flag()
            if payload is not None and self._rank in sources:
                self._board.put_payload(step.number, payload)
            self._board.note(_with_state(step, State.OUTSIDE, call))
            has_payload = payload is not None
            number, verdict = self._board.verdict(step, deadline, patience, has_payload=has_payload)
            payloads = []
            is_whole = not (verdict.absent or verdict.is_lost or verdict.calls)
            is_reader = has_payload and (everywhere or self._rank == 0)
            if is_reader and is_whole and number == step.number:
                payloads = [self._board.payload(number, rank) for rank in sources]
            # A frozen rank acknowledges nothing, and the others are already at the next step.
            hearing = patience / 2 if self.is_broken else _HEARING_SECONDS
            self._board.acknowledge(number, verdict, hearing)
            return Settled(number, verdict, payloads)

        # The others decide up to two patiences after the deadline; then their verdict is read.
        longest = deadline - time.monotonic() + 4 * patience
        found = self._asked(settled, longest, step.label)
        verdict = found.verdict
        if found.number < step.number:
            # The others failed in a step that this rank had ended: all go on from that step.
            self._number, self._last_value = found.number, None
            self._note(Record(found.number, verdict.label, state=State.OUTSIDE))
        if verdict.calls:
            raise different_calls(verdict.calls, self._global_ranks)
        # An agreement itself reports absent ranks, as failures.
        is_whole = found.number == step.number and not verdict.is_lost
        if verdict.absent and not (is_whole and is_agreement(step.label)):
            raise self._absent_error(verdict.absent, verdict.label)
        if verdict.is_lost:
            problem = "some ranks have what others lack"
            raise self._contact_lost(verdict.label, problem, verdict.present)
        return found

    def _asked(self, question: Callable[[], T], timeout_seconds: float, label: str) -> T:
        """The answer of the store, or an error if it does not answer in time."""
        return self._answered(label, lambda: asked(question, timeout_seconds))

    def _answered(self, label: str, question: Callable[[], T]) -> T:
        try:
            if self._store_is_lost:
                raise StoreSilentError
            return question()
        except (StoreSilentError, dist.DistError) as error:
            self._store_is_lost |= isinstance(error, StoreSilentError)
            raise store_error(label, error, self._world_size, self._global_ranks) from error

    def _note(self, record: Record) -> None:
        self._answered(record.label, lambda: self._board.note(record))

    def _absent_error(self, absent: list[int] | tuple[int, ...], label: str) -> Exception:
        label = step_of(label)
        failures = {rank: absent_rank(rank, label, self.timeout_seconds) for rank in absent}
        return merge_failures(label, failures, self._world_size, self._global_ranks)

    def _contact_lost(self, label: str, problem: str, ranks: Sequence[int]) -> RankFailedError:
        finding = Finding(
            problem=f"lost contact at {label}: {problem}",
            ranks=tuple(sorted(self._global_ranks[rank] for rank in ranks)),
            remedy="A process or the network probably failed; see the logs of all ranks.",
        )
        error = RankFailedError("a collective failed", [finding])
        error.names_global_ranks = True
        return error


def store_error(
    label: str, error: Exception, world_size: int, global_ranks: Sequence[int]
) -> CheckpointingException:
    """The error of a step in which the store of torch.distributed fails."""
    problem = "the store, which rank 0 or the launcher holds, does not answer"
    if not isinstance(error, StoreSilentError):
        problem = f"lost contact with the store, which rank 0 or the launcher holds: {error}"
    gone = RankFailedError("", [Finding(problem=problem, ranks=(0,))])
    gone.names_global_ranks = True
    return merge_failures(label, {0: Failure(gone, problem, "")}, world_size, global_ranks)


def forked_error(owner: int) -> CheckpointingException:
    """The error of a process that was forked from a rank."""
    finding = Finding(
        "the ranks' connections belong to the process from which this one was forked",
        expected=f"process {owner}",
        found=f"process {os.getpid()}",
        remedy="Start it with the method 'spawn', or pass comm=SingleProcess() for work that it "
        "does alone.",
    )
    return CheckpointingException("a forked process is not a rank", [finding])


def _patience(timeout_seconds: float) -> float:
    """How many seconds ranks that wait in a collective have to find out that it will not end."""
    return max(_SHORTEST_PATIENCE_SECONDS, min(_LONGEST_PATIENCE_SECONDS, timeout_seconds / 60))


def _with_state(record: Record, state: State, call: str = "") -> Record:
    return Record(record.number, record.label, record.value, record.last_value, state, call)
