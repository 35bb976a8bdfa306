"""One rank of tests/distributed/test_torch_dist.py, under torchrun.

Usage: torch_dist_rank.py SCENARIO=FOLDER[,SCENARIO=FOLDER...] CHECKPOINTS REPORTS
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dist_checkpointing import ShardedObject, ShardedTensor, load, save
from dist_checkpointing.strategies import LocalShardsContainer

FULL = {
    "rows": torch.arange(60.0).reshape(12, 5),
    "columns": torch.arange(60).reshape(5, 12).bfloat16(),
    "uneven": torch.arange(21.0).reshape(7, 3),
    "replicated": torch.arange(8).to(torch.float8_e4m3fn),
    "layers": torch.arange(36.0).reshape(12, 3),
}
PLACEMENTS: dict[str, Shard | Replicate] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "uneven": Shard(0),
    "replicated": Replicate(),
    "layers": Shard(0),
}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = [t.contiguous().view(torch.uint8) for t in (found, expected)]
    return found.dtype == expected.dtype and torch.equal(*bits)


def dtensors(*, filled: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {}
    for key, full in FULL.items():
        bits = full.view(torch.uint8) if full.itemsize == 1 else full
        # gloo does not scatter 8-bit floats: as bytes it does.
        local = distribute_tensor(bits, mesh, [PLACEMENTS[key]]).to_local().view(full.dtype)
        made[key] = DTensor.from_local(
            local.clone() if filled else torch.zeros_like(local),
            mesh,
            [PLACEMENTS[key]],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
    return made


def cuts(rank: int, size: int, extent: int) -> tuple[int, int]:
    return extent * rank // size, extent * (rank + 1) // size


def shards(rank: int, size: int) -> dict[str, Any]:
    """The same tensors as they come from Megatron."""
    whole = ShardedTensor.from_rank_offsets
    first, last = cuts(rank, size, 12)
    start, stop = cuts(rank, size, 7)
    uneven = FULL["uneven"]
    made: dict[str, Any] = {
        "uneven": [
            ShardedTensor("uneven", uneven[start:stop].clone(), uneven.dtype, (stop - start, 3),
                          (7, 3), (start, 0), None),
        ],
        "replicated": [whole("replicated", FULL["replicated"].clone(), replica_id=rank)],
        "layers": [
            whole("layers", FULL["layers"][i].clone(), (0, i, 12), prepend_axis_num=1)
            for i in range(first, last)
        ],
    }  # fmt: skip
    for key, axis in (("rows", 0), ("columns", 1)):
        part = FULL[key].chunk(size, axis)[rank].clone()
        made[key] = [whole(key, part, (axis, rank, size))]
    return made


def emptied(nest: dict[str, Any]) -> dict[str, Any]:
    for group in nest.values():
        for shard in group:
            shard.data = torch.zeros_like(shard.data)
    return nest


def we_save(folder: Path, rank: int, size: int) -> list[str]:
    rng = ShardedObject("rng", {"rank": rank}, (size,), (rank,))
    save({**shards(rank, size), "rng": rng, "step": 3}, folder, ("torch_dist", 1))
    return []


def dcp_loads(folder: Path, rank: int, size: int) -> list[str]:
    del rank, size
    state = dtensors(filled=False)
    load_by_dcp(state, storage_reader=FileSystemReader(folder))
    expected = dtensors(filled=True)
    return [key for key in FULL if not same(state[key].to_local(), expected[key].to_local())]


def dcp_saves(folder: Path, rank: int, size: int) -> list[str]:
    del rank, size
    state = {"model": dtensors(filled=True), "step": 3, "optim": {"lr": [0.1, 0.2]}}
    save_by_dcp(state, storage_writer=FileSystemWriter(folder, thread_count=2))
    return []


def dcp_saves_ours(folder: Path, rank: int, size: int) -> list[str]:
    """Our shards through plain DCP, saved and loaded."""
    state = {k: LocalShardsContainer.from_sh_tens(g) for k, g in shards(rank, size).items()}
    save_by_dcp(state, storage_writer=FileSystemWriter(folder))
    given, expected = emptied(shards(rank, size)), shards(rank, size)
    load_by_dcp(
        {key: LocalShardsContainer.from_sh_tens(group) for key, group in given.items()},
        storage_reader=FileSystemReader(folder),
    )
    return _wrong({k: [s.data for s in g] for k, g in given.items()}, expected)


def we_load(folder: Path, rank: int, size: int) -> list[str]:
    return _loaded(folder, rank, size, "")


def we_load_dcp(folder: Path, rank: int, size: int) -> list[str]:
    return _loaded(folder, rank, size, "model.")


def _loaded(folder: Path, rank: int, size: int, prefix: str) -> list[str]:
    template = emptied(shards(rank, size))
    for group in template.values():
        for shard in group:
            shard.key = f"{prefix}{shard.key}"
    loaded: Any = load(template, folder)
    wrong = _wrong(loaded, shards(rank, size))
    return wrong if loaded.get("step", 3) == 3 else [*wrong, "step"]


def _wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        key
        for key, group in expected.items()
        if not all(same(a, b.data) for a, b in zip(found[key], group, strict=True))
    ]


SCENARIOS: dict[str, Callable[[Path, int, int], list[str]]] = {
    scenario.__name__: scenario
    for scenario in (we_save, dcp_loads, dcp_saves, dcp_saves_ours, we_load, we_load_dcp)
}


def main() -> None:
    steps, checkpoints, reports = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    wrong = []
    for step in steps.split(","):
        scenario, folder = step.split("=")
        found = SCENARIOS[scenario](checkpoints / folder, rank, dist.get_world_size())
        wrong += [f"{step}: {key}" for key in found]
    (reports / f"{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
