"""Train on four ranks, lose one, and go on with three: the same samples in the same order.

    python examples/elastic_training.py [--folder DIR] [--steps 30]

Each rank stands for a machine. One of them is killed between two saves; three start again from the
last save on the shared folder. elastic.png shows the loss, and which rank trained on which sample.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from itertools import count, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_checkpointing import CheckpointManager
from dist_checkpointing.interop import DataPosition, TorchState
from harness import add_folder, output_folder

DATASET_SIZE, BATCH_SIZE, SAVE_EVERY = 240, 24, 5
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


class Sums(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Vectors of which a model learns the sum, each with its number."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(8, generator=torch.Generator().manual_seed(index))


def train(rank: int, world_size: int, folder: Path, steps: int, killed_at: int | None) -> None:
    """One rank; it writes a line for each step, and dies of a SIGKILL after step ``killed_at``."""
    torch.set_num_threads(1)
    store = f"file://{folder}/ranks-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    position = DataPosition(DATASET_SIZE, BATCH_SIZE, seed=7)
    loader: Any = torch.utils.data.DataLoader(Sums(), batch_sampler=position.batches())
    state = TorchState(model, optimizer, data=position)
    with (
        CheckpointManager(folder / "run") as manager,
        (folder / f"log-{world_size}-{rank}").open("w") as log,
    ):
        if manager.latest() is not None:
            manager.load(state)
        while state.step < steps:
            for samples, x in islice(loader, steps - state.step):
                loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                position.advance()
                state.step += 1
                print(
                    json.dumps([state.step, float(loss.detach()), samples.tolist()]),
                    file=log,
                    flush=True,
                )
                if state.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step % SAVE_EVERY == 0:
                    manager.save(state.step, state)
    dist.destroy_process_group()


def run(world_size: int, folder: Path, steps: int, killed_at: int | None = None) -> list[Any]:
    """Train on so many ranks until all are done or one is dead: the log of each rank."""
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        own = killed_at if rank == world_size - 1 else None
        given = (rank, world_size, folder, steps, own)
        processes.append(mp.get_context("spawn").Process(target=train, args=given))
        processes[-1].start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.05)
        if any(process.exitcode for process in processes):  # the others wait for the dead one
            for process in processes:
                process.kill()
    codes = [process.exitcode for process in processes]
    if killed_at is None and any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    logs = [(folder / f"log-{world_size}-{rank}").read_text() for rank in range(world_size)]
    # The last line of a rank that was killed may be cut off, and others may be a step ahead.
    lines = [
        [json.loads(line) for line in log.splitlines(keepends=True) if line.endswith("\n")]
        for log in logs
    ]
    return list(zip(*lines, strict=False))


def draw(runs: list[list[Any]], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of its backend

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 7), height_ratios=(1, 2))
    resumed = runs[1][0][0][0]
    for steps, style in zip(runs, ("o--", "o-"), strict=True):
        losses = [sum(loss for _, loss, _ in ranks) / len(ranks) for ranks in steps]
        numbers = [ranks[0][0] for ranks in steps]
        above.plot(numbers, losses, style, markersize=3, label=f"{len(steps[0])} ranks")
        for step, ranks in zip(numbers, steps, strict=True):
            is_lost = steps is runs[0] and step >= resumed
            for (_, _, samples), colour in zip(ranks, COLOURS, strict=False):
                place, shade = (step - 0.3, 0.3) if is_lost else (step, 1.0)
                below.scatter([place] * len(samples), samples, 9, color=colour, alpha=shade)
    for axes in (above, below):
        axes.axvline(runs[0][-1][0][0] + 0.3, color="black", linestyle=":")
        axes.axvline(resumed - 0.5, color="gray", linewidth=0.8)
    above.set(
        ylabel="loss", title="A machine is lost at the dotted line; the rest go on at the grey"
    )
    above.legend()
    below.set(xlabel="step", ylabel="sample (colour: rank; pale: lost, and trained again)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lose one of four ranks, and go on with three.")
    parser.add_argument("--steps", type=int, default=30, help="number of steps to reach")
    add_folder(parser)
    given = parser.parse_args()
    folder = output_folder(parser, given.folder, "elastic-").resolve()
    killed_at = given.steps // 2 - 2
    before = run(4, folder, given.steps, killed_at)
    after = run(3, folder, given.steps)
    resumed = after[0][0][0]
    print(f"4 ranks: one was killed after step {killed_at}; 3 went on with step {resumed}")
    draw([before, after], folder / "elastic.png")

    kept = [*before[: resumed - 1], *after]
    found = [[sample for _, _, samples in ranks for sample in samples] for ranks in kept]
    position = DataPosition(DATASET_SIZE, BATCH_SIZE, seed=7)
    for step, batch in zip(count(1), found, strict=False):
        expected = next(iter(position.batches(0, 1)))
        if batch != expected:
            raise SystemExit(f"step {step} trained on {batch}, not on {expected}")
        position.advance()
    print(f"{len(found)} global batches are those of a run without a break: {folder}/elastic.png")


if __name__ == "__main__":
    main()
