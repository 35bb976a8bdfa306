"""Ranks that are processes of torch.distributed."""

from __future__ import annotations

import logging
import os
import pickle
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dist_checkpointing.comm.group_endings import end_group, forget_keys
from dist_checkpointing.comm.protocol import Comm, Failure, SingleProcess, absent_rank
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 1800.0
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01
_NO_NUMBER = 2**62
_LETTING_GO_SECONDS = 1.0


class TorchComm(Comm):
    """The ranks of a torch.distributed process group.

    Everything travels over ``group``, which must be a CPU (gloo) group. An agreement is one small
    all-reduce as long as nobody failed. What failed is told through the key-value store of
    torch.distributed, one key a rank, because a collective cannot tell which rank it is waiting
    for: one that does not show up within ``timeout_seconds`` is named on all others. Creating a
    TorchComm is collective over the group. One that nobody refers to any more takes its keys out of
    the store; a duplicate also ends its group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout_seconds = timeout_seconds
        self._group = group
        self._tensor_group = group if tensor_group is None else tensor_group
        # They stay for as long as this object: a thread of gloo may let go of a tensor last, and if
        # the interpreter ends just then, freeing it there would abort the process.
        self._failed = torch.zeros(1, dtype=torch.int32)
        self._extremes = torch.zeros(2, dtype=torch.int64)
        self._agreements = 0
        self._last_verdict = 0
        self._group_is_broken = False
        self._exchanges = 0
        name = self.broadcast(uuid.uuid4().hex)
        # torch has no public way to the store that every process group has already joined.
        # One connection a comm: a thread that waits for a key keeps it from all others.
        default_store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        connection = default_store.clone()
        prefix = f"dist_checkpointing/{name}"
        self._store = dist.distributed_c10d.PrefixStore(prefix, connection)
        self._forget = weakref.finalize(
            self, forget_keys, connection, [f"{prefix}/at/{self.rank}"], os.getpid()
        )
        self._forget.atexit = False
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def kept(self) -> dict[str, Any]:
        ranks = tuple(dist.get_process_group_ranks(self._group))
        return _kept.setdefault(dist.group.WORLD, {}).setdefault(ranks, {})

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        if self._group_is_broken:
            return self._through_store(value)
        with self._contact_loss_named():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        if self._group_is_broken:
            return self._through_store(value)[0]
        values: list[Any] = [value]
        source = dist.get_global_rank(self._group, 0)
        with self._contact_loss_named():
            dist.broadcast_object_list(values, src=source, group=self._group)
        result: T = values[0]
        return result

    def all_same(self, number: int | None) -> bool:
        if not self._group_is_broken:
            # Equal numbers have equal maxima of themselves and of their negatives; None has none.
            extremes = [_NO_NUMBER, _NO_NUMBER] if number is None else [number, -number]
            self._extremes.copy_(torch.tensor(extremes, dtype=torch.int64))
            if self._found_maxima(self._extremes):
                highest, lowest = self._extremes.tolist()
                return bool(highest == -lowest)
            # It names a rank that is gone; one that was only too late is here after it.
            self.agree("comparing a number", None)
        return set(self._through_store(number)) == {number} - {None}

    @property
    def tensor_device(self) -> torch.device:
        config = dist.get_backend_config(self._tensor_group)
        if "cpu:" in config and "nccl" not in config:
            return torch.device("cpu")
        return torch.device(torch.accelerator.current_accelerator() or "cpu")

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        if self._group_is_broken:
            given = self._through_store(tensor.cpu() if self.rank == source else None)[source]
            assert given is not None
            tensor.copy_(given)
            return
        with self._contact_loss_named():
            origin = dist.get_global_rank(self._tensor_group, source)
            dist.broadcast(tensor, src=origin, group=self._tensor_group)

    def all_gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._group_is_broken:
            return [given.to(tensor.device) for given in self._through_store(tensor.cpu())]
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._contact_loss_named():
            dist.all_gather(tensors, tensor, group=self._tensor_group)
        return tensors

    def duplicate(self) -> TorchComm:
        ranks = dist.get_process_group_ranks(self._group)
        is_part = len(ranks) < dist.get_world_size()
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=self.timeout_seconds),
            backend="gloo",
            # Ranks outside the group do not take part in what it does.
            use_local_synchronization=is_part,
        )
        comm = TorchComm(group, self.timeout_seconds)
        # torch itself keeps a group until it is destroyed.
        comm._end = weakref.finalize(comm, end_group, group, os.getpid())
        comm._end.atexit = False
        return comm

    def close(self) -> None:
        self._forget()
        if self._end is None:
            end_group(self._group, os.getpid())
        else:
            self._end()

    def _through_store(self, value: T) -> list[T]:
        """What all ranks bring, without the group: slow, and only after a rank was too late."""
        keys = self._keys(f"values/{self._exchanges}")
        with self._contact_loss_named():
            self._write(keys[self.rank], value)
            self._store.wait(keys, timedelta(seconds=self.timeout_seconds))
            values = [self._read(key) for key in keys]
        if self._exchanges:
            # All ranks are here, so all have read what was brought before.
            self._store.delete_key(f"values/{self._exchanges - 1}/{self.rank}")
        self._exchanges += 1
        return values

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

    def _all_failures(self, step: str, failure: Failure | None) -> Mapping[int, Failure]:
        self._agreements += 1
        deadline = time.monotonic() + self.timeout_seconds
        try:
            # Said before the collective, which tells nobody who is missing when it fails.
            self._write(self._keys("at")[self.rank], (self._agreements, failure))
            if self._all_are_well(failure):
                return {}
            return self._verdict(step, deadline)
        except dist.DistError as error:
            problem = f"lost contact with the store, which rank 0 or the launcher holds: {error}"
            gone = RankFailedError("", [Finding(problem=problem, ranks=(0,))])
            return {0: Failure(gone, problem, "")}

    def _all_are_well(self, failure: Failure | None) -> bool:
        """Whether all ranks are here without a failure; if not, no rank believes they are."""
        if self._group_is_broken:
            return False
        self._failed.fill_(failure is not None)
        return self._found_maxima(self._failed) and not self._failed.item()

    def _found_maxima(self, numbers: torch.Tensor) -> bool:
        """Put the maxima over all ranks in place; False if the group has just broken."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # a stub of torch's
        options.timeout = timedelta(seconds=self.timeout_seconds)
        try:
            self._group.allreduce([numbers], options).wait()
            _wait_until_let_go(numbers)
        except RuntimeError as error:
            logger.debug("after agreement %d: %s", self._agreements, error)
            self._group_is_broken = True
            return False
        return True

    def _verdict(self, step: str, deadline: float) -> Mapping[int, Failure]:
        number = self._agreements
        verdict_key, heard_keys = f"{number}/verdict", self._keys(f"{number}/heard")
        verdict: Mapping[int, Failure]
        if self.rank == 0:
            verdict, present = self._collect(step, deadline)
            self._write(verdict_key, verdict)
            # If rank 0 holds the store, it must not end before all have read the verdict.
            self._wait([heard_keys[rank] for rank in present if rank], _PATIENCE_SECONDS)
            return verdict
        # Rank 0 itself may wait the full time for a third rank before it speaks.
        patience = self.timeout_seconds * 1.25 + _PATIENCE_SECONDS
        if not self._wait([verdict_key], patience):
            return {0: absent_rank(0, step, patience)}
        verdict = self._read(verdict_key)
        self._write(heard_keys[self.rank], None)
        return verdict

    def _collect(self, step: str, deadline: float) -> tuple[Mapping[int, Failure], list[int]]:
        """The failures, and the ranks that came in time."""
        outcomes: dict[int, Failure | None] = {}
        while True:
            for rank, key in enumerate(self._keys("at")):
                if rank not in outcomes and self._store.check([key]):
                    number, failure = self._read(key)
                    if number >= self._agreements:
                        outcomes[rank] = failure if number == self._agreements else None
            everybody_came = len(outcomes) == self.world_size
            if everybody_came or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        failures = {
            rank: absent_rank(rank, step, self.timeout_seconds)
            for rank in range(self.world_size)
            if rank not in outcomes
        }
        failures |= {rank: failure for rank, failure in outcomes.items() if failure is not None}
        # All ranks are here, so all have done with the verdict before this one.
        if self._last_verdict and everybody_came:
            for key in [
                f"{self._last_verdict}/verdict",
                *self._keys(f"{self._last_verdict}/heard"),
            ]:
                self._store.delete_key(key)
        self._last_verdict = self._agreements
        return failures, sorted(outcomes)

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{rank}" for rank in range(self.world_size)]

    def _write(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value).decode("latin-1"))

    def _wait(self, keys: Sequence[str], timeout_seconds: float) -> bool:
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return False
        return True

    def _read(self, key: str) -> Any:
        return pickle.loads(self._store.get(key).decode().encode("latin-1"))  # noqa: S301


def _wait_until_let_go(tensor: torch.Tensor) -> None:
    """Wait for the thread of gloo that says "done" a moment before it is done with a tensor."""
    use_count = getattr(tensor, "_use_count", None)  # not public, and younger than torch 2.6
    deadline = time.monotonic() + _LETTING_GO_SECONDS
    while use_count is not None and use_count() > 1 and time.monotonic() < deadline:
        time.sleep(0)


_comms: weakref.WeakKeyDictionary[Any, TorchComm] = weakref.WeakKeyDictionary()
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dict[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
_beside: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def default_comm() -> Comm:
    """The comm of this process: the world of torch.distributed if it is initialised, else alone.

    The CPU group it needs is made on first use (a collective call) and kept as long as the world.

    Raises:
        CheckpointingException: if there is no process group, but the process was started as one of
            several: each of them would save, or load, as if it were alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _require_alone()
        return SingleProcess()
    world = dist.group.WORLD
    comm = _comms.get(world)
    if comm is None:
        timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
        comm = TorchComm(dist.new_group(backend="gloo", timeout=timeout))
        _comms[world] = comm
    return comm


def _require_alone() -> None:
    """Refuse to take one of several processes, such as torchrun starts, for the only one."""
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
    """The comm of a group of ranks; None is ``everybody``, and a rank outside its group is alone.

    Collective over ``everybody``, each rank with its own group. One without a CPU backend (NCCL)
    gets a gloo group beside it, on first use, which is kept as long as the group itself.

    Raises:
        CheckpointingException: if such a group must be made, and not all processes are here.
    """
    mine = None
    if isinstance(group, dist.ProcessGroup) and group not in _beside and not _has_cpu(group):
        mine = tuple(dist.get_process_group_ranks(group))
    # Every process has to take part in the making of every group, in the same order. (torch also
    # lets the members alone make one, but hangs if they have been in different numbers of groups.)
    wanted = sorted({ranks for ranks in everybody.all_gather(mine) if ranks is not None})
    if wanted and everybody.world_size < dist.get_world_size():
        finding = Finding(
            "a process group that cannot carry tensors on the CPU",
            found=wanted,
            remedy="Pass one with a gloo backend too, such as 'cpu:gloo,cuda:nccl'.",
        )
        raise CheckpointingException("ranks cannot talk in their groups", [finding])
    timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
    for ranks in wanted:
        made = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
        if ranks == mine:
            _beside[group] = made
    if group is None:
        return everybody
    if isinstance(group, Comm):
        return group
    if dist.get_rank(group) < 0:
        return SingleProcess()
    if group in _beside:
        return TorchComm(_beside[group], tensor_group=group)
    return TorchComm(group)


def _has_cpu(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU may travel over a group, such as "cpu:gloo,cuda:nccl"."""
    return "cpu:" in dist.get_backend_config(group)
