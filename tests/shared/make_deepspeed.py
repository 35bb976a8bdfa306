"""Writes the DeepSpeed checkpoints of ``tests/golden``: ``python make_deepspeed.py FOLDER``.

Needs DeepSpeed, which no test does. ``expected.pt`` has what its own tools make of ``zeroN``:
``zero_to_fp32`` the weights, ``ds_to_universal`` the optimizer state, and all of ``universalN``.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

RANKS = 2


class Net(nn.Module):
    """Weights that do not divide by the number of ranks, tied and frozen ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.norm = nn.LayerNorm(6)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.body = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.body(self.norm(self.embed(tokens))))
        logits: torch.Tensor = self.head(hidden) * self.scale.sum().to(hidden.dtype)
        return logits


def train(rank: int, stage: int, folder: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": 29610 + stage}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # The environment comes first.
    deepspeed = importlib.import_module("deepspeed")
    torch.manual_seed(7)
    model = Net()
    deepspeed.init_distributed(dist_backend="gloo")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": True},
        },
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 13, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 2})
    torch.distributed.barrier()


def write_expected(folder: Path, stage: int) -> None:
    """Note what DeepSpeed's own tools find, and remove what no test needs."""
    place, universal = folder / f"zero{stage}", folder / f"universal{stage}"
    tool = importlib.import_module("deepspeed.utils.zero_to_fp32")
    files = (file for name in ("exp_avg", "exp_avg_sq") for file in universal.rglob(f"{name}.pt"))
    state = {}
    for file in files:
        found = torch.load(file)
        key = f"{file.parent.name}.{file.stem}"
        state[key] = found["param"] if isinstance(found, dict) else found
    expected = {"weights": tool.get_fp32_state_dict_from_zero_checkpoint(place), "state": state}
    torch.save(expected, place / "expected.pt")
    for script in place.glob("*.py"):
        script.unlink()


def main(folder: Path) -> None:
    for stage in (1, 2, 3):
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=train, args=(rank, stage, folder / f"zero{stage}"))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder"]
        command += [f"{folder}/zero{stage}/global_step3", "--inject_missing_state"]
        command += ["--output_folder", f"{folder}/universal{stage}"]
        subprocess.run(command, check=True)
        write_expected(folder, stage)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]))
