"""Ranks simulated by threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dist_checkpointing.comm import Comm, ThreadComm

T = TypeVar("T")


def run_ranks(
    world_size: int, fn: Callable[[Comm], T], *, timeout_seconds: float = 60.0
) -> list[T]:
    """Call ``fn(comm)`` for every rank at the same time; returns the results in rank order.

    The ranks are threads, without torch.distributed: 64 of them start at once.

    Args:
        world_size: number of ranks.
        fn: function that gets the comm of each rank.
        timeout_seconds: how long a rank waits for the others.

    Raises:
        Exception: the error of the first rank that failed. The other ranks do not wait for it.

    Example:
        >>> def save_rows(comm):
        ...     rows = torch.full((2, 3), float(comm.rank))
        ...     shard = ShardedTensor.from_rank_offsets("w", rows, (0, comm.rank, comm.world_size))
        ...     save({"w": shard}, "ckpt/1", comm=comm)
        >>> _ = run_ranks(4, save_rows)
        >>> load_tensors_metadata("ckpt/1")["w"].global_shape
        (8, 3)
    """
    rendezvous = ThreadComm.Rendezvous(world_size, timeout_seconds)

    def run(rank: int) -> T:
        try:
            return fn(ThreadComm(rendezvous, rank))
        except BaseException:
            rendezvous.leave(rank)
            raise

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    first = rendezvous.first_to_leave
    if first is not None:
        futures[first].result()
    return [future.result() for future in futures]
