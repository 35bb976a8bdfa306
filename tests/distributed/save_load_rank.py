"""One rank of tests/distributed/test_save_load.py; writes what it saw to REPORTS/<rank>.json.

Usage, under torchrun:  save_load_rank.py save|load CHECKPOINTS REPORTS
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dist_checkpointing as dc

BACKENDS = [("zarr", 1), ("zarr", 2), ("tensorstore", 1), ("torch_dist", 1)]

Plain = tuple[tuple[int, ...], torch.dtype]
GLOBAL: dict[str, Plain] = {
    "rows": ((12, 5), torch.float32),
    "columns": ((5, 12), torch.bfloat16),
    "layers": ((12, 3), torch.float64),
    "uneven": ((10, 3), torch.int32),
    "flat": ((6, 7), torch.int64),
    "replicated": ((4,), torch.float16),
    "scalar": ((), torch.uint8),
}


def whole(key: str) -> torch.Tensor:
    """The global tensor, the same on every rank of every world."""
    shape, dtype = GLOBAL[key]
    count = torch.Size(shape).numel()
    first = 1 + sorted(GLOBAL).index(key)
    return torch.arange(first, first + count).reshape(shape).to(dtype)


def edges(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """A range of its own, and of its own size, for each rank."""
    weights = [1 + 2 * (i % 2) for i in range(world_size)]
    start = size * sum(weights[:rank]) // sum(weights)
    return start, size * sum(weights[: rank + 1]) // sum(weights)


def state(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank holds, in as many kinds of shards as there are."""
    own = (rank, world_size)
    start, stop = edges(10, *own)
    first, last = edges(42, *own)
    uneven, flat = whole("uneven"), whole("flat")
    per_rank = 12 // world_size
    shard = dc.ShardedTensor.from_rank_offsets
    return {
        "rows": shard("rows", whole("rows").chunk(world_size)[rank], (0, *own)),
        "columns": shard("columns", whole("columns").chunk(world_size, 1)[rank], (1, *own)),
        "layers": [
            shard("layers", whole("layers")[layer], (0, layer, 12), prepend_axis_num=1)
            for layer in range(rank * per_rank, (rank + 1) * per_rank)
        ],
        "uneven": dc.ShardedTensor(
            "uneven", uneven[start:stop], uneven.dtype, (stop - start, 3), (10, 3), (start, 0), None
        ),
        "flat": dc.ShardedTensor.from_rank_offsets_flat(
            "flat", flat.reshape(-1)[first:last], (6, 7), flattened_range=slice(first, last)
        ),
        "replicated": shard("replicated", whole("replicated"), replica_id=rank),
        "scalar": shard("scalar", whole("scalar"), replica_id=rank),
        "rng": dc.ShardedObject("rng", [rank], (world_size,), (rank,)),
        "step": 17,
    }


def save_all(checkpoints: Path, rank: int, world_size: int) -> None:
    for backend, version in BACKENDS:
        dc.save(state(rank, world_size), checkpoints / f"{backend}-{version}", (backend, version))


def load_all(checkpoints: Path, rank: int, world_size: int) -> list[str]:
    """Load every backend's checkpoint, and name all that is not as it was saved."""
    wrong: list[str] = []
    for backend, version in BACKENDS:
        folder = checkpoints / f"{backend}-{version}"
        wanted = state(rank, world_size)
        expected = {key: wanted[key] for key in GLOBAL}
        del wanted["rng"]  # the grid of objects is as large as the world that saved them
        wanted["first rng"] = dc.ShardedObject("rng", None, _cells(folder), (0,))
        for key in ("columns", "flat"):
            wanted[key].data = None
        for key in ("rows", "uneven", "replicated", "scalar"):
            wanted[key].data = torch.zeros_like(expected[key].data)
        result: Any = dc.load(wanted, folder)
        if (result["step"], result["first rng"]) != (17, [0]):
            wrong.append(f"{folder.name}: {result['step']}, {result['first rng']}")
        again = state(rank, world_size)
        for key in GLOBAL:
            pairs = zip(_list(result[key]), _list(again[key]), strict=True)
            if not all(torch.equal(tensor, shard.data) for tensor, shard in pairs):
                wrong.append(f"{folder.name}: {key} on rank {rank}")
    return wrong


def _cells(folder: Path) -> tuple[int, ...]:
    return (json.loads((folder.parent / "world_size.json").read_text()),)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def main() -> None:
    scenario, checkpoints, reports = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    report: Any = None
    if scenario == "save":
        save_all(checkpoints, rank, world_size)
        if rank == 0:
            (checkpoints / "world_size.json").write_text(str(world_size))
    else:
        report = load_all(checkpoints, rank, world_size)
    (reports / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
