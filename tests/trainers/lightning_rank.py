"""One rank of a training with Lightning's Trainer.

Usage: lightning_rank.py ddp|fsdp2|position FOLDER EPOCHS REPORTS     (position: EPOCHS are steps)
"""

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dist_checkpointing.interop import DataPosition, lightning as ours
from lightning_models import Module, fit


class Cut(Module):
    """The same module, cut by FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers[2], self.layers):
            if not isinstance(layer, torch.distributed.fsdp.FSDPModule):
                fully_shard(layer, mesh=mesh)


def go_on_at_a_position(folder: str, steps: str) -> Any:
    """Without dropout, which drops other values on other ranks."""
    module = Module()
    module.layers[1].p = 0.0  # type: ignore[assignment]
    position = DataPosition(30, 10, seed=5)
    return fit(
        3,
        module=module,
        callbacks=[ours.RunCheckpoints(folder, every_n_steps=1, position=position)],
        position=position,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=int(steps),
    )


def main(mode: str, folder: str, epochs: str, reports: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_cut = mode == "fsdp2"
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if is_cut:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if mode == "position":
        trainer = go_on_at_a_position(folder, epochs)
    else:
        trainer = fit(
            int(epochs),
            module=Cut() if is_cut else None,
            callbacks=[ours.RunCheckpoints(folder)],
            devices=2,
            strategy=strategy,
        )
    digests = {}
    for name, parameter in trainer.lightning_module.named_parameters():
        assert isinstance(parameter, DTensor) == is_cut
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digests[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    report = {
        "digests": digests,
        "losses": trainer.lightning_module.losses,
        "step": trainer.global_step,
    }
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
