"""A training with Lightning that resumes by itself.

pip install lightning
python examples/lightning_training.py DIR --epochs 2
python examples/lightning_training.py DIR --epochs 4     # continues with epoch 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from dist_checkpointing.interop.lightning import RunCheckpoints


class Sums(LightningModule):  # type: ignore[misc]  # lightning may be missing
    """Predicts sums of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = (self.layers(x).squeeze(-1) - x.sum(-1)).square().mean()
        print(f"step {self.trainer.global_step + 1} loss {float(loss.detach()).hex()}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and resume with Lightning.")
    parser.add_argument("run", type=Path, help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs to reach")
    given = parser.parse_args()
    seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.rand(64, 8))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=given.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RunCheckpoints(given.run)],
    )
    trainer.fit(Sums(), loader)


if __name__ == "__main__":
    main()
