"""One rank of test_torch_state_ranks.py; writes what it saw to REPORTS/<rank>.json.

Usage: torch_state_rank.py save|load LAYOUT CHECKPOINT REPORTS
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dist_checkpointing import load, save
from dist_checkpointing.interop import TorchState

STEPS = 3


class Block(nn.Module):
    """Extents that no number of ranks here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(9), nn.Linear(9, 14), nn.Linear(14, 9)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(self.up(self.norm(x)).relu()))
        return y


class Model(nn.Module):
    """A model with a buffer and tied weights."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 9)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(9, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x: torch.Tensor = self.head(self.blocks(self.embed(tokens)))
        return x


class Loader:
    """Tokens of its own for each data-parallel rank."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)

    def next(self) -> torch.Tensor:
        return torch.randint(0, 7, (4, 5), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Training:
    """One rank of a training with a layout."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        model: Any = Model()
        world_size, rank = dist.get_world_size(), dist.get_rank()
        tp = 2 if "tp" in layout else 1
        dp_rank = rank // tp
        if layout == "ddp":
            model = DistributedDataParallel(model)
        elif layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "shard"))
            self._cut(model, mesh)
        elif layout != "plain":
            names = ("dp", "tp")
            mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=names)
            if tp > 1:
                for block in model.blocks:
                    cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, mesh["tp"], cuts)
            if layout != "tp":
                self._cut(model, mesh["dp"])
        # Another order of the groups in each layout.
        groups = [
            [p for p in model.parameters() if (p.ndim == 1) == thin] for thin in (True, False)
        ]
        if layout in ("ddp", "tp"):
            groups.reverse()
        self.model = model
        self.optimizer = torch.optim.AdamW([{"params": g} for g in groups], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.loader = Loader(dp_rank)
        torch.manual_seed(1000 * seed + dp_rank)  # dropout
        self.state = TorchState(model, self.optimizer, scheduler=self.scheduler, loader=self.loader)

    @staticmethod
    def _cut(model: Any, mesh: Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def train(self, steps: int) -> list[str]:
        """The losses, by their bits."""
        losses = []
        for _ in range(steps):
            tokens = self.loader.next()
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            self.state.step += 1
            losses.append(float(loss).hex())
        return losses

    def digests(self) -> dict[str, str]:
        """SHA-256 of every whole tensor of model and optimizer, by its name."""
        found = {}
        for raw, parameter in self.model.named_parameters():
            name = raw.removeprefix("module.")
            tensors = {name: parameter}
            for entry, value in self.optimizer.state[parameter].items():
                tensors[f"{name} {entry}"] = value
            for key, tensor in tensors.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                data = whole.detach().contiguous().numpy().tobytes()
                found[key] = hashlib.sha256(data).hexdigest()
        return found


def main(action: str, layout: str, checkpoint: str, reports: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(layout, seed=1 if action == "save" else 2)
    if action == "save":
        training.train(STEPS)
        save(training.state, checkpoint)
    else:
        load(training.state, checkpoint, verify="restored")
    report = {
        "step": training.state.step,
        "digests": training.digests(),
        "rates": [group["lr"] for group in training.optimizer.param_groups],
        "losses": training.train(STEPS),
    }
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
