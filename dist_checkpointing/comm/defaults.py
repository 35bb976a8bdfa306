"""The default ranks: the world of torch.distributed, or the members of a process group."""

from __future__ import annotations

import itertools
import os
import weakref
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dist_checkpointing.comm.interface import Comm, SingleProcess
from dist_checkpointing.comm.rank_failures import absent_error, contact_lost
from dist_checkpointing.comm.timeouts import StoreSilentError, asked, forked_error, store_error
from dist_checkpointing.comm.torch_distributed import (
    TorchComm,
    default_timeout_seconds,
    require_timeout,
)
from dist_checkpointing.errors import CheckpointingException, Finding

_ANSWER_SECONDS: Final = 5.0
"""How much longer than its own timeout a store may take to report the timeout."""
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
            DIST_CHECKPOINTING_TIMEOUT_SECONDS as it was on first use, or half an hour.

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
        seconds = default_timeout_seconds() if timeout_seconds is None else timeout_seconds
        group = _group_of_all(seconds)
        comm = _comms[world] = TorchComm(group, seconds)
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
    seconds = everybody.timeout_seconds if isinstance(everybody, TorchComm) else None
    if seconds is None:
        seconds = default_timeout_seconds()
    for ranks in wanted:
        timeout = timedelta(seconds=seconds)
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
        return TorchComm(_beside[group], seconds, tensor_group=group)
    return TorchComm(group, seconds)


def _group_of_all(timeout_seconds: float) -> dist.ProcessGroup:
    """A CPU group of the world. It first waits for all ranks, because torch would wait without
    naming a rank: RankFailedError with those that do not come, or rank 0 if the store is lost.
    """
    step, world_size = "making a channel for all ranks", dist.get_world_size()
    try:
        absent = asked(lambda: _absent(timeout_seconds), timeout_seconds + _ANSWER_SECONDS)
    except (StoreSilentError, dist.DistError) as error:
        raise store_error(step, error, world_size, range(world_size)) from error
    if absent:
        raise absent_error(absent, step, timeout_seconds, world_size, range(world_size))
    try:
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    except RuntimeError as error:
        raise contact_lost(step, error, [dist.get_rank()]) from error
    return group


def _absent(timeout_seconds: float) -> list[int]:
    """The ranks that do not come in time."""
    # torch has no public way to the store. Its own connection: a wait blocks all its users.
    shared: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    store = shared.clone()
    place, world_size = f"dist_checkpointing/worlds/{next(_worlds)}", dist.get_world_size()
    keys = [f"{place}/{rank}" for rank in range(world_size)]
    store.set(keys[dist.get_rank()], "1")
    if store.add(f"{place}/count", 1) == world_size:
        store.set(f"{place}/all", "1")
    try:
        store.wait([f"{place}/all"], timedelta(seconds=timeout_seconds))
    except dist.DistStoreError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _note_inherited_world() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_note_inherited_world)
