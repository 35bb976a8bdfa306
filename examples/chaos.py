"""Train, save behind the training, and kill ranks at random moments: nothing is ever lost.

A tiny model is trained on WORLD ranks with an asynchronous save after every step. Again and again
one rank, or all of them, is killed with SIGKILL at a random moment, and training resumes from the
latest valid checkpoint. Whatever happens, the losses must be those of a run nobody disturbed.

Usage: python examples/chaos.py [--kills 200] [--world 2] [--seed 0] [--minutes 10]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_checkpointing import (
    CheckpointingException,
    CheckpointManager,
    Retention,
    ShardedTensor,
    StrategyNotFoundError,
)
from dist_checkpointing.comm import TorchComm

BACKENDS = ("tensorstore", "zarr", "torch_dist")
ROWS, COLUMNS = 8, 512
DEAD_AFTER_SECONDS = 1.0


class Model:
    """A linear map whose rows are spread over the ranks, and SGD with momentum."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(1)
        self.part = (0, rank, world_size)
        self.weight = torch.randn(ROWS, COLUMNS).chunk(world_size)[rank].clone()
        self.momentum = torch.zeros_like(self.weight)
        self.step = 0

    def state(self) -> dict[str, Any]:
        shard = ShardedTensor.from_rank_offsets
        return {
            "weight": shard("weight", self.weight, self.part),
            "momentum": shard("optimizer.momentum", self.momentum, self.part),
            "step": self.step,
        }

    def train_step(self) -> float:
        """One step, in place; the loss over all ranks."""
        generator = torch.Generator().manual_seed(self.step)
        data = torch.randn(COLUMNS, generator=generator)
        output = self.weight @ data
        self.momentum.mul_(0.9).add_(torch.outer(output, data), alpha=1e-4)
        self.weight.sub_(self.momentum)
        self.step += 1
        loss = output.square().sum()
        dist.all_reduce(loss)
        return float(loss)


def train(folder: Path, rank: int, world_size: int, steps: int, backend: str) -> None:
    """Resume from the latest valid checkpoint and train; rank 0 notes every loss."""
    store = dist.FileStore(str(folder / "rendezvous"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    group = dist.new_group(timeout=timedelta(seconds=20))
    comm = TorchComm(group, DEAD_AFTER_SECONDS)
    manager = CheckpointManager(
        folder / "run", backend, comm=comm, retention=Retention(keep_last=2, keep_every=10)
    )
    model = Model(rank, world_size)
    if manager.steps():
        model.step = manager.load(model.state())["step"]
    losses = {}
    while model.step < steps:
        losses[model.step] = model.train_step()
        if rank == 0:
            (folder / "losses.jsonl").open("a").write(f"{json.dumps(losses.popitem())}\n")
        manager.async_save(model.step, model.state())
    manager.close()


def life(folder: Path, world_size: int, steps: int, backend: str, kill: Any) -> list[int]:
    """Fork all ranks, kill some, wait for the rest: how each of them ended."""
    (folder / "rendezvous").unlink(missing_ok=True)
    started = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                train(folder, rank, world_size, steps, backend)
                code = 0
            except (CheckpointingException, RuntimeError) as error:
                if isinstance(error, StrategyNotFoundError):
                    print(error, file=sys.stderr)
            finally:
                os._exit(code)
        started.append(pid)
    if kill is not None:
        victims, seconds = kill
        time.sleep(seconds)
        for rank in victims:
            os.kill(started[rank], signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]


def losses_of(folder: Path) -> dict[int, float]:
    """Step -> loss; every time a step was trained, its loss must be the same."""
    losses: dict[int, float] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        step, loss = json.loads(line)
        assert losses.setdefault(step, loss) == loss, f"step {step} had another loss before"
    return losses


def undisturbed(world_size: int, steps: int) -> dict[int, float]:
    """The losses of a run that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        codes = life(Path(folder), world_size, steps, "zarr", None)
        assert codes == [0] * world_size, "training failed by itself"
        return losses_of(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="give up after so long")
    args = parser.parse_args()
    moments = random.Random(args.seed)  # noqa: S311 - not for secrets
    deadline = time.monotonic() + 60 * args.minutes
    steps_a_run = 40
    expected = undisturbed(args.world, steps_a_run)
    kills = runs = 0
    while kills < args.kills and time.monotonic() < deadline:
        backend = BACKENDS[runs % len(BACKENDS)]
        with tempfile.TemporaryDirectory() as name:
            folder, finished, reached = Path(name), False, 0
            while not finished:
                spare = kills >= args.kills or time.monotonic() > deadline
                alone, everybody = [moments.randrange(args.world)], range(args.world)
                victims = moments.choice([alone, everybody])
                kill = None if spare else (victims, moments.uniform(0.05, 1.2))
                codes = life(folder, args.world, steps_a_run, backend, kill)
                finished = codes == [0] * args.world
                kills += -signal.SIGKILL in codes
                steps = CheckpointManager(folder / "run").steps()
                assert max(steps, default=0) >= reached, "a good checkpoint was lost"
                reached = max(steps, default=0)
            assert losses_of(folder) == expected, "the losses are not those of an undisturbed run"
        runs += 1
        print(f"{kills} kills, {runs} runs came to their end with the same losses ({backend})")
    if kills < args.kills:
        print(f"out of time after {kills} of {args.kills} kills; all went well until then")


if __name__ == "__main__":
    main()
