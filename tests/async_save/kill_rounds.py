"""Kill a world of simulated ranks again and again, for tests/async_save/test_kills.py.

Usage: kill_rounds.py FOLDER ROUNDS SEED SECONDS

A world is three ranks, threads of one process, that train a toy with an asynchronous save after
every step. In each round either the whole world is killed with SIGKILL at a random moment, or one
rank stops for ever at one of the reports of a save, and the others must hear of it. After each
round another process looks whether all that is committed is right and nothing good is lost; the
next round resumes from there. The last line of the output counts what happened, as JSON.

Processes are forked, since a fresh one takes seconds to import torch; this one has no threads.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import ThreadComm
from dist_checkpointing.storage import Durability, Progress, StorageOptions
from dist_checkpointing.strategies import (
    TorchDistSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrSaveShardedStrategy,
)

WORLD = 3
STEPS_A_ROUND = 6
# What survives a killed process need not be on the disk.
OPTIONS = StorageOptions(threads=2, durability=Durability.PAGE_CACHE)
STRATEGIES = (Zarr3SaveShardedStrategy, ZarrSaveShardedStrategy, TorchDistSaveShardedStrategy)
SURVIVED, LOST, WRONG, ERROR_HEARD = 0, 10, 11, 12


class Stopped(BaseException):
    """A rank ends here, without a word."""


def state(rank: int, step: int) -> dict[str, Any]:
    part = (0, rank, WORLD)
    shard = dc.ShardedTensor.from_rank_offsets
    return {
        "w": shard("w", torch.full((2, 64), float(step)) + rank, part),
        "m": shard("optimizer.m", torch.full((5,), float(step)), replica_id=rank),
        "rng": dc.ShardedObject("rng", [step], (WORLD,), (rank,)),
        "step": step,
    }


def train(root: Path, number: int, comm: ThreadComm, stop_at: int | None) -> None:
    reports = 0

    def stop(_: Progress) -> None:
        nonlocal reports
        reports += 1
        if stop_at is not None and reports >= stop_at:
            comm._rendezvous.leave(comm.rank)
            raise Stopped

    manager = dc.CheckpointManager(
        root,
        STRATEGIES[number % len(STRATEGIES)](options=OPTIONS),
        comm=comm,
        retention=dc.Retention(keep_last=2),
        finalize="background" if number % 2 else "caller",
    )
    step = 0
    if manager.latest() is not None:
        step = manager.load(state(comm.rank, -1))["step"]
    for _ in range(STEPS_A_ROUND):
        step += 1
        manager.async_save(step, state(comm.rank, step), progress=stop)
    manager.close()


def world(root: Path, number: int, stop_at: tuple[int, int] | None) -> int:
    """Train, with a rank that stops at its n-th report: SURVIVED or ERROR_HEARD."""
    rendezvous = ThreadComm.Rendezvous(WORLD, 10.0)
    ends: list[str] = [""] * WORLD

    def one(rank: int) -> None:
        mine = stop_at[1] if stop_at is not None and stop_at[0] == rank else None
        try:
            train(root, number, ThreadComm(rendezvous, rank), mine)
            ends[rank] = "survived"
        except Stopped:
            ends[rank] = "stopped"
        except dc.CheckpointingException:
            ends[rank] = "heard"
            rendezvous.leave(rank)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if ends == ["survived"] * WORLD:
        return SURVIVED
    # Where the stopped rank was in a thread behind its training, it heard of itself too.
    others = {end for rank, end in enumerate(ends) if stop_at is None or rank != stop_at[0]}
    return ERROR_HEARD if others == {"heard"} else WRONG


def look(root: Path, least: int) -> int:
    """Whether all that is committed is right, and at least ``least`` is among it."""
    manager = dc.CheckpointManager(root)
    steps = manager.steps()
    if max(steps, default=0) < least or (manager.latest_valid() or 0) < least:
        return LOST
    for step in steps:
        found = dc.load_plain_tensors(manager.folder(step))
        rows = found["w"].view(WORLD, -1)
        right = all(set(rows[rank].tolist()) == {step + rank} for rank in range(WORLD))
        right = right and found["step"] == step and set(found["optimizer.m"].tolist()) == {step}
        if not right:
            return WRONG
    # What one kill leaves of the record is cleared by the next manager that saves.
    return WRONG if len(list(root.glob("*.tmp"))) > 1 else SURVIVED


def in_fork(work: Callable[[], int], kill_after: float | None = None) -> int:
    """Exit code of ``work`` in a process of its own; negative if that was killed."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            code = work()
        except BaseException:  # noqa: BLE001 - it must not run on in what it was forked from
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def newest(root: Path) -> int:
    """What is committed by now, judged by nothing but the files."""
    found = [path for path in root.glob("step-*") if (path / "metadata.json").is_file()]
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def main() -> None:
    folder, rounds, seed, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    moments = random.Random(seed)
    deadline = time.monotonic() + seconds
    counts = {"killed": 0, "stopped": 0, "survived": 0, "steps": 0}
    for number in range(rounds):
        if time.monotonic() > deadline:
            break
        root = folder / f"run-{number // 20}"
        least = newest(root) if root.exists() else 0
        if moments.random() < 0.6:
            after = moments.uniform(0.0, 0.25)
            code = in_fork(lambda: world(root, number, None), after)  # noqa: B023 - called here
            counts["killed" if code < 0 else "survived"] += 1
            assert code in (SURVIVED, -signal.SIGKILL), f"round {number}: {code}"
        else:
            stop_at = moments.randrange(WORLD), moments.randrange(1, 30)
            code = in_fork(lambda: world(root, number, stop_at))  # noqa: B023
            counts["stopped" if code == ERROR_HEARD else "survived"] += 1
            assert code in (SURVIVED, ERROR_HEARD), f"round {number}: {code}, {stop_at}"
        assert newest(root) >= least, f"round {number}: a good checkpoint was lost"
        code = in_fork(lambda: look(root, least))  # noqa: B023
        assert code == SURVIVED, f"round {number}: {code} after the kill"
        counts["steps"] += newest(root) - least
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
