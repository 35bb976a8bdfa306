"""One rank of tests/distributed/test_async.py: trains a toy, saving behind it.

Usage: async_rank.py SCENARIO ROOT RANK WORLD_SIZE PORT STEPS KILL_AT

KILL_AT is when this process kills itself: so many steps after it has resumed, and the fraction in
tenths of a second after that; negative for never.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_checkpointing as dc
from dist_checkpointing.comm import TorchComm

ROWS = 24


class Toy:
    """A state whose every value after n steps is known, and differs between steps."""

    def __init__(self, rank: int, world_size: int) -> None:
        part = (0, rank, world_size)
        self.step = 0
        whole = torch.arange(ROWS * 4096, dtype=torch.float64).reshape(ROWS, 4096)
        self.weight = whole.chunk(world_size)[rank].clone()
        self.moment = torch.zeros(ROWS // world_size, 64)
        self.shared = torch.zeros(3)
        self.part = part

    def state(self) -> dict[str, Any]:
        shard = dc.ShardedTensor.from_rank_offsets
        return {
            "w": shard("w", self.weight, self.part),
            "m": shard("optimizer.m", self.moment, self.part),
            "s": shard("s", self.shared, replica_id=self.part[1]),
            "rng": dc.ShardedObject("rng", [self.step], (self.part[2],), (self.part[1],)),
            "step": self.step,
        }

    def advance(self) -> None:
        self.step += 1
        dist.all_reduce(torch.ones(8))  # the training's own collective, behind which saves go on
        self.weight += 1
        self.moment.fill_(self.step)
        self.shared.fill_(-self.step)

    def is_right(self) -> bool:
        rank, world_size = self.part[1:]
        whole = torch.arange(ROWS * 4096, dtype=torch.float64).reshape(ROWS, 4096) + self.step
        return bool(
            torch.equal(self.weight, whole.chunk(world_size)[rank])
            and (self.moment == self.step).all()
            and (self.shared == -self.step).all()
        )


def train(root: Path, rank: int, world_size: int, steps: int, kill_at: float) -> dict[str, Any]:
    """Resume, and train on: what was loaded, and whether it was right."""
    # Making a comm is a step too, to which ranks may come late.
    comm = TorchComm(dist.new_group(timeout=timedelta(seconds=20)), 20.0)
    comm.timeout_seconds = 2.0
    manager = dc.CheckpointManager(root, comm=comm, retention=dc.Retention(keep_last=2))
    toy = Toy(rank, world_size)
    report: dict[str, Any] = {"resumed": None, "right": True}
    if manager.latest() is not None:
        loaded = manager.load(toy.state())
        report["resumed"] = toy.step = loaded["step"]
        report["right"] = toy.is_right() and loaded["rng"] == [toy.step]
    first = toy.step
    while toy.step < steps:
        if kill_at >= 0 and toy.step - first == int(kill_at):
            delay = (kill_at % 1) * 0.1
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        toy.advance()
        manager.async_save(toy.step, toy.state())
    manager.close()
    report["steps"] = manager.steps()
    return report


def with_kept_savers(root: Path, rank: int, world_size: int) -> dict[str, Any]:
    """``async_save`` without a saver: again and again, for all ranks and for two of them."""
    pair = dist.new_group([0, 1])
    toy = Toy(rank, world_size)
    groups = []
    for step in (1, 2, 3):
        toy.advance()
        dc.async_save(toy.state(), root / f"step-{step:08d}")
        if rank < 2:
            assert isinstance(pair, dist.ProcessGroup)
            part = dc.ShardedTensor.from_rank_offsets("w", torch.full((2,), step), (0, rank, 2))
            dc.async_save({"w": part}, root.parent / f"pair-{step}", comm=TorchComm(pair))
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return {"groups": groups}


def with_dropped_savers(root: Path, rank: int, world_size: int, steps: int) -> dict[str, Any]:
    """A saver for each save, dropped by some ranks while it is under way, by others later."""
    toy = Toy(rank, world_size)
    store: Any = dist.distributed_c10d._get_default_store()
    left = []
    for step in range(1, 1 + steps):
        toy.advance()
        saver = dc.AsyncSaver()
        handle = saver.save(toy.state(), root / f"step-{step:08d}")
        if (rank + step) % 2:
            handle.result()
        del saver
        handle.result()
        for thread in threading.enumerate():
            if thread.name.startswith("async-save"):
                thread.join()
        gc.collect()
        dist.barrier()
        left.append((store.num_keys(), len(dist.distributed_c10d._world.pg_map)))
        dist.barrier()
    return {"left": left}


def main() -> None:
    scenario, root_text, rank_text, size_text, port, steps, kill_at = sys.argv[1:]
    root, rank = Path(root_text), int(rank_text)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=int(size_text),
        timeout=timedelta(seconds=20),
    )
    if scenario == "part":
        # Rank 2 knows nothing of what the two others do.
        pair = dist.new_group([0, 1])
        if rank < 2:
            toy = Toy(rank, 2)
            toy.step = 1
            toy.weight += 1
            toy.moment.fill_(1)
            toy.shared.fill_(-1)
            assert isinstance(pair, dist.ProcessGroup)
            with dc.CheckpointManager(root, comm=TorchComm(pair)) as manager:
                manager.async_save(1, toy.state())
        dist.barrier()
        dist.destroy_process_group()
        return
    if scenario == "kept":
        report = with_kept_savers(root, rank, int(size_text))
        (root.parent / f"report-{rank}.json").write_text(json.dumps(report))
        return  # what is kept goes by itself
    if scenario == "dropped":
        report = with_dropped_savers(root, rank, int(size_text), int(steps))
        (root.parent / f"report-{rank}.json").write_text(json.dumps(report))
        dist.destroy_process_group()
        return
    if scenario == "exit":
        # The last lines of a script that waits for nothing.
        toy = Toy(rank, int(size_text))
        toy.advance()
        dc.CheckpointManager(root).async_save(1, toy.state())
        return
    if scenario in ("raise", "interrupt"):
        toy = Toy(rank, int(size_text))
        toy.advance()
        dc.CheckpointManager(root).async_save(1, toy.state())
        raise KeyboardInterrupt if scenario == "interrupt" else ValueError("loss is nan")
    try:
        report = train(root, rank, int(size_text), int(steps), float(kill_at))
    except (dc.CheckpointingException, RuntimeError) as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    report["at"] = time.time()
    (root.parent / f"report-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # a process group that has lost a rank cannot be taken down in an orderly way


if __name__ == "__main__":
    main()
