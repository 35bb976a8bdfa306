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
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch.distributed as dist
import xxhash
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its stubs

from dist_checkpointing.comm.channel import (
    BEAT_SECONDS,
    HEARTBEATS,
    SHORT_SECONDS,
    Channel,
    ContactLostError,
    StoreKeys,
    StoreSilentError,
)
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
from dist_checkpointing.errors import CheckpointingException, Finding

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
_FLAG: Final = "broken"
_POLL_SECONDS: Final = 0.01
_RANKS_A_SECOND: Final = 256
_DEAD_AFTER: Final = 5
"""So many heartbeats in a row a dead rank has missed, once a collective has failed."""
_GONE_AFTER: Final = 100
"""The same while all connections stand: a rank may be stopped, or its machine may be lost."""


class RankNotes:
    """Where each rank of a comm is, in a part of the store that nothing else uses."""

    def __init__(self, keys: StoreKeys, rank: int, global_ranks: Sequence[int]) -> None:
        self.keys = keys
        self._rank = rank
        self._world_size = len(global_ranks)
        self._heartbeats = StoreKeys(HEARTBEATS, keys.timeout_seconds)
        self._beats = dict.fromkeys(range(self._world_size), (b"", 0))
        self._next_look = 0.0
        self._global_ranks = global_ranks
        self._acknowledged: int | None = None
        self._written: list[tuple[int, str]] = []

    def note(self, record: Record) -> None:
        """Write where this rank is; the store sends no answer to this."""
        self.keys.ask(Store.set, f"at/{self._rank}", _text(record))

    def is_flagged(self) -> bool:
        """Whether a rank has reported that the group is broken, or has been gone for long."""
        # All watch the rank that watches all.
        watched = range(self._world_size if self._rank == 0 else 1)
        return self.keys.ask(Store.check, [_FLAG]) or bool(self.dead(watched, _GONE_AFTER))

    def dead(self, ranks: Sequence[int], after: int) -> set[int]:
        """The ranks that have missed so many heartbeats in a row.

        One is missed each time that this process looks and finds no new one. Time alone says
        nothing: this process may have been stopped, or the store.
        """
        keys, now = [str(self._global_ranks[rank]) for rank in ranks], time.monotonic()
        if now >= self._next_look and self._heartbeats.ask(Store.check, keys):
            self._next_look = now + BEAT_SECONDS
            beats = self._heartbeats.ask(Store.multi_get, keys)
            for rank, beat in zip(ranks, beats, strict=True):
                last, missed = self._beats[rank]
                self._beats[rank] = (beat, missed + 1 if beat == last else 0)
        return {rank for rank in ranks if self._beats[rank][1] >= after}

    def put_payload(self, number: int, payload: bytes) -> None:
        """Write the payload of this rank in a step."""
        self._written.append((number, f"{number}/value/{self._rank}"))
        self.keys.ask(Store.set, self._written[-1][1], payload.decode("latin-1"))

    def payload(self, number: int, rank: int) -> bytes:
        """The payload of a rank in a step."""
        return self.keys.ask(Store.get, f"{number}/value/{rank}").decode().encode("latin-1")

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
            interval = SHORT_SECONDS + self._world_size / _RANKS_A_SECOND
        next_look = time.monotonic() + (interval if self._rank else 0.0)
        while True:
            if self.keys.wait([f"{number}/verdict"], 0.0 if self._rank == 0 else SHORT_SECONDS):
                return number, self._read(f"{number}/verdict")
            if self._acknowledged != number - 1 and self.keys.wait([f"{number - 1}/verdict"]):
                last: Verdict = self._read(f"{number - 1}/verdict")
                if last.absent or last.is_lost:
                    return number - 1, last
            now = time.monotonic()
            if now >= min(next_look, back_by + own_turn):
                here = [r for r in range(self._world_size) if self.keys.wait([f"at/{r}"])]
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
                    self.keys.ask(Store.compare_set, f"{number}/verdict", "", _text(found))
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
            self.keys.ask(Store.set, f"{number}/heard/{self._rank}", "1")
        else:
            # Rank 0 may hold the store: it must not end before all ranks have read the verdict.
            keys = [f"{number}/heard/{rank}" for rank in verdict.present if rank]
            self.keys.wait(keys, timeout_seconds)
            heard = (f"{number}/heard/{rank}" for rank in range(1, self._world_size))
            self._written += ((number, key) for key in (f"{number}/verdict", *heard))
        if not verdict.absent:
            self._delete_before(number)

    def clear(self) -> None:
        """Delete the keys of this rank, once no rank will read them."""
        for key in (f"at/{self._rank}", *([_FLAG] if self._rank == 0 else [])):
            self.keys.delete(key)
        self._delete_before(sys.maxsize)

    def _delete_before(self, number: int) -> None:
        """Delete the keys of earlier steps: all ranks have come to this one."""
        for step, key in self._written:
            if step < number:
                self.keys.delete(key)
        self._written = [row for row in self._written if row[0] >= number]

    def _read(self, key: str) -> Any:
        text = self.keys.ask(Store.get, key).decode()
        return pickle.loads(text.encode("latin-1"))  # noqa: S301 - by our own ranks


def _text(value: object) -> str:
    return pickle.dumps(value).decode("latin-1")


_MAKING: Final = "making a channel"
_SHORTEST_PATIENCE_SECONDS: Final = 5.0
_LONGEST_PATIENCE_SECONDS: Final = 30.0
_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class Steps:
    """The steps of one comm. Creating one is a step too, and collective over ``group`` (gloo)."""

    def __init__(
        self, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup, timeout_seconds: float
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.is_broken: bool = False
        self._rank, self._world_size = group.rank(), group.size()
        self._global_ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._number = 0
        self._last_value: Any = None
        number = next(_numbers.setdefault(group, itertools.count()))
        place = f"dist_checkpointing/{group.group_name}/{number}"
        self._arrivals = StoreKeys(place, timeout_seconds)
        self._notes = RankNotes(self._arrivals, self._rank, self._global_ranks)
        self.channel: Channel = Channel(group, tensor_group, self._notes.is_flagged)
        with self._one_thread(_MAKING) as deadline:
            place = f"{place}/{self._random_name(deadline)}"
        self.keys = self._notes.keys = StoreKeys(place, timeout_seconds)

    def _random_name(self, deadline: float) -> str:
        """A random name, chosen by rank 0, for a part of the store that only this comm uses."""
        keys = [f"here/{rank}" for rank in range(self._world_size)]
        self._arrivals.ask(Store.set, keys[self._rank], "1")
        drawn = [uuid.uuid4().int >> 66 if self._rank == 0 else 0 for _ in range(2)]
        try:
            first, second = self.channel.maxima(drawn, deadline)
        except ContactLostError as error:
            self._arrivals.ask(Store.set, _FLAG, "1")
            ranks = enumerate(keys)
            gone = {rank: Absence.LATE for rank, key in ranks if not self._arrivals.wait([key])}
            if gone:
                raise self._absent_error(gone, _MAKING) from error
            raise contact_lost(_MAKING, error, [self._global_ranks[self._rank]]) from error
        return f"{first:x}.{second:x}"

    def clear(self) -> None:
        """Delete the keys of this rank in the store, once no rank will read them."""
        self._arrivals.delete(f"here/{self._rank}")
        self._notes.clear()

    @contextmanager
    def start_step(self, label: str, value: Any = None) -> Iterator[tuple[Record, float]]:
        """One step of all ranks, by one thread at a time: its record, and its deadline."""
        with self._one_thread(label) as deadline:
            self._number += 1
            record = Record(self._number, label, value, self._last_value)
            # Written before the collective, because that does not tell who is missing if it fails.
            self._notes.note(record)
            self._last_value = value
            yield record, deadline

    @contextmanager
    def start_tensor_step(self) -> Iterator[float]:
        """One step that passes a tensor. It is fast: a record is only written if the step fails."""
        with self._one_thread(TENSORS) as deadline:
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
    def _one_thread(self, label: str) -> Iterator[float]:
        """The deadline of what one thread does at a time; the error if the store fails in it."""
        if self._owner != os.getpid():
            raise forked_error(self._owner)
        if not self._busy.acquire(blocking=False):
            finding = Finding(
                "another thread of this process is in a step with the other ranks",
                ranks=(self._rank,),
                remedy="Give each thread a duplicate() of the comm, or let them take turns.",
            )
            raise CheckpointingException("two threads use one comm at once", [finding])
        self._notes.keys.timeout_seconds = self.timeout_seconds
        try:
            yield time.monotonic() + self.timeout_seconds
        except (StoreSilentError, dist.DistError) as error:
            raise store_error(label, error) from error
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
        self._notes.note(replace(step, state=State.DONE))
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
        # So many seconds ranks that wait in a collective have to find out that it will not end.
        longest = min(_LONGEST_PATIENCE_SECONDS, self.timeout_seconds / 60)
        patience = max(_SHORTEST_PATIENCE_SECONDS, longest)
        failure = step.value.summary if isinstance(step.value, Failure) else None
        call = described(step.label, failure)

        if self.is_broken:
            # Ranks that wait in a collective are to know that it will not end.
            self.keys.ask(Store.set, _FLAG, "1")
        if payload is not None and self._rank in sources:
            self._notes.put_payload(step.number, payload)
        self._notes.note(replace(step, state=State.OUTSIDE, call=call))
        has_payload = payload is not None
        number, verdict = self._notes.verdict(step, deadline, patience, has_payload=has_payload)
        is_whole = not (verdict.absent or verdict.is_lost or verdict.calls)
        is_reader = has_payload and (everywhere or self._rank == 0)
        is_passed = is_reader and is_whole and number == step.number
        payloads = [self._notes.payload(number, rank) for rank in sources if is_passed]
        self._notes.acknowledge(number, verdict, patience / 2)
        if number < step.number:
            # The others failed in a step that this rank had ended: all go on from that step.
            self._number, self._last_value = number, None
            self._notes.note(Record(number, verdict.label, state=State.OUTSIDE))
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

    def _absent_error(self, absent: Mapping[int, Absence], label: str) -> Exception:
        failures = absent_ranks(absent, step_of(label), self.timeout_seconds)
        return merge_failures(step_of(label), failures, self._world_size, self._global_ranks)


def store_error(label: str, error: Exception) -> CheckpointingException:
    """The error of a step in which the store of torch.distributed fails."""
    problem = "does not answer" if isinstance(error, StoreSilentError) else f"failed: {error}"
    return contact_lost(label, f"the store, which rank 0 or the launcher holds, {problem}", [0])


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
