"""A training with Accelerate that saves behind the training and resumes by itself.

pip install accelerate
python examples/accelerate_training.py DIR                             # or
accelerate launch --cpu --num_processes 2 examples/accelerate_training.py DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from dist_checkpointing import CheckpointManager
from dist_checkpointing.interop import TorchState


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and resume with Accelerate.")
    parser.add_argument("run", type=Path, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=12, help="number of steps to reach")
    given = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    state = TorchState(model, optimizer, scaler=accelerator.scaler)
    with CheckpointManager(given.run) as manager:
        if manager.latest() is not None:
            manager.load(state)
            accelerator.print(f"resumed at step {state.step}")
        while state.step < given.steps:
            x = torch.rand(16, 8)
            loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            state.step += 1
            accelerator.print(f"step {state.step} loss {float(loss.detach()).hex()}")
            if state.step % 4 == 0:
                manager.async_save(state.step, state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
