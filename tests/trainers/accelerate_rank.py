"""One rank of a training with Accelerate.

Usage: accelerate_rank.py save|load CHECKPOINT REPORTS
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dist_checkpointing import load, save
from dist_checkpointing.interop import TorchState


def main(action: str, checkpoint: str, reports: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0 if action == "save" else 1)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    data = torch.utils.data.TensorDataset(torch.rand(40, 6))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=5)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    state = TorchState(model, optimizer, scheduler=scheduler, scaler=accelerator.scaler)

    def train(steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            x = torch.rand(5, 6)
            loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            state.step += 1
            losses.append(float(loss.detach()).hex())
        return losses

    if action == "save":
        train(3)
        save(state, checkpoint)
    else:
        load(state, checkpoint)
    report = {"step": state.step, "losses": train(3), "rate": scheduler.get_last_lr()}
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
