"""A rank that saves and loads the models of a test as Hugging Face folders, cut by TP and FSDP2."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dist_checkpointing as dc
from dist_checkpointing.interop import TorchState, shard_state_dict
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import SafetensorsSaveShardedStrategy
from hf_models import MODELS, RECIPES, make

warnings.simplefilter("ignore")


def cut(model: nn.Module) -> nn.Module:
    """Every other matrix by columns, the others by rows over two ranks; then all by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for number, module in enumerate(model.modules()):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            axis = number % parameter.ndim
            is_cut = parameter.ndim > 1 and parameter.shape[axis] % 2 == 0
            places = [Shard(axis)] if is_cut else [Replicate()]
            if parameter not in wholes:  # tied weights stay so
                whole = distribute_tensor(parameter.detach(), mesh["tp"], places)
                wholes[parameter] = nn.Parameter(whole)
            module.register_parameter(name, wholes[parameter])
    fully_shard(model, mesh=mesh["dp"])
    return model


def main() -> None:
    folder, reports = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), dict[str, Any]()
    for name in MODELS:
        model: Any = cut(make(name, seed=1))
        state = shard_state_dict(model.state_dict())
        files = {"config.json": model.config.to_json_string().encode()}
        options = StorageOptions(data_file_bytes=100_000)
        strategy = SafetensorsSaveShardedStrategy(extra_files=files, options=options)
        dc.save(state, folder / name, strategy)
        is_tied = model.config.tie_word_embeddings  # a state dict has the tied weight twice
        for way in ("state",) if is_tied else ("state", "state dict"):
            again = cut(make(name, seed=2))
            template = TorchState(again) if way == "state" else shard_state_dict(again.state_dict())
            dc.load(template, folder / f"{name}-theirs", recipe=RECIPES.get(name))
            same = zip(model.state_dict().items(), again.state_dict().values(), strict=True)
            found[f"{name} {way}"] = [
                key for (key, one), other in same if not torch.equal(_whole(one), _whole(other))
            ]
    (reports / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
