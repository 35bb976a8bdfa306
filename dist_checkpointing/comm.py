"""How ranks talk to each other: a small protocol, and the three worlds it runs in.

``agree`` is the only way an exception crosses ranks: each rank brings its error or nothing, and all
leave with the same error or with nothing. ``exchange``, ``from_rank0`` and ``agreed`` are built on
it, so a reader finds every such point by searching for these four names.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    RankFailedError,
    merge_findings,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank says about its exception: plain text, and the error itself if it is ours."""

    error: CheckpointingException | None
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        try:
            text = "".join(traceback.format_exception(error))
            summary = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - an error whose __str__ fails must still be heard of
            text = "".join(traceback.format_tb(error.__traceback__))
            summary = f"{type(error).__name__} (which cannot be printed)"
        if isinstance(error, CheckpointingException):
            try:
                pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
            except Exception:  # noqa: BLE001 - a foreign subclass that cannot travel goes as text
                return cls(None, summary, text)
            return cls(error, summary, text)
        return cls(None, summary, text)


def _merge(step: str, failures: Mapping[int, _Failure], world_size: int) -> CheckpointingException:
    """The one error that all ranks raise for these failures."""
    errors = {rank: failure.error for rank, failure in sorted(failures.items())}
    classes = {type(error) for error in errors.values()}
    first = next(iter(errors.values()))
    if first is not None and len(classes) == 1 and not isinstance(first, RankFailedError):
        if world_size == 1:
            return first
        findings = []
        for rank, error in errors.items():
            assert error is not None
            if not error.findings or error.message != first.message:
                findings.append(Finding(error.message, ranks=(rank,)))
            findings += [f if f.ranks else replace(f, ranks=(rank,)) for f in error.findings]
        return type(first)(first.message, merge_findings(findings))
    findings = []
    for rank, failure in sorted(failures.items()):
        if isinstance(failure.error, RankFailedError):
            findings += list(failure.error.findings)
        else:
            findings.append(Finding(problem=failure.summary, ranks=(rank,)))
    ranks = ", ".join(map(str, sorted(failures)))
    return RankFailedError(
        f"{step} failed on rank {ranks} of {world_size}",
        merge_findings(findings),
        {rank: failure.traceback for rank, failure in failures.items() if failure.traceback},
    )


class Comm(ABC):
    """A group of ranks. All methods are collective: every rank calls them in the same order."""

    rank: int
    world_size: int

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """``value`` of rank 0."""

    @abstractmethod
    def _all_failures(self, step: str, failure: _Failure | None) -> Mapping[int, _Failure]:
        """The failures that ranks bring to ``step``; an absent rank counts as failed."""

    def agree(self, step: str, error: Exception | None) -> None:
        """Raise the same error on every rank if any rank brings one.

        A class of ours that all failing ranks share is raised as that class, with the findings of
        all ranks; anything else is a RankFailedError with the original tracebacks as text.

        Args:
            step: what was being done, for the message.
            error: what went wrong on this rank, or None.
        """
        failures = self._all_failures(step, None if error is None else _Failure.of(error))
        if failures:
            merged = _merge(step, failures, self.world_size)
            if merged is error:
                raise merged
            raise merged from error

    @contextmanager
    def agreed(self, step: str) -> Iterator[None]:
        """Run the body on every rank; leave it together, or raise the same error together."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            error = raised
        self.agree(step, error)

    def exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        """``produce()`` of every rank, in rank order; all raise alike if it fails on any."""
        with self.agreed(step):
            packed = self._pack(produce())
        return [self._unpack(value) for value in self.all_gather(packed)]

    def from_rank0(self, step: str, produce: Callable[[], T]) -> T:
        """``produce()`` as rank 0 computes it; all ranks raise alike if it fails there."""
        packed: Any = None
        with self.agreed(step):
            if self.rank == 0:
                packed = self._pack(produce())
        packed = self.broadcast(packed)
        result: T = self._unpack(packed)
        return result

    # A value that cannot travel must be noticed inside the agreement, not in the collective after
    # it, where the other ranks would wait in vain.

    def _pack(self, value: Any) -> Any:
        return value

    def _unpack(self, packed: Any) -> Any:
        return packed


class SingleProcess(Comm):
    """A world of one: no process group needed."""

    rank = 0
    world_size = 1

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def _all_failures(self, step: str, failure: _Failure | None) -> Mapping[int, _Failure]:  # noqa: ARG002
        return {} if failure is None else {0: failure}


def _absent(rank: int, step: str, timeout_seconds: float) -> _Failure:
    problem = f"did not reach '{step}' within {timeout_seconds:g} s: dead, hung or far behind"
    return _Failure(RankFailedError("", [Finding(problem=problem, ranks=(rank,))]), problem, "")


class ThreadComm(Comm):
    """One rank of many that live as threads in this process; see ``testing.run_ranks``.

    Values are handed over by reference: treat what you receive as read-only.
    """

    class Meeting:
        """The place where the threads of one world meet."""

        def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
            self.world_size = world_size
            self.timeout_seconds = timeout_seconds
            self.first_to_leave: int | None = None
            self._changed = threading.Condition()
            self._round = 0
            self._brought: dict[int, Any] = {}
            self._last_round: list[Any] = []
            self._gone: set[int] = set()
            self._given_up: set[int] = set()

        def leave(self, rank: int) -> None:
            """Let nobody wait for a rank that is gone."""
            with self._changed:
                if self.first_to_leave is None:
                    self.first_to_leave = rank
                self._gone.add(rank)
                self._changed.notify_all()

        def meet(self, rank: int, value: Any) -> tuple[list[Any], set[int]]:
            """What all ranks brought, or the ranks that did not come (in time)."""
            with self._changed:
                if self._given_up:
                    return [], self._given_up
                this_round = self._round
                self._brought[rank] = value
                if len(self._brought) == self.world_size:
                    self._last_round = [self._brought[r] for r in range(self.world_size)]
                    self._brought = {}
                    self._round += 1
                    self._changed.notify_all()
                    return self._last_round, set()
                self._changed.wait_for(
                    lambda: (
                        self._round != this_round
                        or self._given_up
                        or self._gone - self._brought.keys()
                    ),
                    self.timeout_seconds,
                )
                if self._round != this_round:
                    # The next round cannot end, and replace this, before this rank is in it.
                    return self._last_round, set()
                if not self._given_up:
                    # A rank that comes too late must not meet those who went on without it.
                    self._given_up = set(range(self.world_size)) - self._brought.keys()
                    self._changed.notify_all()
                return [], self._given_up

    def __init__(self, meeting: ThreadComm.Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self._meeting = meeting

    def all_gather(self, value: T) -> list[T]:
        values: list[T] = self._meet("exchange", value)
        return values

    def broadcast(self, value: T) -> T:
        return self.all_gather(value)[0]

    def _all_failures(self, step: str, failure: _Failure | None) -> Mapping[int, _Failure]:
        outcomes: list[_Failure | None] = self._meet(step, failure)
        return {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}

    def _meet(self, step: str, value: Any) -> list[Any]:
        values, absent = self._meeting.meet(self.rank, value)
        if absent:
            seconds = self._meeting.timeout_seconds
            failures = {rank: _absent(rank, step, seconds) for rank in sorted(absent)}
            raise _merge(step, failures, self.world_size)
        return values


class TorchComm(Comm):
    """The ranks of a torch.distributed process group.

    Objects and tables travel over ``group``, which must be a CPU (gloo) group. Agreements go
    through the key-value store of torch.distributed instead, one key a rank, because a collective
    cannot tell which rank it is waiting for: a rank that does not show up within
    ``timeout_seconds`` is named on all others. Creating one is collective over the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout_seconds = timeout_seconds
        self._group = group
        self._agreements = 0
        name = self.broadcast(uuid.uuid4().hex)
        # torch has no public way to the store that every process group has already joined.
        default_store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        self._store = dist.distributed_c10d.PrefixStore(f"dist_checkpointing/{name}", default_store)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        with self._contact_loss_named():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        values: list[Any] = [value]
        source = dist.get_global_rank(self._group, 0)
        with self._contact_loss_named():
            dist.broadcast_object_list(values, src=source, group=self._group)
        result: T = values[0]
        return result

    def _pack(self, value: Any) -> bytes:
        return pickle.dumps(value)

    def _unpack(self, packed: Any) -> Any:
        return pickle.loads(packed)  # noqa: S301 - written by our own ranks

    @contextmanager
    def _contact_loss_named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            finding = Finding(
                problem=f"lost contact with another rank: {error}",
                ranks=(self.rank,),
                remedy="A process probably died; see its log.",
            )
            raise RankFailedError("a collective failed", [finding]) from error

    def _all_failures(self, step: str, failure: _Failure | None) -> Mapping[int, _Failure]:
        try:
            failures, everybody_came = self._verdict(step, failure)
        except dist.DistError as error:
            problem = f"lost contact with the store, which rank 0 or the launcher holds: {error}"
            gone = RankFailedError("", [Finding(problem=problem, ranks=(0,))])
            return {0: _Failure(gone, problem, "")}
        if everybody_came:
            # If rank 0 holds the store, it must not end before all have read the verdict.
            with suppress(RuntimeError):
                dist.barrier(self._group)
        return failures

    def _verdict(self, step: str, failure: _Failure | None) -> tuple[Mapping[int, _Failure], bool]:
        number = self._agreements
        self._agreements += 1
        own_key, verdict_key = f"{number}/{self.rank}", f"{number}/verdict"
        self._store.set(own_key, pickle.dumps(failure).decode("latin-1"))
        verdict: tuple[Mapping[int, _Failure], bool]
        if self.rank == 0:
            verdict = self._collect(step, number)
            self._store.set(verdict_key, pickle.dumps(verdict).decode("latin-1"))
            return verdict
        # Rank 0 itself may wait the full time for a third rank before it speaks.
        patience = self.timeout_seconds * 1.25 + 5
        if not self._wait([verdict_key], patience):
            return {0: _absent(0, step, patience)}, False
        verdict = self._read(verdict_key)
        return verdict

    def _collect(self, step: str, number: int) -> tuple[Mapping[int, _Failure], bool]:
        keys = [f"{number}/{rank}" for rank in range(self.world_size)]
        if self._wait(keys, self.timeout_seconds):
            present = keys
        else:
            present = [key for key in keys if self._store.check([key])]
        failures: dict[int, _Failure] = {}
        for rank, key in enumerate(keys):
            failure = (
                self._read(key) if key in present else _absent(rank, step, self.timeout_seconds)
            )
            if failure is not None:
                failures[rank] = failure
            self._store.delete_key(key)
        # All ranks are here, so all have read the verdict before this one.
        if number and len(present) == len(keys):
            self._store.delete_key(f"{number - 1}/verdict")
        return failures, len(present) == len(keys)

    def _wait(self, keys: Sequence[str], timeout_seconds: float) -> bool:
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return False
        return True

    def _read(self, key: str) -> Any:
        return pickle.loads(self._store.get(key).decode().encode("latin-1"))  # noqa: S301


_comms: weakref.WeakKeyDictionary[Any, TorchComm] = weakref.WeakKeyDictionary()


def default_comm() -> Comm:
    """The comm of this process: the world of torch.distributed if it is initialised, else alone.

    The CPU group it needs is made on first use (a collective call) and kept as long as the world.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    world = dist.group.WORLD
    comm = _comms.get(world)
    if comm is None:
        timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
        comm = TorchComm(dist.new_group(backend="gloo", timeout=timeout))
        _comms[world] = comm
    return comm
