"""The processes of one world, and how they time a call together."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs
from torch.multiprocessing.spawn import spawn

T = TypeVar("T")

_TIMEOUT = timedelta(seconds=180)


class ContestantFailedError(Exception):
    """A call failed on some rank; raised on all of them."""


class World:
    """All processes of a world; every method is collective.

    Args:
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all are there now

    def from_rank0(self, value: T) -> T:
        return self.gather(value)[0]

    def run(self, call: Callable[[], object] | None) -> float:
        """Seconds from when the first rank began to when the last one ended.

        Args:
            call: None on a rank that has nothing to do.

        Raises:
            ContestantFailedError: if it raised anywhere.
        """
        self.barrier()
        error = None
        begin = time.perf_counter()  # one clock for all processes of a machine
        if call is not None:
            try:
                call()
            except Exception as raised:  # noqa: BLE001 - whatever it is, that contestant is out
                error = f"{type(raised).__name__}: {raised}"
                if os.environ.get("BENCH_TRACEBACK"):
                    traceback.print_exc()
        end = time.perf_counter()
        reports = self.gather((begin, end, error, call is not None))
        errors = [text for _, _, text, _ in reports if text]
        if errors:
            raise ContestantFailedError(errors[0])
        active = [(first, last) for first, last, _, works in reports if works]
        return max(last for _, last in active) - min(first for first, _ in active)


def start_world(
    size: int, job: Callable[[World, Path], None], folder: Path, *, group_of_one: bool
) -> None:
    """Run ``job(world, folder)`` in ``size`` new processes; an error in any of them is raised.

    Args:
        size: number of processes.
        job: can be pickled.
        folder: for the processes to meet in, and for the job.
        group_of_one: make a process group even for a single process.
    """
    # Gloo looks up the name of the machine, which not every machine has an address for.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # As torchrun does: a store that outlives the ranks (a file would be polled, every 10 ms).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    grouped = size > 1 or group_of_one
    spawn(_process, (size, job, folder, store.port if grouped else None), size)  # type: ignore[no-untyped-call]


def _process(
    rank: int, size: int, job: Callable[[World, Path], None], folder: Path, port: int | None
) -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # as torchrun does
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if port is not None:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        job(World(rank, size), folder)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
