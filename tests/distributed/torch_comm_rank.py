"""One rank of tests/distributed/test_torch_comm.py: runs a scenario, prints what it saw as JSON.

Usage: torch_comm_rank.py SCENARIO[+SCENARIO...] RANK WORLD_SIZE STORE
STORE is the port of a store that the test holds, or a file to use as the store, or a file "*.port"
into which rank 0 writes the port of a store that it makes itself.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in its stubs

from dist_checkpointing import ShardedTensor, check_is_distributed_checkpoint, load, save
from dist_checkpointing.comm import Outcome, SingleProcess, TorchComm, default_comm, group_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    StateMismatchError,
)
from dist_checkpointing.storage import Progress
from dist_checkpointing.strategies import (
    AsyncCallsQueue,
    AsyncRequest,
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)

WAIT_SECONDS = 2.0
# The living ranks must take no longer to say that one is frozen, also on a loaded machine.
FROZEN_SECONDS = 5.0
# Longer than the others take to find out that another rank is dead, by clocks of four times the
# speed.
SLOW_SECONDS, SLOW_FACTOR = 22.0, 4
Report = dict[str, Any]


def make_group(ranks: list[int] | None = None) -> Any:
    return dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=12))


def make_comm(timeout_seconds: float = WAIT_SECONDS) -> TorchComm:
    # Making one is a step too: on a loaded machine ranks come to the first one seconds apart.
    comm = TorchComm(make_group(), 30.0)
    comm.timeout_seconds = timeout_seconds
    return comm


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
    report["uneven"] = [len(v) for v in comm.all_gather("x" * (10**rank * 100 + rank))]
    report["broadcast"] = comm.broadcast(rank + 7)
    report["exchange"] = comm.exchange("describe", lambda: rank**2)
    report["to_rank0"] = comm.to_rank0("tell", lambda: rank**2)
    long = comm.to_rank0("tell", lambda: str(rank) * (10**rank * 100 + rank))
    report["long_to_rank0"] = [(len(text), sorted(set(text))) for text in long]
    report["long_from_rank0"] = len(comm.from_rank0("read", lambda: "x" * 100_000))
    numbers = [7, rank, None, None if rank else 7, 0, 2**62 - 1]
    report["all_same"] = [comm.all_same(number) for number in numbers]
    calls: list[int] = []

    def produce() -> str:
        calls.append(rank)
        return "from 0"

    report["from_rank0"] = comm.from_rank0("read", produce)
    report["calls"] = calls
    keys = num_keys()
    for _ in range(100):
        comm.agree("nothing", None)
    report["keys_left"] = num_keys() - keys

    finding = Finding("short", "w", found=[1, 2], path="a.bin")
    shared = CorruptCheckpointError("broken", [finding]) if rank > 0 else None
    report["shared"] = caught(lambda: comm.exchange("read", raising(shared)))
    mixed = [None, StateMismatchError("template"), InvalidShardingError("shards")][rank]
    report["mixed"] = caught(lambda: comm.exchange("check", raising(mixed)))
    foreign = OSError(28, "No space left on device é") if rank == 2 else None
    report["foreign"] = caught(lambda: comm.exchange("write", raising(foreign)))
    report["told"] = caught(lambda: comm.to_rank0("tell", raising(foreign)))
    report["rank0"] = caught(lambda: comm.from_rank0("plan", raising(StateMismatchError("plan"))))
    before = Outcome.of("work", raising(foreign))
    report["work"] = caught(lambda: comm.from_rank0("use", lambda: calls.append(9), after=before))
    report["after"] = comm.all_gather(rank)
    queue, finalized = AsyncCallsQueue(comm=comm), list[int]()
    last: list[Callable[[], None]] = [partial(finalized.append, n) for n in range(rank)]
    queue.schedule_async_request(AsyncRequest(None, (), last))
    queue.maybe_finalize_async_calls(blocking=True)
    report["finalized"] = finalized
    return report


def subgroup(rank: int) -> Report:
    """A group in which no rank has its global number, and one for tensors on GPUs alone."""
    group, second = make_group([1, 2]), make_comm()
    report: Report = {"world": second.all_gather(rank)}
    gpus_only = dist.new_group([0, 1], backend="cuda:gloo")
    report["over gpus only"] = group_comm(gpus_only, second).all_gather(rank)
    report["kind"] = type(group_comm(group, second)).__name__
    if rank:
        first = TorchComm(group, WAIT_SECONDS)
        report["rank"] = first.rank
        report["ranks"] = first.all_gather(rank)
        report["broadcast"] = first.broadcast(rank)
        own = InvalidShardingError("m", [Finding("p")]) if rank == 2 else None
        report["error"] = caught(lambda: first.exchange("step", raising(own)))
    folder = Path(sys.argv[4]).with_suffix(".checkpoint")
    full = {key: torch.arange(6.0) + number for number, key in enumerate("abc")}

    def replicas() -> dict[str, Any]:
        """Main on rank 1, which shares with rank 2; rank 0 shares with nobody."""
        copies = {
            key: torch.zeros(6) if "read" in report else own.clone() for key, own in full.items()
        }
        whole = ShardedTensor.from_rank_offsets
        return {key: whole(key, own, replica_id=(rank + 2) % 3) for key, own in copies.items()}

    saver = FullyParallelSaveStrategyWrapper(TensorStoreSaveShardedStrategy(), group)
    written = [0]
    save(replicas(), folder, saver, progress=lambda p: written.append(p.bytes_done))
    report["read"] = []
    for algorithm in ("broadcast", "gather_object", "gather_rounds"):
        reader: Any = FullyParallelLoadStrategyWrapper(
            TensorStoreLoadShardedStrategy(), group, exchange_algo=algorithm, min_shared_bytes=0
        )
        loaded: Any = load(replicas(), folder, reader)
        same = (torch.equal(loaded[key], own) for key, own in full.items())
        report["read"].append(all(same))
    report["written"] = max(written)
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


def dead_host(rank: int) -> Report:
    """Rank 0, which holds the store, dies between the first step and the second."""
    comm = make_comm()
    comm.agree("start", None)
    time.sleep(0.5 if rank == 0 else 4.0)  # longer than a heartbeat takes to come
    if rank == 0:
        os._exit(3)
    return {"error": caught(lambda: comm.agree("commit", None))}


def killed(rank: int) -> Report:
    """A rank is killed in a save, where the others wait for it. One of them is slow and lives."""
    comm = TorchComm(make_group(), 1800.0)
    folder = Path(sys.argv[4]).with_suffix(".checkpoint")
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3), (0, rank, 3))}

    def watch(progress: Progress) -> None:
        if progress.phase == "writing" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if progress.phase == "writing" and rank == 1 and not slept.is_set():
            slept.set()
            time.sleep(SLOW_SECONDS / SLOW_FACTOR)

    hurry(SLOW_FACTOR)
    slept = threading.Event()
    report: Report = {"error": caught(lambda: save(state, folder / "1", comm=comm, progress=watch))}
    report["next"] = caught(lambda: save(state, folder / "2", comm=comm))
    report["committed"] = check_is_distributed_checkpoint(folder / "1")
    return report


def stopped(rank: int) -> Report:
    """Rank 2 is stopped for long in a step, and its connections stand."""
    comm = make_comm(1800.0)
    pids = comm.all_gather(os.getpid())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    hurry(40)
    report = {"error": caught(lambda: comm.all_gather(rank))}
    if rank == 0:
        os.kill(pids[2], signal.SIGKILL)
    return report


def hurry(factor: int) -> None:
    """Let the clock of this process, and what it waits for in torch, run so many times as fast."""
    now, wait, work = time.monotonic, dist.Work.wait, vars(dist)["Work"]
    begin = now()
    time.monotonic = lambda: begin + factor * (now() - begin)
    work.wait = lambda started, timeout: wait(started, timeout / factor)


def done(_rank: int) -> Report:
    """Every rank ends as soon as it has agreed, and rank 0 is the first to know."""
    comm = make_comm()
    return {"error": caught(lambda: comm.agree("commit", None))}


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


def stopped_host(rank: int) -> Report:
    """Rank 0, which holds the store, is stopped while the others wait; all end without it."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3), (0, rank, 3))}
    folder = Path(sys.argv[4]).with_suffix(".checkpoint")

    def stop(_: Progress) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    save(state, folder / "1")
    default_comm().timeout_seconds = FROZEN_SECONDS  # type: ignore[attr-defined]
    return {"error": caught(lambda: save(state, folder / "2", progress=stop))}


def different_calls(rank: int) -> Report:
    comm = make_comm()
    folder = Path(sys.argv[4]).with_suffix(".checkpoint")
    calls: list[list[Callable[[], object]]] = [
        [lambda: save({"a": 1}, folder, comm=comm), lambda: load({"a": 1}, folder, comm=comm)],
        [lambda: comm.agree("commit", None), lambda: comm.all_gather("x" * 1_000_000)],
        [lambda: comm.all_same(1), lambda: comm.broadcast("x")],
    ]
    report: Report = {"errors": [caught(pair[rank == 1]) for pair in calls]}
    report["after"] = comm.all_gather(rank)
    report["committed"] = (folder / "metadata.json").exists()
    return report


def nonsense_for_a_timeout(_rank: int) -> Report:
    report: Report = {}
    for text in ("abc", "", "-3", "0", "nan", "inf", "1e300"):
        os.environ["DIST_CHECKPOINTING_TIMEOUT_SECONDS"] = text
        report[text] = refusal(default_comm)
    del os.environ["DIST_CHECKPOINTING_TIMEOUT_SECONDS"]
    comm = default_comm()
    assert isinstance(comm, TorchComm)
    report["group"] = TorchComm(make_group()).timeout_seconds
    report["torch's default"] = TorchComm(dist.new_group(backend="gloo")).timeout_seconds
    for seconds in (-3, 0, float("nan"), 1e300):
        report[f"argument {seconds}"] = refusal(lambda: default_comm(seconds))  # noqa: B023
        report[f"attribute {seconds}"] = refusal(lambda: setattr(comm, "timeout_seconds", seconds))  # noqa: B023
    report["kept"] = comm.timeout_seconds
    return report


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def chosen_timeouts(_rank: int) -> Report:
    os.environ["DIST_CHECKPOINTING_TIMEOUT_SECONDS"] = "33.5"
    report: Report = {"variable": default_comm().timeout_seconds}  # type: ignore[attr-defined]
    report["argument"] = default_comm(timeout_seconds=44).timeout_seconds  # type: ignore[attr-defined]
    report["kept"] = default_comm().timeout_seconds  # type: ignore[attr-defined]
    report["duplicate"] = default_comm().duplicate().timeout_seconds  # type: ignore[attr-defined]
    report["group"] = group_comm(make_group(), default_comm()).timeout_seconds  # type: ignore[attr-defined]
    return report


def two_threads(rank: int) -> Report:
    comm, reports = make_comm(), list[Report]()
    threads = [
        threading.Thread(target=lambda: reports.append(caught(lambda: comm.all_gather(rank))))
        for _ in range(2 if rank == 0 else 0)
    ]
    for thread in threads:
        thread.start()
    while len(reports) < len(threads) / 2:  # one waits for the other ranks, and one is refused
        time.sleep(0.01)
    make_other_ranks_come(rank)
    for thread in threads:
        thread.join()
    if rank == 0:
        return {"refused": reports[0], "gathered": reports[1]["value"]}
    return {"refused": None, "gathered": comm.all_gather(rank)}


def make_other_ranks_come(rank: int) -> None:
    flag = Path(sys.argv[4]).with_suffix(".come")
    if rank == 0:
        flag.touch()
    while not flag.exists():
        time.sleep(0.01)


def forked(rank: int) -> Report:
    comm = default_comm()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        actions = (default_comm, lambda: comm.agree("x", None), lambda: SingleProcess().kept)
        os.write(writer, json.dumps([caught(action) for action in actions]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    report: Report = {"child": json.loads(os.read(reader, 100_000))}
    report["after"] = comm.all_gather(rank)
    return report


def unpicklable(rank: int) -> Report:
    comm = make_comm()
    value: object = (lambda: 0) if rank == 1 else rank
    return {"error": caught(lambda: comm.exchange("describe", lambda: value))}


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
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


if __name__ == "__main__":
    start("first")
    names, number = sys.argv[1].split("+"), int(sys.argv[2])
    reports = {name: globals()[name](number) for name in names}
    print(json.dumps(reports if len(names) > 1 else reports[names[0]]), flush=True)  # noqa: T201
    if names == ["stopped_host"]:
        dist.destroy_process_group()
        sys.exit()
    # Tearing down a group with a dead member would wait for it.
    os._exit(0)
