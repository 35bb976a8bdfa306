"""Notes of the ranks for each other, in the key-value store of torch.distributed."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from dist_checkpointing.comm.records import Record, Verdict, conclude

T = TypeVar("T")

_FLAG: Final = "broken"
_SHORT_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01
_RANKS_A_SECOND: Final = 256


class StoreSilentError(Exception):
    """The store did not answer in time."""


class Board:
    """The notes of one comm.

    A store whose host is frozen never answers. So a thread asks, and the caller waits for it only
    for a limited time.

    Args:
        store: key-value store of all ranks, over a connection that nothing else uses.
        rank: rank of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._question: Future[bool] | None = None
        self._acknowledged: int | None = None
        self._verdicts: list[int] = []
        self._written: list[int] = []

    def note(self, record: Record) -> None:
        """Write where this rank is; the store sends no answer to this."""
        self._set(f"at/{self._rank}", record)

    def is_flagged(self) -> bool:
        """Whether a rank has reported that the group is broken; does not wait for the answer."""
        if self._question is None:
            self._question = _in_thread(lambda: bool(self._store.check([_FLAG])))
        elif self._question.done():
            question, self._question = self._question, None
            return question.result()
        return False

    def require_answer(self, timeout_seconds: float) -> None:
        """Wait for the answer to the last question; until then the store answers nothing else.

        Raises:
            StoreSilentError: if there is no answer.
        """
        if self._question is not None:
            question, self._question = self._question, None
            _wait_for(question, timeout_seconds)

    def raise_flag(self) -> None:
        """Let ranks that wait in a collective know that it will not end."""
        self._store.set(_FLAG, "1")

    def put_payload(self, number: int, payload: bytes) -> None:
        """Write the payload of this rank in a step."""
        self._store.set(f"{number}/value/{self._rank}", payload.decode("latin-1"))
        self._written.append(number)

    def payload(self, number: int, rank: int) -> bytes:
        """The payload of a rank in a step."""
        found: bytes = self._store.get(f"{number}/value/{rank}").decode().encode("latin-1")
        return found

    def verdict(
        self, step: Record, deadline: float, patience: float, *, has_payload: bool
    ) -> tuple[int, Verdict]:
        """The verdict of all ranks on a step or on the one before it, with the number of that step.

        Args:
            step: the record that this rank has written.
            deadline: when the time of the other ranks to come ends, on the monotonic clock.
            patience: how many seconds they have to come back.
            has_payload: see ``conclude``.
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
                found = conclude(
                    self._records(),
                    step,
                    self._world_size,
                    has_payload=has_payload,
                    is_late=now > deadline + own_turn,
                    is_too_late=now > back_by + own_turn,
                )
                if found is not None:
                    self._store.compare_set(f"{number}/verdict", "", _text(found))
                    continue
                next_look = time.monotonic() + interval
            if self._rank == 0:
                time.sleep(_POLL_SECONDS)

    def acknowledge(self, number: int, verdict: Verdict, timeout_seconds: float) -> None:
        """Write that this rank has read a verdict and the payloads that it needs.

        Args:
            number: number of the step.
            verdict: the verdict on it.
            timeout_seconds: how long rank 0 waits until the others have read it.
        """
        self._acknowledged = number
        self._verdicts.append(number)
        if self._rank:
            self._store.set(f"{number}/heard/{self._rank}", "1")
        else:
            # Rank 0 may hold the store: it must not end before all ranks have read the verdict.
            keys = [f"{number}/heard/{rank}" for rank in verdict.present if rank]
            self._await(keys, timeout_seconds)
        if not verdict.absent:
            self._forget_before(number)

    def clear(self) -> None:
        """Delete the keys of this rank, once no rank will read them."""
        keys = [f"at/{self._rank}", *(f"{number}/value/{self._rank}" for number in self._written)]
        if self._rank == 0:
            keys.append(_FLAG)
            keys += [key for number in self._verdicts for key in self._verdict_keys(number)]
        for key in keys:
            self._store.delete_key(key)

    def _verdict_keys(self, number: int) -> list[str]:
        heard = [f"{number}/heard/{rank}" for rank in range(1, self._world_size)]
        return [f"{number}/verdict", *heard]

    def _forget_before(self, number: int) -> None:
        """Delete the keys of earlier steps: all ranks have come to this one."""
        for old in [old for old in self._written if old < number]:
            self._store.delete_key(f"{old}/value/{self._rank}")
        self._written = [old for old in self._written if old >= number]
        if self._rank == 0:
            for old in [old for old in self._verdicts if old < number]:
                for key in self._verdict_keys(old):
                    self._store.delete_key(key)
            self._verdicts = [number]

    def _records(self) -> dict[int, Record]:
        keys = {rank: f"at/{rank}" for rank in range(self._world_size)}
        return {rank: self._read(key) for rank, key in keys.items() if self._store.check([key])}

    def _await(self, keys: Sequence[str], timeout_seconds: float) -> bool:
        if not timeout_seconds or not keys:
            return not keys or bool(self._store.check(list(keys)))
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return False
        return True

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, _text(value))

    def _read(self, key: str) -> Any:
        return pickle.loads(self._store.get(key).decode().encode("latin-1"))  # noqa: S301 - by our own ranks


def asked(question: Callable[[], T], timeout_seconds: float) -> T:
    """The result of a function that may wait for a store for ever.

    Raises:
        StoreSilentError: if it does not return in time.
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

    def run() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - the future carries it to the caller
            answer.set_exception(error)

    threading.Thread(target=run, name="asking the store", daemon=True).start()
    return answer
