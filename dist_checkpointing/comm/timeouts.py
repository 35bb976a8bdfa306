"""How long ranks wait for each other, and which rank is late, dead or in another call."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import torch.distributed as dist
import xxhash

from dist_checkpointing.comm.channel import Channel, ContactLostError
from dist_checkpointing.comm.rank_failures import (
    TENSORS,
    Absence,
    Failure,
    Record,
    State,
    Verdict,
    absent_ranks,
    contact_lost,
    decide,
    described,
    different_calls,
    is_agreement,
    merge_failures,
    step_of,
)
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError
from dist_checkpointing.threads import fill

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
_FLAG: Final = "broken"
_SHORT_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01
_RANKS_A_SECOND: Final = 256


class StoreSilentError(Exception):
    """The store did not answer in time."""


_HEARTBEATS: Final = "dist_checkpointing/heartbeats"
_BEAT_SECONDS: Final = 2.5
_MOST_FAILURES: Final = 3
_DEAD_AFTER: Final = 5
"""So many heartbeats in a row a dead rank has missed, once a collective has failed."""
_GONE_AFTER: Final = 75
"""The same while all connections stand: a rank may be stopped, or its machine may be lost."""
_beating: weakref.WeakSet[Any] = weakref.WeakSet()


def start_heartbeat(shared: Any) -> None:
    """Let a thread write into the store of a world every few seconds that this process lives."""
    base, stop, world = shared, threading.Event(), dist.group.WORLD
    while isinstance(base, dist.distributed_c10d.PrefixStore):
        base = base.underlying_store
    # A FileStore would grow with each heartbeat.
    if world in _beating or isinstance(base, dist.FileStore):  # type: ignore[attr-defined]
        return
    _beating.add(world)
    weakref.finalize(world, stop.set)
    rank = str(dist.get_rank())

    def beat() -> None:
        store, failures = None, 0  # in a row: one lost connection is no death
        while failures < _MOST_FAILURES:
            try:
                store = store or dist.distributed_c10d.PrefixStore(_HEARTBEATS, shared.clone())
                store.set(rank, str(time.time_ns()))
                failures = 0
            except RuntimeError as error:
                store, failures = None, failures + 1
                logger.debug("a heartbeat failed: %s", error)
            if stop.wait(_BEAT_SECONDS):
                return

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class RankNotes:
    """Where each rank of a comm is, in a key-value store that nothing else uses.

    A store whose host is frozen never answers. So a thread asks, and the caller waits for it only
    for a limited time.
    """

    def __init__(self, store: Any, rank: int, global_ranks: Sequence[int]) -> None:
        self.store = store
        self._rank = rank
        self._world_size = len(global_ranks)
        self._heartbeats = dist.distributed_c10d.PrefixStore(_HEARTBEATS, store.underlying_store)
        self._beats = dict.fromkeys(range(self._world_size), (b"", 0))
        self._next_look = 0.0
        self._global_ranks = global_ranks
        self._question: Future[bool] | None = None
        self._acknowledged: int | None = None
        self._written: list[tuple[int, str]] = []

    def note(self, record: Record) -> None:
        """Write where this rank is; the store sends no answer to this."""
        self.store.set(f"at/{self._rank}", _text(record))

    def is_flagged(self) -> bool:
        """Whether a rank has reported that the group is broken, or has been gone for long; does not
        wait for the answer.
        """
        if self._question is None:
            # All watch the rank that watches all.
            watched = range(self._world_size if self._rank == 0 else 1)
            gone = partial(self.dead, watched, _GONE_AFTER)
            self._question = _in_thread(lambda: bool(self.store.check([_FLAG]) or gone()))
            return False
        return self._question.done() and self.require_answer(0.0)

    def dead(self, ranks: Sequence[int], after: int) -> set[int]:
        """The ranks that have missed so many heartbeats in a row.

        One is missed each time that this process looks and finds no new one. Time alone says
        nothing: this process may have been stopped, or the store.
        """
        keys, now = [str(self._global_ranks[rank]) for rank in ranks], time.monotonic()
        if now >= self._next_look and self._heartbeats.check(keys):
            self._next_look = now + _BEAT_SECONDS
            for rank, beat in zip(ranks, self._heartbeats.multi_get(keys), strict=True):
                last, missed = self._beats[rank]
                self._beats[rank] = (beat, missed + 1 if beat == last else 0)
        return {rank for rank in ranks if self._beats[rank][1] >= after}

    def require_answer(self, timeout_seconds: float) -> bool:
        """Wait for the answer to the last question, since until then the store answers nothing
        else; False without a question, StoreSilentError if there is no answer.
        """
        question, self._question = self._question, None
        return question is not None and _wait_for(question, timeout_seconds)

    def raise_flag(self) -> None:
        """Let ranks that wait in a collective know that it will not end."""
        self.store.set(_FLAG, "1")

    def put_payload(self, number: int, payload: bytes) -> None:
        """Write the payload of this rank in a step."""
        self._written.append((number, f"{number}/value/{self._rank}"))
        self.store.set(self._written[-1][1], payload.decode("latin-1"))

    def payload(self, number: int, rank: int) -> bytes:
        """The payload of a rank in a step."""
        found: bytes = self.store.get(f"{number}/value/{rank}").decode().encode("latin-1")
        return found

    def verdict(
        self, step: Record, deadline: float, patience: float, *, has_payload: bool
    ) -> tuple[int, Verdict]:
        """The verdict of all ranks on a step or on the one before it, with the number of that step.

        Other ranks have until ``deadline`` to come, and ``patience`` seconds to come back.
        """
        number = step.number
        # From now on no rank waits in a collective for longer than it takes to see the flag.
        back_by = min(deadline, time.monotonic()) + patience
        # Rank 0 decides first. It may be gone, or have left a step that others did not end.
        own_turn = 0.0 if self._rank == 0 else patience
        interval = _POLL_SECONDS
        if self._rank:
            interval = _SHORT_SECONDS + self._world_size / _RANKS_A_SECOND
        next_look = time.monotonic() + (interval if self._rank else 0.0)
        while True:
            if self._await([f"{number}/verdict"], 0.0 if self._rank == 0 else _SHORT_SECONDS):
                return number, self._read(f"{number}/verdict")
            if self._acknowledged != number - 1 and self._await([f"{number - 1}/verdict"], 0.0):
                last: Verdict = self._read(f"{number - 1}/verdict")
                if last.absent or last.is_lost:
                    return number - 1, last
            now = time.monotonic()
            if now >= min(next_look, back_by + own_turn):
                here = [r for r in range(self._world_size) if self.store.check([f"at/{r}"])]
                found = decide(
                    {rank: self._read(f"at/{rank}") for rank in here},
                    step,
                    self._world_size,
                    has_payload=has_payload,
                    is_late=now > deadline + own_turn,
                    is_too_late=now > back_by + own_turn,
                    dead=self.dead(range(self._world_size), _DEAD_AFTER),
                )
                if found is not None:
                    self.store.compare_set(f"{number}/verdict", "", _text(found))
                    continue
                next_look = time.monotonic() + interval
            if self._rank == 0:
                time.sleep(_POLL_SECONDS)

    def acknowledge(self, number: int, verdict: Verdict, timeout_seconds: float) -> None:
        """Write that this rank has read a verdict and the payloads that it needs.

        Rank 0 waits for ``timeout_seconds`` until the others have read it.
        """
        self._acknowledged = number
        if self._rank:
            self.store.set(f"{number}/heard/{self._rank}", "1")
        else:
            # Rank 0 may hold the store: it must not end before all ranks have read the verdict.
            keys = [f"{number}/heard/{rank}" for rank in verdict.present if rank]
            self._await(keys, timeout_seconds)
            heard = (f"{number}/heard/{rank}" for rank in range(1, self._world_size))
            self._written += ((number, key) for key in (f"{number}/verdict", *heard))
        if not verdict.absent:
            self._delete_before(number)

    def clear(self) -> None:
        """Delete the keys of this rank, once no rank will read them."""
        for key in (f"at/{self._rank}", *([_FLAG] if self._rank == 0 else [])):
            self.store.delete_key(key)
        self._delete_before(sys.maxsize)

    def _delete_before(self, number: int) -> None:
        """Delete the keys of earlier steps: all ranks have come to this one."""
        for step, key in self._written:
            if step < number:
                self.store.delete_key(key)
        self._written = [row for row in self._written if row[0] >= number]

    def _await(self, keys: Sequence[str], timeout_seconds: float) -> bool:
        if not timeout_seconds or not keys:
            return not keys or bool(self.store.check(list(keys)))
        try:
            self.store.wait(list(keys), timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return False
        return True

    def _read(self, key: str) -> Any:
        return pickle.loads(self.store.get(key).decode().encode("latin-1"))  # noqa: S301 - by our own ranks


def asked(question: Callable[[], T], timeout_seconds: float) -> T:
    """The result of a function that may wait for a store for ever; StoreSilentError if it does not
    return in time.
    """
    return _wait_for(_in_thread(question), timeout_seconds)


def _wait_for(answer: Future[T], timeout_seconds: float) -> T:
    try:
        return answer.result(max(0.0, timeout_seconds))
    except TimeoutError as error:
        if answer.done():
            raise
        raise StoreSilentError from error


def _text(value: object) -> str:
    return pickle.dumps(value).decode("latin-1")


def _in_thread(question: Callable[[], T]) -> Future[T]:
    answer: Future[T] = Future()
    threading.Thread(
        target=fill, args=(answer, question), name="asking the store", daemon=True
    ).start()
    return answer


_MAKING: Final = "making a channel"
_CLEARING_SECONDS: Final = 5.0
_HEARING_SECONDS: Final = 5.0
_SHORTEST_PATIENCE_SECONDS: Final = 5.0
_LONGEST_PATIENCE_SECONDS: Final = 30.0
_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class Steps:
    """The steps of one comm. Creating one is a step too, and collective over ``group`` (gloo)."""

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
        self._notes = RankNotes(self._arrivals, self._rank, self._global_ranks)
        start_heartbeat(default_store)
        self.channel = Channel(group, tensor_group, self._notes.is_flagged)
        name = self._random_name()
        self._notes.store = dist.distributed_c10d.PrefixStore(name, self._arrivals)

    def _random_name(self) -> str:
        """A random name, chosen by rank 0, for a part of the store that only this comm uses."""
        store, step = self._arrivals, _MAKING
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        self._answered(step, lambda: store.set(keys[self._rank], "1"))
        drawn = [uuid.uuid4().int >> 66 if self._rank == 0 else 0 for _ in range(2)]
        deadline = time.monotonic() + self.timeout_seconds
        try:
            first, second = self.channel.maxima(drawn, deadline)
        except ContactLostError as error:

            def absent() -> dict[int, Absence]:
                self._notes.raise_flag()
                ranks = enumerate(keys)
                return {rank: Absence.AWAY for rank, key in ranks if not store.check([key])}

            patience = _patience(self.timeout_seconds)
            gone = self._answered(step, lambda: asked(absent, patience))
            if gone:
                raise self._absent_error(gone, step) from error
            raise contact_lost(step, error, [self._global_ranks[self._rank]]) from error
        return f"{first:x}.{second:x}"

    def clear(self) -> None:
        """Delete the keys of this rank in the store, once no rank will read them."""

        def clear() -> None:
            if self._number < 2:  # the second step has deleted it
                self._arrivals.delete_key(f"here/{self._rank}")
            self._notes.clear()

        try:
            asked(clear, _CLEARING_SECONDS)
        except (StoreSilentError, dist.DistError) as error:
            logger.debug("keys stay in the store: %s", error)

    @contextmanager
    def start_step(self, label: str, value: Any = None) -> Iterator[tuple[Record, float]]:
        """One step of all ranks, by one thread at a time: its record, and its deadline."""
        with self._one_thread():
            deadline = time.monotonic() + self.timeout_seconds
            self._number += 1
            record = Record(self._number, label, value, self._last_value)
            self._answered(label, lambda: self._notes.require_answer(self.timeout_seconds))
            # Written before the collective, because that does not tell who is missing if it fails.
            self._note(record)
            if self._number == 2:
                # All ranks have been in the first step, so this comm exists on all of them.
                self._answered(label, lambda: self._arrivals.delete_key(f"here/{self._rank}"))
            self._last_value = value
            yield record, deadline

    @contextmanager
    def start_tensor_step(self) -> Iterator[float]:
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
                self.decide_in_store(step, deadline)
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

    def meet(
        self,
        step: Record,
        deadline: float,
        numbers: tuple[int, int],
        content: str = "",
        extra: int = 0,
    ) -> tuple[bool, tuple[int, int] | None]:
        """Wait for all ranks at a step: whether all have the same ``content`` and no ``extra``, and
        the maxima of two numbers over all ranks, None if the group failed.

        It takes one all-reduce of one number, which costs half as much as one of four numbers: each
        rank adds ``extra`` to a digest of the step. If the ranks are at different steps, or
        ``content`` differs, the sum is a random number of 64 bits, the same on every rank. Then all
        ranks see that it cannot be that of the digest alone, and look for the reason. If they do
        not make the same call, all raise the same CheckpointingException.
        """
        if self.is_broken:
            return False, None
        expected = xxhash.xxh3_64_intdigest(f"{step.label}: {content}".encode())
        signature = xxhash.xxh3_64_intdigest(step.label.encode()) >> 2
        try:
            total = self.channel.total(expected + extra, deadline)
            if (total - self._world_size * expected) % 2**64 == 0:
                return True, numbers
            first, second, highest, lowest = self.channel.maxima(
                (*numbers, signature, -signature), deadline
            )
        except ContactLostError as error:
            self._lose_group(step.label, error)
            return False, None
        if highest != -lowest:
            self.decide_in_store(step, deadline)
            raise AssertionError("the records of the ranks do not show what they call")
        return False, (first, second)

    def transferred(self, step: Record, transfer: Callable[[], T]) -> T | None:
        """The result of ``transfer``; None if the group failed."""
        if self.is_broken:
            return None
        try:
            result = transfer()
        except ContactLostError as error:
            self._lose_group(step.label, error)
            return None
        # This rank may have its result while another one waits for ever.
        self._note(replace(step, state=State.DONE))
        return result

    def _lose_group(self, label: str, error: ContactLostError) -> None:
        logger.debug("at %s: %s", label, error)
        self.is_broken = True

    def decide_in_store(
        self,
        step: Record,
        deadline: float,
        payload: bytes | None = None,
        *,
        sources: Sequence[int] = (0,),
        everywhere: bool = True,
    ) -> tuple[Verdict, list[bytes]]:
        """End a step through the store: the verdict, and the payloads of the ranks ``sources``.

        ``payload`` is None in a step without payloads. If not ``everywhere``, only rank 0 gets
        them. The other ranks have until ``deadline`` to come. A CheckpointingException is the same
        on all ranks that are here.
        """
        patience = _patience(self.timeout_seconds)
        failure = step.value.summary if isinstance(step.value, Failure) else None
        call = described(step.label, failure)

        def decided() -> tuple[int, Verdict, list[bytes]]:
            if self.is_broken:
                self._notes.raise_flag()
            if payload is not None and self._rank in sources:
                self._notes.put_payload(step.number, payload)
            self._notes.note(replace(step, state=State.OUTSIDE, call=call))
            has_payload = payload is not None
            number, verdict = self._notes.verdict(step, deadline, patience, has_payload=has_payload)
            is_whole = not (verdict.absent or verdict.is_lost or verdict.calls)
            is_reader = has_payload and (everywhere or self._rank == 0)
            is_passed = is_reader and is_whole and number == step.number
            payloads = [self._notes.payload(number, rank) for rank in sources if is_passed]
            # A frozen rank acknowledges nothing, and the others are already at the next step.
            hearing = patience / 2 if self.is_broken else _HEARING_SECONDS
            self._notes.acknowledge(number, verdict, hearing)
            return number, verdict, payloads

        # The others decide up to two patiences after the deadline; then their verdict is read.
        longest = deadline - time.monotonic() + 4 * patience
        number, verdict, payloads = self._answered(step.label, lambda: asked(decided, longest))
        if number < step.number:
            # The others failed in a step that this rank had ended: all go on from that step.
            self._number, self._last_value = number, None
            self._note(Record(number, verdict.label, state=State.OUTSIDE))
        if verdict.calls:
            raise different_calls(verdict.calls, self._global_ranks)
        # An agreement itself reports absent ranks, as failures.
        is_whole = number == step.number and not verdict.is_lost
        if verdict.absent and not (is_whole and is_agreement(step.label)):
            raise self._absent_error(verdict.absent, verdict.label)
        if verdict.is_lost:
            problem = "some ranks have what others lack"
            present = (self._global_ranks[rank] for rank in verdict.present)
            raise contact_lost(verdict.label, problem, present)
        return verdict, payloads

    def _answered(self, label: str, question: Callable[[], T]) -> T:
        try:
            if self._store_is_lost:
                raise StoreSilentError
            return question()
        except (StoreSilentError, dist.DistError) as error:
            self._store_is_lost |= isinstance(error, StoreSilentError)
            raise store_error(label, error, self._world_size, self._global_ranks) from error

    def _note(self, record: Record) -> None:
        self._answered(record.label, lambda: self._notes.note(record))

    def _absent_error(self, absent: Mapping[int, Absence], label: str) -> Exception:
        step = step_of(label)
        failures = absent_ranks(absent, step, self.timeout_seconds)
        return merge_failures(step, failures, self._world_size, self._global_ranks)


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
