"""A plain training loop with FSDP2 that saves behind the training and resumes by itself.

    torchrun --nproc-per-node 2 examples/torch_training.py DIR
    python examples/torch_training.py DIR --steps 40     # continues, in one process

What makes it resume is one TorchState and a CheckpointManager, all in ``main``.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dist_checkpointing import CheckpointManager, Retention
from dist_checkpointing.interop import TorchState

WIDTH = 32


class Batches:
    """Endless batches, different on each rank; its state says where it is."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        return torch.rand(16, WIDTH, generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def make_model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.05)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and resume.")
    parser.add_argument("run", help="folder of the checkpoints, or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=20, help="number of steps to reach")
    parser.add_argument("--save-every", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # torchrun started it
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    say = print if rank == 0 else lambda *_, **__: None
    torch.manual_seed(rank)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    batches = Batches(rank)

    state = TorchState(model, optimizer, scheduler=scheduler, batches=batches)
    with CheckpointManager(given.run, retention=Retention(keep_last=2)) as manager:
        manager.save_on_signal(signal.SIGTERM)
        if manager.latest() is not None:
            manager.load(state)
            say(f"resumed at step {state.step}", flush=True)
        saved = state.step
        while state.step < given.steps and not manager.preempted():
            x = batches.next()
            loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.step += 1
            loss = loss.detach()
            say(f"step {state.step} loss {loss:.4f} = {float(loss).hex()}", flush=True)
            if state.step % given.save_every == 0:
                manager.async_save(state.step, state)
                saved = state.step
        if state.step > saved:  # a signal came, or the steps are done
            manager.save(state.step, state)
            say(f"saved step {state.step}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
