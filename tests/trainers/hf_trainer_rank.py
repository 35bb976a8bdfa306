"""One rank of a training with the Trainer.

Usage: hf_trainer_rank.py ddp|fsdp2|position FOLDER STOP REPORTS     (STOP: a step, or "none")
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dist_checkpointing.interop import DataPosition

sys.path.insert(0, str(Path(__file__).parent))


def cut(model: Any) -> Any:
    """What the Trainer gets of a model that transformers has cut up while loading it.

    Accelerate's own way to FSDP2 needs GPUs.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.layers[0], model.layers[2], model):
        fully_shard(layer, mesh=mesh)
    model.is_distributed_loading_by_transformers = True
    return model


def without_dropout(model: Any) -> Any:
    """What is the same on any number of ranks."""
    model.layers[1].p = 0.0
    return model


def main(mode: str, folder: str, stop: str, reports: str) -> None:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from test_hf_trainer import train

    # The Trainer cannot resume such models by itself, and refuses to try.
    given: dict[str, Any] = {"cut": cut, "save_only_model": True} if mode == "fsdp2" else {}
    if mode == "position":
        accumulation = 2 // int(os.environ["WORLD_SIZE"])
        given = {"cut": without_dropout, "gradient_accumulation_steps": accumulation}
        given["position"] = DataPosition(40, 10, seed=6)
    trainer = train(Path(folder), stop=None if stop == "none" else int(stop), **given)
    digests = {}
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor) == (mode == "fsdp2")
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digests[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = {"digests": digests, "losses": losses, "step": trainer.state.global_step}
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
