"""Ranks that are processes of torch.distributed, and the default ranks: its world, or the members
of a process group.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its stubs
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from dist_checkpointing.comm import rank_failures
from dist_checkpointing.comm.channel import HEAD_BYTES, StoreKeys, StoreSilentError
from dist_checkpointing.comm.interface import Comm, SingleProcess
from dist_checkpointing.comm.timeouts import Steps, forked_error, store_error
from dist_checkpointing.errors import CheckpointingException, Finding

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
_LONGEST_SECONDS: Final = 1e9
_TIMEOUT_VARIABLE: Final = "DIST_CHECKPOINTING_TIMEOUT_SECONDS"
_DEFAULTS_OF_TORCH: Final = {default_pg_timeout, default_pg_nccl_timeout}
_NO_NUMBER: Final = 2**62
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)


class TorchComm(Comm):
    """The ranks of a torch.distributed process group.

    Everything travels over ``group``, which must be a CPU (gloo) group. Every step begins with an
    all-reduce of one number, by which all ranks find out whether they make the same call. If no
    rank failed, an agreement needs nothing else. Errors travel through the key-value store of
    torch.distributed, where each rank notes the step that it enters: a collective cannot tell which
    rank it is waiting for. If a rank does not come within ``timeout_seconds``, or does not come
    back, the error of all others names it; within half a minute, if its heartbeats show that it is
    dead. Once a collective has failed, the ranks talk through the store alone.

    Creating a TorchComm is collective over the group. A TorchComm deletes its keys from the store
    when nothing refers to it any more; a duplicate also destroys its group.

    Args:
        group: process group of the ranks.
        timeout_seconds: how long a step waits for the slowest rank; by default the environment
            variable DIST_CHECKPOINTING_TIMEOUT_SECONDS, the timeout of the group (unless it is
            torch's default), or half an hour.
        tensor_group: process group that carries tensors, if it is not ``group``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_seconds: float | None = None,
        *,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.global_ranks: Sequence[int] | None = dist.get_process_group_ranks(group)
        seconds = default_timeout_seconds(group) if timeout_seconds is None else timeout_seconds
        require_timeout(seconds, "timeout_seconds")
        self._group = group
        self._tensor_group = group if tensor_group is None else tensor_group
        self._steps = Steps(group, self._tensor_group, seconds)
        # A comm need not be closed: its keys go with it, and a duplicate also destroys its group.
        self._forget = weakref.finalize(self, _forget, self._steps, os.getpid())
        self._forget.atexit = False
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def timeout_seconds(self) -> float:
        """How long a step waits for the slowest rank."""
        return self._steps.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        require_timeout(seconds, "timeout_seconds")
        self._steps.timeout_seconds = seconds

    @property
    def kept(self) -> dict[str, Any]:
        ranks = tuple(dist.get_process_group_ranks(self._group))
        return _kept.setdefault(dist.group.WORLD, {}).setdefault(ranks, {})

    def all_gather(self, value: T) -> list[T]:
        return list(map(self._unpack, self._gather(rank_failures.GATHER, self._pack(value))[1]))

    def broadcast(self, value: T) -> T:
        return self._broadcast_agreed(rank_failures.BROADCAST, value)

    def _broadcast_agreed(self, step: str, value: T) -> T:
        payload, steps = self._pack(value) if self.rank == 0 else b"", self._steps
        with steps.start_step(step) as (record, deadline):
            if step == rank_failures.BROADCAST:  # the others come right after an agreement
                steps.meet(record, deadline, (0, 0))
            packed = steps.transferred(record, lambda: steps.channel.broadcast(payload, deadline))
            if packed is None:
                (packed,) = steps.decide_in_store(record, deadline, payload)[1]
        result: T = self._unpack(packed)
        return result

    def all_same(self, number: int | None) -> bool:
        # If all numbers are equal, their maximum and their minimum (as -max(-x)) are equal too.
        extremes = (_NO_NUMBER, _NO_NUMBER) if number is None else (number, -number)
        with self._steps.start_step(rank_failures.COMPARISON, number) as (step, deadline):
            is_same, highest = self._steps.meet(step, deadline, extremes, str(number))
            if is_same:
                return number is not None
            if highest is not None:
                return highest[0] == -highest[1]
            verdict, _ = self._steps.decide_in_store(step, deadline)
        return set(verdict.values.values()) == {number} - {None}

    @property
    def tensor_device(self) -> torch.device:
        config = dist.get_backend_config(self._tensor_group)
        if "cpu:" in config and "nccl" not in config:
            return torch.device("cpu")
        return torch.device(torch.accelerator.current_accelerator() or "cpu")

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        if self._steps.is_broken:
            given = self.all_gather(tensor.cpu() if self.rank == source else None)[source]
            assert given is not None
            tensor.copy_(given)
            return
        with self._steps.start_tensor_step() as deadline:
            self._steps.channel.broadcast_tensor(tensor, source, deadline)

    def shift(
        self, sent: torch.Tensor, target: int | None, source: int | None, num_bytes: int
    ) -> torch.Tensor:
        if self._steps.is_broken:
            return super().shift(sent, target, source, num_bytes)
        with self._steps.start_tensor_step() as deadline:
            return self._steps.channel.shift(sent, target, source, num_bytes, deadline)
        raise AssertionError("a step that fails raises")

    def duplicate(self) -> TorchComm:
        step = "making a channel for another thread"
        self.agree(step, None)
        with self.agreed(step):
            ranks = dist.get_process_group_ranks(self._group)
            is_part = len(ranks) < dist.get_world_size()
            timeout = timedelta(seconds=self.timeout_seconds)
            group = self._steps.keys.watch(
                lambda: dist.new_group(
                    ranks,
                    timeout=timeout,
                    backend="gloo",
                    # Ranks outside the group take no part in this.
                    use_local_synchronization=is_part,
                )
            )
            own = TorchComm(group, self.timeout_seconds)
        # torch itself keeps a group until it is destroyed.
        own._end = weakref.finalize(own, _end_group, group, os.getpid())
        own._end.atexit = False
        return own

    def close(self) -> None:
        self._forget()
        if self._end is None:
            _end_group(self._group, os.getpid())
        else:
            self._end()

    def _pack(self, value: Any) -> bytes:
        return pickle.dumps(value)

    def _unpack(self, packed: Any) -> Any:
        return pickle.loads(packed)  # noqa: S301 - by our own ranks

    def _all_outcomes(
        self, outcome: rank_failures.Outcome[Any], number: int | None, *, everywhere: bool = True
    ) -> tuple[Mapping[int, rank_failures.Failure], list[Any]]:
        label, payload = rank_failures.collection(outcome.step), outcome.result or b""
        return self._gather(label, payload, outcome.failure, number, everywhere=everywhere)

    def _all_failures(
        self, step: str, failure: rank_failures.Failure | None
    ) -> Mapping[int, rank_failures.Failure]:
        # Without a failure all have the same number, and nothing else travels.
        return self._gather(rank_failures.agreement(step), None, failure, 0)[0]

    def _gather(
        self,
        label: str,
        payload: bytes | None,
        failure: rank_failures.Failure | None = None,
        number: int | None = None,
        *,
        everywhere: bool = True,
    ) -> tuple[Mapping[int, rank_failures.Failure], list[bytes]]:
        """The failures and the payloads of all ranks, see ``_all_outcomes``."""
        data = payload or b""
        size = int(len(data) > HEAD_BYTES)
        if everywhere:
            # Rounded up by at most an eighth: the same for ranks that pass about as much.
            step_bytes = 1 << max(6, len(data).bit_length() - 4)
            size = -(-len(data) // step_bytes) * step_bytes
        steps, channel = self._steps, self._steps.channel
        with steps.start_step(label, failure) as (step, deadline):
            extra = int(failure is not None)
            content = f"{size} {number}"
            is_same, highest = steps.meet(step, deadline, (size, extra), content, extra)
            if is_same and number is not None:
                return {}, [data] * self.world_size
            size, num_failed = highest or (size, 0)

            def transfer() -> list[bytes]:
                if everywhere:
                    return channel.gather(data, size, deadline)
                return channel.gather_at_rank0(data, deadline, has_rest=size > 0)

            found = None if num_failed else steps.transferred(step, transfer)
            if found is not None:
                return {}, found
            verdict, payloads = steps.decide_in_store(
                step,
                deadline,
                None if payload is None else b"" if num_failed else payload,
                sources=range(self.world_size),
                everywhere=everywhere,
            )
        failures = rank_failures.absent_ranks(
            verdict.absent, rank_failures.step_of(label), self.timeout_seconds
        )
        return failures | {rank: f for rank, f in verdict.values.items() if f is not None}, payloads


def _forget(steps: Steps, owner: int) -> None:
    """Delete what a comm has left in the store, but not in a forked process."""
    if os.getpid() == owner and dist.is_initialized():
        steps.clear()


def _end_group(group: dist.ProcessGroup, owner: int) -> None:
    """Destroy a group of this rank, which has no more use for it. Not collective.

    A process forked from its ``owner`` has none of its threads.
    """
    if os.getpid() != owner or not dist.is_initialized():
        return
    try:
        name, rank = group.group_name, dist.get_rank(group)
        dist.destroy_process_group(group)
    except ValueError as error:
        # It has gone already, with the world that it belonged to.
        logger.debug("nothing to close: %s", error)
        return
    # torch leaves the address of this rank in the store. All ranks have connected by now.
    StoreKeys(f"{name}//cpu//0", DEFAULT_TIMEOUT_SECONDS).delete(str(rank))


def default_timeout_seconds(group: dist.ProcessGroup | None = None) -> float:
    """What the environment variable says; else the timeout that the group was made with, if that is
    no default of torch; else half an hour. ValueError for no number above 0.
    """
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if text is None:
        # torch has no public way to the timeout of a group.
        backends: Any = () if group is None else map(group._get_backend, group._device_types)  # noqa: SLF001
        options = [getattr(backend, "options", None) for backend in backends]
        chosen = {o._timeout for o in options if o is not None} - _DEFAULTS_OF_TORCH  # noqa: SLF001
        return min((timeout.total_seconds() for timeout in chosen), default=DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    require_timeout(seconds, f"the environment variable {_TIMEOUT_VARIABLE}", text)
    return seconds


def require_timeout(seconds: float, name: str, text: str | None = None) -> None:
    """Refuse a timeout that no clock of torch can count: ValueError with the name of the setting,
    and ``text`` if that is what was given.
    """
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{name} must be a number of seconds above 0, and at most {_LONGEST_SECONDS:g}, "
            f"not {seconds if text is None else text!r}"
        )


_comms: weakref.WeakKeyDictionary[Any, TorchComm] = weakref.WeakKeyDictionary()
_beside: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()
_worlds = itertools.count()


def default_comm(timeout_seconds: float | None = None) -> Comm:
    """The comm of this process: the world of torch.distributed, or this process alone.

    The first call makes the CPU group that the comm needs, so it is collective. The group is kept
    as long as the world.

    Args:
        timeout_seconds: how long the steps of this comm wait for the slowest rank, from now on and
            wherever it is used; the same on all ranks. By default the environment variable
            DIST_CHECKPOINTING_TIMEOUT_SECONDS as it was on first use, the timeout of
            init_process_group (unless it is torch's default), or half an hour.

    Raises:
        CheckpointingException: in a process that was forked from a rank. Also if there is no
            process group, but the process was started as one of several: each of them would save,
            or load, as if it were alone.
        RankFailedError: on first use, if a rank does not come.
        ValueError: for a timeout that is not a number of seconds above 0.

    Example:
        >>> comm = default_comm()  # in a single process
        >>> comm.rank, comm.world_size
        (0, 1)
    """
    if timeout_seconds is not None:
        require_timeout(timeout_seconds, "timeout_seconds")
    if not (dist.is_available() and dist.is_initialized()):
        _require_alone()
        return SingleProcess()
    world = dist.group.WORLD
    if world in _inherited:
        raise forked_error(os.getppid())
    comm = _comms.get(world)
    if comm is None:
        seconds = default_timeout_seconds(world) if timeout_seconds is None else timeout_seconds
        comm = _comms[world] = TorchComm(_group_of_all(seconds), seconds)
    elif timeout_seconds is not None:
        comm.timeout_seconds = timeout_seconds
    return comm


def chosen_comm(comm: Comm | None) -> Comm:
    """``comm``, or by default ``default_comm()``; TypeError if it is something else."""
    given: object = comm  # whatever it is
    if given is None:
        return default_comm()
    if isinstance(given, Comm):
        return given
    message = f"comm must be a Comm or None, not {type(given).__name__}"
    if isinstance(given, dist.ProcessGroup):
        message += "; comm.group_comm makes one of a process group"
    raise TypeError(message)


def _require_alone() -> None:
    """Raise an error if this is one of several processes, such as torchrun starts."""
    count = os.environ.get("WORLD_SIZE", "").strip()
    if not count.isdecimal() or int(count) < 2:
        return
    rank = os.environ.get("RANK", "").strip()
    finding = Finding(
        "torch.distributed has no process group, so this process knows no other ranks",
        expected=f"one of the {count} that WORLD_SIZE names",
        ranks=(int(rank),) if rank.isdecimal() else (),
        remedy="Call torch.distributed.init_process_group first, and save before "
        "destroy_process_group. If this process is meant to work alone, pass "
        "comm=dist_checkpointing.comm.SingleProcess().",
    )
    raise CheckpointingException("the processes are not connected to each other", [finding])


def group_comm(group: dist.ProcessGroup | Comm | None, everybody: Comm) -> Comm:
    """The comm of a group of ranks.

    Collective over ``everybody``, each rank with its own group. For a group without a CPU backend
    (NCCL), the first call makes a gloo group of the same ranks, which is kept as long as the group.

    Args:
        group: a process group or a comm; None for ``everybody``. A rank that is not in its group
            gets a comm of itself alone.
        everybody: the ranks that make this call. The result has its timeout.

    Raises:
        CheckpointingException: if a gloo group is needed, and not all processes make this call.
    """
    mine = None
    if isinstance(group, dist.ProcessGroup) and group not in _beside:
        has_cpu = "cpu:" in dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl" has
        mine = None if has_cpu else tuple(dist.get_process_group_ranks(group))
    # All processes have to make all groups, in the same order. (torch also lets only the members
    # make one, but then hangs if they have been in different numbers of groups.)
    wanted = sorted({ranks for ranks in everybody.all_gather(mine) if ranks is not None})
    if wanted and everybody.world_size < dist.get_world_size():
        finding = Finding(
            "a process group that cannot carry tensors on the CPU",
            found=wanted,
            remedy="Pass one with a gloo backend too, such as 'cpu:gloo,cuda:nccl'.",
        )
        raise CheckpointingException("ranks cannot talk in their groups", [finding])
    seconds = (
        everybody.timeout_seconds if isinstance(everybody, TorchComm) else default_timeout_seconds()
    )
    for ranks in wanted:
        made = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds), backend="gloo")
        if ranks == mine:
            _beside[group] = made
    if group is None:
        return everybody
    if isinstance(group, Comm):
        return group
    if dist.get_rank(group) < 0:
        return SingleProcess()
    if group in _beside:
        return TorchComm(_beside[group], seconds, tensor_group=group)
    return TorchComm(group, seconds)


def _group_of_all(timeout_seconds: float) -> dist.ProcessGroup:
    """A CPU group of the world. It first waits for all ranks, because torch would wait without
    naming a rank: RankFailedError with those that do not come, or rank 0 if the store is lost.
    """
    step, world_size = "making a channel for all ranks", dist.get_world_size()
    keys = StoreKeys(f"dist_checkpointing/worlds/{next(_worlds)}", timeout_seconds)
    ranks = [str(rank) for rank in range(world_size)]
    timeout = timedelta(seconds=timeout_seconds)
    try:
        keys.ask(Store.set, ranks[dist.get_rank()], "1")
        if keys.ask(Store.add, "count", 1) == world_size:
            keys.ask(Store.set, "all", "1")
        if not keys.wait(["all"], timeout_seconds):
            absent = {
                r: rank_failures.Absence.LATE for r, key in enumerate(ranks) if not keys.wait([key])
            }
            failures = rank_failures.absent_ranks(absent, step, timeout_seconds)
            raise rank_failures.merge_failures(step, failures, world_size, range(world_size))
        try:
            group: dist.ProcessGroup = keys.watch(
                lambda: dist.new_group(backend="gloo", timeout=timeout)
            )
        except RuntimeError as error:
            raise rank_failures.contact_lost(step, error, [dist.get_rank()]) from error
    except (StoreSilentError, dist.DistError) as error:
        raise store_error(step, error) from error
    return group


def _note_inherited_world() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited_world)
