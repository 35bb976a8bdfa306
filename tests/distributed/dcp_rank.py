"""One rank of tests/distributed/test_dcp.py; writes what was wrong to REPORTS/<rank>.json.

Usage, under torchrun:  dcp_rank.py save|load CHECKPOINTS REPORTS
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import (
    async_save as dcp_async_save,
    save as dcp_save,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dist_checkpointing import check_is_distributed_checkpoint, load
from dist_checkpointing.interop import DCPReader, DCPWriter, shard_state_dict, unshard_state_dict

BACKENDS = [("tensorstore", 1), ("zarr", 2), ("torch_dist", 1)]
CACHED = ("cached-0", "cached-1", "cached-2")
FOLDERS = (*(f"{name}-{version}" for name, version in BACKENDS), *CACHED, "async", "retried")
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((8, 6), torch.float32),
    "uneven": ((7, 5), torch.bfloat16),
    "tiny": ((2, 3), torch.float64),
    "both axes": ((6, 9), torch.int64),
    "fsdp over tp": ((5, 4), torch.float32),
    "hybrid": ((9, 2), torch.float16),
    "replicated": ((4,), torch.int32),
    "plain": ((3, 3), torch.float32),
    "scalar": ((), torch.float32),
}


def whole(name: str) -> torch.Tensor:
    """The global tensor, the same on every rank of every world."""
    shape, dtype = SHAPES[name]
    first = 1 + sorted(SHAPES).index(name)
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).reshape(shape).to(dtype)


def chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = tensor.chunk(count)
    return parts[index] if index < len(parts) else tensor[:0]


def cut_up() -> dict[str, torch.Tensor]:
    """All tensors, cut otherwise in a world of 4 than in one of 2."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2))
    dp, tp = grid.get_coordinate() or (0, 0)
    axis = 0 if size == 4 else 1
    placed: dict[str, tuple[Any, list[Any]]] = {
        "rows": (line, [Shard(axis)]),
        "uneven": (line, [Shard(1 - axis)]),
        "tiny": (line, [Shard(0)]),
        "both axes": (grid, [Shard(axis), Shard(1 - axis)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "replicated": (line, [Replicate()]),
    }
    tensors: dict[str, torch.Tensor] = {
        name: distribute_tensor(whole(name), mesh, placements)
        for name, (mesh, placements) in placed.items()
    }
    full = whole("fsdp over tp")
    # A copy: torch cannot stage a DTensor whose local tensor is a view.
    own = chunk(chunk(full, size // 2, tp), 2, dp).clone()
    placements = [_StridedShard(0, split_factor=size // 2), Shard(0)]
    tensors["fsdp over tp"] = DTensor.from_local(
        own, grid, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    return tensors | {name: whole(name) for name in ("plain", "scalar")}


def state(step: int) -> dict[str, Any]:
    return {
        "model": cut_up(),
        "optim": {"param_groups": [{"lr": 0.5, "names": ["rows"]}], "steps": [step, step + 1]},
        "step": step,
    }


def blank(given: dict[str, Any]) -> dict[str, Any]:
    """The same state dict with nothing in it."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in given["model"].items()}
    return given | {
        "model": empty,
        "optim": {"param_groups": [{"lr": 0.0, "names": []}], "steps": []},
        "step": -1,
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(found: dict[str, Any], expected: dict[str, Any], where: str) -> list[str]:
    wrong = [
        f"{where}: {name} on rank {dist.get_rank()}"
        for name, tensor in expected["model"].items()
        if not torch.equal(local(found["model"][name]), local(tensor))
    ]
    return wrong + [
        f"{where}: {key} is {found[key]}, not {expected[key]}"
        for key in ("optim", "step")
        if found[key] != expected[key]
    ]


def read_back(folder: Path, step: int) -> list[str]:
    """What is wrong when DCP reads, and when we do."""
    expected = state(step)
    found = blank(expected)
    dcp_load(found, storage_reader=DCPReader(folder))
    wrong = differences(found, expected, f"{folder.name} through DCP")
    given = blank(expected)
    loaded = unshard_state_dict(load(shard_state_dict(given), folder), given)
    return wrong + differences(loaded, expected, f"{folder.name} through load")


class Caching(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


class FullDisk(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise OSError(28, f"No space left on device for {write_item.index.fqn}")


def raises(do: Callable[[], Any], expected: str) -> list[str]:
    """What is wrong with the error that every rank must get."""
    try:
        do()
    except CheckpointException as error:
        text = str(error)
        return [] if expected in text else [f"not in the error: {expected}\n{text}"]
    return [f"no error: {expected}"]


def save_all(root: Path) -> list[str]:
    rank = dist.get_rank()
    for name, version in BACKENDS:
        writer = DCPWriter(root / f"{name}-{version}", (name, version))
        only_here = {"last": rank} if rank == dist.get_world_size() - 1 else {}
        dcp_save(state(17) | only_here, storage_writer=writer)
    for step, name in enumerate(CACHED):
        given = state(step)
        if step == 2:  # one rank will write it: the plans of the others stay cached
            given["model"]["added"] = torch.full((2,), 5.0)
        dcp_save(given, storage_writer=DCPWriter(root / name), planner=Caching())
    future: Any = dcp_async_save(state(17), storage_writer=DCPWriter(root / "async"))
    future.result()

    writer = DCPWriter(root / "retried")
    planner = FullDisk() if rank == 2 else DefaultSavePlanner()
    wrong = raises(
        lambda: dcp_save(state(17), storage_writer=writer, planner=planner),
        "No space left on device",
    )
    if check_is_distributed_checkpoint(root / "retried"):
        wrong.append("committed although a rank had failed")
    dist.barrier()
    dcp_save(state(17), storage_writer=writer)
    again = DCPWriter(root / "retried")
    wrong += raises(lambda: dcp_save(state(18), storage_writer=again), "already holds a checkpoint")
    wanted = {"model": {"missing" if rank == 1 else "plain": torch.zeros(3, 3)}}
    wrong += raises(
        lambda: dcp_load(wanted, storage_reader=DCPReader(root / "async")),
        "Missing key in checkpoint state_dict: model.missing",
    )
    dcp_save(state(17), storage_writer=FileSystemWriter(root / "files"))
    return wrong


def load_all(root: Path) -> list[str]:
    wrong: list[str] = []
    for name in FOLDERS:
        wrong += read_back(root / name, CACHED.index(name) if name in CACHED else 17)
    added = {"model": {"added": torch.zeros(2)}}
    dcp_load(added, storage_reader=DCPReader(root / CACHED[2]))
    if added["model"]["added"].tolist() != [5.0, 5.0]:
        wrong.append(f"added: {added}")
    # torch's own storage reads what was written by ours.
    found = blank(state(17))
    dcp_load({"model": found["model"]}, storage_reader=FileSystemReader(root / "torch_dist-1"))
    return wrong + differences(state(17) | {"model": found["model"]}, state(17), "torch's own")


def main() -> None:
    scenario, checkpoints, reports = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    wrong = save_all(checkpoints) if scenario == "save" else []
    wrong += load_all(checkpoints)
    (reports / f"{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
