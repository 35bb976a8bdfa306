"""One rank of tests/distributed/test_async.py: saves a toy behind its training.

Usage: async_rank.py SCENARIO ROOT RANK WORLD_SIZE PORT
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_checkpointing as dc
from dist_checkpointing.comm import TorchComm


class Toy:
    """A state whose every value after n steps is known, and differs between steps."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.step, self.part = 0, (0, rank, world_size)
        whole = torch.arange(24.0 * 4096, dtype=torch.float64).reshape(24, 4096)
        self.weight = whole.chunk(world_size)[rank].clone()

    def state(self) -> dict[str, Any]:
        weight = dc.ShardedTensor.from_rank_offsets("w", self.weight, self.part)
        return {"w": weight, "step": self.step}

    def advance(self) -> None:
        self.step += 1
        dist.all_reduce(torch.ones(8))  # the training's own collective, behind which saves go on
        self.weight += 1


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
    scenario, root_text, rank_text, size_text, port = sys.argv[1:]
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
    # The last lines of a script that waits for nothing.
    toy = Toy(rank, int(size_text))
    toy.advance()
    dc.CheckpointManager(root).async_save(1, toy.state())
    if scenario == "interrupt":
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
