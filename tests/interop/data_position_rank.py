"""One rank of a training with DistributedDataParallel that saves every third step.

Usage: data_position_rank.py FOLDER STOP REPORTS     (STOP: the step after which the run is lost)
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_checkpointing import CheckpointManager
from dist_checkpointing.interop import DataPosition, TorchState


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Vectors of which a model learns the sum, each with its number."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(6, generator=torch.Generator().manual_seed(index))


def main(folder: str, stop: str, reports: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    position = DataPosition(dataset_size=52, batch_size=12, seed=5)
    loader: Any = torch.utils.data.DataLoader(
        Samples(),
        batch_sampler=position.batches(),
        num_workers=1,
        prefetch_factor=4,
        multiprocessing_context="fork",  # a rank of the tests would start workers that import torch
    )
    state = TorchState(model, optimizer, data=position)
    steps = []
    with CheckpointManager(folder) as manager:
        if manager.latest() is not None:
            manager.load(state)
        while state.step < int(stop):
            for samples, x in loader:
                number = torch.tensor(len(samples))
                dist.all_reduce(number)
                losses = (model(x).squeeze(-1) - x.sum(-1)).square()
                # The mean of all ranks, also where they have different numbers of samples.
                loss = losses.sum() * dist.get_world_size() / number
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                position.advance()
                state.step += 1
                steps.append([state.step, samples.tolist(), float(losses.sum().detach())])
                if state.step % 3 == 0:
                    manager.save(state.step, state)
                if state.step == int(stop):
                    break
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
