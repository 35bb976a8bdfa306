"""One rank of tests/distributed/test_torch_comm.py: runs a scenario, prints what it saw as JSON.

Usage: torch_comm_rank.py SCENARIO RANK WORLD_SIZE STORE
STORE is the port of a store that the test holds, or a file to use as the store, or a file "*.port"
into which rank 0 writes the port of a store that it makes itself.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its stubs
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from dist_checkpointing.comm import SingleProcess, TorchComm, default_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    StateMismatchError,
)

WAIT_SECONDS = 2.0
Report = dict[str, Any]


def make_group(ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=12))


def make_comm() -> TorchComm:
    return TorchComm(make_group(), WAIT_SECONDS)


def caught(action: Callable[[], object]) -> Report:
    """What ``action`` raises, in a form that ranks can compare."""
    try:
        value = action()
    except CheckpointingException as error:
        return {
            "class": type(error).__name__,
            "text": str(error),
            "ranks": sorted({rank for finding in error.findings for rank in finding.ranks}),
            "cause": type(error.__cause__).__name__,
        }
    except BaseException as error:  # noqa: BLE001 - the test shall see what it was
        return {"class": type(error).__name__, "text": str(error), "ranks": None}
    return {"class": None, "value": value}


def num_keys() -> int:
    count: int = dist.distributed_c10d._get_default_store().num_keys()
    return count


def raising(error: Exception | None) -> Callable[[], None]:
    def produce() -> None:
        if error is not None:
            raise error

    return produce


def healthy(rank: int) -> Report:
    comm = make_comm()
    report: Report = {"rank": comm.rank, "world_size": comm.world_size}
    report["all_gather"] = [comm.all_gather((turn, rank)) for turn in range(3)]
    report["broadcast"] = comm.broadcast(rank + 7)
    report["exchange"] = comm.exchange("describe", lambda: rank**2)
    numbers = [7, rank, None, None if rank else 7, 0, 2**62 - 1]
    report["all_same"] = [comm.all_same(number) for number in numbers]
    calls: list[int] = []

    def produce() -> str:
        calls.append(rank)
        return "from 0"

    report["from_rank0"] = comm.from_rank0("read", produce)
    report["calls"] = calls
    begin, keys = time.monotonic(), num_keys()
    for _ in range(100):
        comm.agree("nothing", None)
    report["agree_seconds"] = time.monotonic() - begin
    report["keys_left"] = num_keys() - keys

    finding = Finding("short", "w", found=[1, 2], path="a.bin")
    shared = CorruptCheckpointError("broken", [finding]) if rank > 0 else None
    report["shared"] = caught(lambda: comm.exchange("read", raising(shared)))
    mixed = [None, StateMismatchError("template"), InvalidShardingError("shards")][rank]
    report["mixed"] = caught(lambda: comm.exchange("check", raising(mixed)))
    foreign = OSError(28, "No space left on device é") if rank == 2 else None
    report["foreign"] = caught(lambda: comm.exchange("write", raising(foreign)))
    report["rank0"] = caught(lambda: comm.from_rank0("plan", raising(StateMismatchError("plan"))))
    report["after"] = comm.all_gather(rank)
    return report


def subgroup(rank: int) -> Report:
    """A group in which no rank has its global number."""
    group, second = make_group([1, 2]), make_comm()
    report: Report = {"world": second.all_gather(rank)}
    if rank:
        first = TorchComm(group, WAIT_SECONDS)
        report["rank"] = first.rank
        report["ranks"] = first.all_gather(rank)
        report["broadcast"] = first.broadcast(rank)
        own = InvalidShardingError("m", [Finding("p")]) if rank == 2 else None
        report["error"] = caught(lambda: first.exchange("step", raising(own)))
    second.agree("end", None)
    return report


def defaults(_rank: int) -> Report:
    comm = default_comm()
    report: Report = {"class": type(comm).__name__, "cached": default_comm() is comm}
    report["before"] = comm.all_gather(comm.rank)
    dist.destroy_process_group()
    report["alone"] = type(default_comm()) is SingleProcess
    gc.collect()
    start("again")
    again = default_comm()
    report["remade"] = again is not comm and default_comm() is again
    report["after"] = again.exchange("step", lambda: again.rank)
    again.agree("end", None)
    return report


def dead(rank: int) -> Report:
    comm = make_comm()
    comm.agree("start", None)
    if rank == 2:
        os._exit(3)
    begin = time.monotonic()
    report = {"error": caught(lambda: comm.exchange("commit", lambda: rank))}
    return report | {"seconds": time.monotonic() - begin}


def dead_rank0(rank: int) -> Report:
    comm = make_comm()
    comm.agree("start", None)
    if rank == 0:
        time.sleep(0.5)  # the others have heard of the start, even if rank 0 hosts the store
        os._exit(3)
    begin = time.monotonic()
    report: Report = {"error": caught(lambda: comm.agree("commit", None))}
    return report | {"seconds": time.monotonic() - begin}


def done(_rank: int) -> Report:
    """Every rank ends as soon as it has agreed, and rank 0 is the first to know."""
    comm = make_comm()
    return {"error": caught(lambda: comm.agree("commit", None))}


def dead_in_a_collective(rank: int) -> Report:
    comm = make_comm()
    comm.agree("start", None)
    if rank == 2:
        os._exit(3)
    return {"error": caught(lambda: comm.all_gather(rank))}


def interrupted(rank: int) -> Report:
    comm = make_comm()

    def step() -> None:
        with comm.agreed("write"):
            if rank == 1:
                raise KeyboardInterrupt

    report = {"error": caught(step)}
    if rank == 0:  # it may host what the others still read
        time.sleep(0.5)
    return report


def late(rank: int) -> Report:
    comm = make_comm()
    if rank == 2:
        time.sleep(2 * WAIT_SECONDS)
    report: Report = {"error": caught(lambda: comm.agree("commit", None))}
    # The others gave up at once and would time out again: meet by other means first.
    dist.barrier()
    report["next"] = caught(lambda: comm.exchange("again", lambda: rank))
    report["all_same"] = [comm.all_same(number) for number in (7, rank, None)]
    return report


def late_for_a_number(rank: int) -> Report:
    comm = make_comm()
    comm.agree("start", None)
    if rank == 2:
        # The others have given up their collective, and ask who is there.
        while any(comm._read(f"at/{other}")[0] < 2 for other in (0, 1)):
            time.sleep(0.02)
    numbers = (7, rank, None, 7)
    return {"all_same": [caught(lambda n=number: comm.all_same(n)) for number in numbers]}  # type: ignore[misc]


def unpicklable(rank: int) -> Report:
    comm = make_comm()
    begin = time.monotonic()
    value: object = (lambda: 0) if rank == 1 else rank
    report: Report = {"error": caught(lambda: comm.exchange("describe", lambda: value))}
    report["seconds"] = time.monotonic() - begin
    return report


SCENARIOS: dict[str, Callable[[int], Report]] = {
    function.__name__: function
    for function in (
        healthy,
        subgroup,
        defaults,
        dead,
        dead_rank0,
        done,
        dead_in_a_collective,
        interrupted,
        late,
        late_for_a_number,
        unpicklable,
    )
}


def make_store(name: str, rank: int, world_size: int, place: str) -> Store:
    """The store of the test, or one that rank 0 hosts, as ``tcp://`` does without torchrun."""
    shared: Store
    hosted = place.endswith(".port")
    if hosted and rank == 0:
        host = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        scratch = Path(place).with_suffix(".tmp")
        scratch.write_text(str(host.port))
        scratch.rename(place)
        return PrefixStore(name, host)
    while hosted and not Path(place).exists():
        time.sleep(0.02)
    port = Path(place).read_text() if hosted else place
    if port.isdecimal():
        shared = TCPStore("127.0.0.1", int(port), world_size, is_master=False)
    else:
        shared = FileStore(place, world_size)
    return PrefixStore(name, shared)


def start(name: str) -> None:
    rank, world_size, place = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = make_store(name, rank, world_size, place)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


if __name__ == "__main__":
    start("first")
    print(json.dumps(SCENARIOS[sys.argv[1]](int(sys.argv[2]))), flush=True)  # noqa: T201
    # Tearing down a group with a dead member would wait for it.
    os._exit(0)
