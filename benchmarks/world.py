"""The processes that run one case, and how they time a call together."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=300)
_LONG_SECONDS = 4.0
"""Calls in a row end once they took so long together."""


class WayFailedError(Exception):
    """A call failed on some rank; raised on all of them."""


class World:
    """All processes of a case; every method is collective.

    Args:
        rank: Rank of this process.
        size: Number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_rank0(self, value: T) -> T:
        return self.gather(value)[0]

    def timed(self, call: Callable[[], object] | None) -> float:
        """Seconds from when the first rank began to when the last one ended.

        Args:
            call: What to run; None on a rank that has nothing to do.

        Raises:
            WayFailedError: If it raised anywhere.
        """
        self.barrier()
        error = None
        begin = time.perf_counter()  # one clock for all processes of a machine
        if call is not None:
            try:
                call()
            # DCP's error is no Exception. Whatever it is, that way is out.
            except (Exception, CheckpointException) as raised:  # noqa: BLE001
                error = f"{type(raised).__name__}: {raised}"
        end = time.perf_counter()
        reports = self.gather((begin, end, error, call is not None))
        errors = [text for _, _, text, _ in reports if text]
        if errors:
            raise WayFailedError(errors[0])
        active = [(first, last) for first, last, _, works in reports if works]
        return max(last for _, last in active) - min(first for first, _ in active)

    def fastest(self, once: Callable[[], float], calls: int) -> float:
        """The fastest of some calls in a row; ``once`` returns the same seconds on all ranks."""
        seconds = [once()]
        while len(seconds) < calls and sum(seconds) < _LONG_SECONDS:
            seconds.append(once())
        return min(seconds)


def start_world(size: int, job: Callable[[World, Path], None], folder: Path) -> None:
    """Run ``job(world, folder)`` in ``size`` new processes; an error in any of them is raised.

    Args:
        size: Number of processes.
        job: Can be pickled.
        folder: Passed to the job.
    """
    # Gloo looks up the name of the machine, which not every machine has an address for.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # As torchrun does: a store that outlives the ranks (a file would be polled, every 10 ms).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(_process, (size, job, folder, store.port), size)  # type: ignore[no-untyped-call]


def _process(
    rank: int, size: int, job: Callable[[World, Path], None], folder: Path, port: int
) -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # as torchrun does
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = TCPStore("127.0.0.1", port, is_master=False)
    # Even for one rank: Megatron and DCP's process for asynchronous saves ask for a group.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        job(World(rank, size), folder)
    finally:
        dist.destroy_process_group()
