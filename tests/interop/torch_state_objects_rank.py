"""One rank of test_torch_state_ranks.py with several models and objects of DTensors.

Usage: torch_state_objects_rank.py FOLDER REPORTS
"""

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
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dist_checkpointing import InvalidShardingError, load, load_tensors_metadata, save
from dist_checkpointing.interop import TorchState


class Averages:
    """What a trainer keeps beside the model."""

    def __init__(self, model: nn.Module, value: float, **others: Any) -> None:
        shadow = {name: torch.full_like(p, value) for name, p in model.named_parameters()}
        self.state: dict[str, Any] = {"shadow": shadow, **others}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def refused(call: Any, *given: Any) -> str:
    try:
        call(*given)
    except InvalidShardingError as error:
        return str(error)
    return ""


def cut(seed: int) -> Any:
    torch.manual_seed(seed)
    return fully_shard(nn.Linear(5, 3), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def with_nests(model: nn.Module) -> Any:
    """An optimizer with a list of DTensors for each parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p] = {"history": [p.detach() * 2, 3, p.detach() * 4]}
    return optimizer


def main(folder: str, reports: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    report: dict[str, Any] = {}

    def parts(seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        return [nn.Linear(3, 3), nn.Linear(3, 3)]

    several = nn.ModuleList(map(DistributedDataParallel, parts(0)))
    save(TorchState(several), f"{folder}/several")
    report["keys"] = sorted(load_tensors_metadata(f"{folder}/several"))
    plain = nn.ModuleList(parts(1))
    load(TorchState(plain), f"{folder}/several")
    pairs = zip(plain.parameters(), several.parameters(), strict=True)
    report["same"] = all(torch.equal(one, other) for one, other in pairs)

    model = cut(0)
    mixed = TorchState(model, averages=Averages(model, 1.0, rank=rank))
    report["mixed"] = refused(save, mixed, f"{folder}/mixed")
    zero = ZeroRedundancyOptimizer(several.parameters(), torch.optim.AdamW)
    report["zero"] = refused(TorchState, several, zero)

    optimizer = with_nests(model)
    save(TorchState(model, optimizer), f"{folder}/nests")
    other = cut(1)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1)
    load(TorchState(other, fresh), f"{folder}/nests")
    report["nests"] = [
        [own.to_local().tolist() if isinstance(own, DTensor) else own for own in entries]
        == [own.to_local().tolist() if isinstance(own, DTensor) else own for own in wanted]
        for entries, wanted in (
            (fresh.state[p]["history"], optimizer.state[q]["history"])
            for p, q in zip(other.parameters(), model.parameters(), strict=True)
        )
    ]
    Path(reports, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
