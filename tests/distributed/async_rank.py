"""One rank of tests/distributed/test_async.py: trains a toy, saving behind it.

Usage: async_rank.py SCENARIO ROOT RANK WORLD_SIZE PORT STEPS
"""

import json
import os
import sys
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


def train(root: Path, rank: int, world_size: int, steps: int) -> dict[str, Any]:
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
    while toy.step < steps:
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


def main() -> None:
    scenario, root_text, rank_text, size_text, port, steps = sys.argv[1:]
    root, rank = Path(root_text), int(rank_text)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=int(size_text),
        timeout=timedelta(seconds=20),
    )
    if scenario == "kept":
        report = with_kept_savers(root, rank, int(size_text))
        (root.parent / f"report-{rank}.json").write_text(json.dumps(report))
        return  # what is kept goes by itself
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
        report = train(root, rank, int(size_text), int(steps))
    except (dc.CheckpointingException, RuntimeError) as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    report["at"] = time.time()
    (root.parent / f"report-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # a process group that has lost a rank cannot be taken down in an orderly way


if __name__ == "__main__":
    main()
