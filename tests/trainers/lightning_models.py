"""A small module for Lightning, and a Trainer for it."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from dist_checkpointing.interop import DataPosition


class Module(LightningModule):  # type: ignore[misc]  # lightning may be missing
    """Predicts sums, and keeps the bits of its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: list[str] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = (self.layers(x).squeeze(-1) - x.sum(-1)).square().mean()
        self.losses.append(float(loss.detach()).hex())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


def fit(
    epochs: int,
    *,
    seed: int = 3,
    module: Module | None = None,
    ckpt_path: str | None = None,
    position: DataPosition | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer after ``epochs`` epochs of six steps on one device."""
    torch.manual_seed(seed)
    module = Module() if module is None else module
    data = torch.rand(30, 6, generator=torch.Generator().manual_seed(1))
    batches: dict[str, Any] = {"batch_size": 5, "shuffle": True}
    accumulation = options.get("accumulate_grad_batches", 1)
    if position is not None:
        rank, devices = int(os.environ.get("RANK", "0")), options.get("devices", 1)
        own = position.batches(rank, devices, accumulation=accumulation)
        batches = {"batch_sampler": own}
        options["use_distributed_sampler"] = False
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), **batches)
    options = {"devices": 1, "callbacks": [], **options}
    saves = any(isinstance(callback, Checkpoint) for callback in options["callbacks"])
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer
