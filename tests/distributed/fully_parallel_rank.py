"""One rank of tests/distributed/test_fully_parallel.py; writes what it saw to REPORTS/<rank>.json.

Usage, under torchrun:  fully_parallel_rank.py CHECKPOINTS REPORTS
"""

import copy
import json
import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_checkpointing import CheckpointingException, ShardedTensor, load, save
from dist_checkpointing.comm import default_comm, group_comm
from dist_checkpointing.planning import DefaultLoadPlanner, ReadItem
from dist_checkpointing.strategies import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    StrategyAction,
    get_default_strategy,
)
from dist_checkpointing.testing import observed

ALGORITHMS: Any = ("broadcast", "gather_object", "gather_rounds")
CASES: dict[str, tuple[tuple[str, int], Any]] = {
    "replicas": (("zarr", 2), ALGORITHMS),
    "pairs": (("tensorstore", 1), ALGORITHMS[:1]),
    "partial": (("zarr", 2), ALGORITHMS[:1]),
}
SHAPES = {
    "embedding": (2048, 512),
    **{
        f"layers.{i}.{name}": shape
        for i in range(4)
        for name, shape in {"attention": (768, 256), "mlp": (1024, 256), "norm": (256,)}.items()
    },
}


def whole(key: str) -> torch.Tensor:
    """The global tensor, the same on every rank."""
    first = 1 + sorted(SHAPES).index(key)
    shape = SHAPES[key]
    return torch.arange(first, first + math.prod(shape), dtype=torch.int32).reshape(shape)


def unique_bytes() -> int:
    return sum(whole(key).nbytes for key in SHAPES)


def replica(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, replica_id=dist.get_rank())


def half(key: str, data: torch.Tensor) -> ShardedTensor:
    """Two ways tensor parallel, two replicas: ranks 0 and 2 hold the first half."""
    place, copy_number = dist.get_rank() % 2, dist.get_rank() // 2
    part = data.chunk(2)[place].clone()
    return ShardedTensor.from_rank_offsets(key, part, (0, place, 2), replica_id=copy_number)


def save_counting(state: dict[str, Any], folder: Path, backend: Any, group: Any) -> int:
    """Save, and say how many bytes this rank has written."""
    done = [0]
    base = get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)
    save(
        state,
        folder,
        FullyParallelSaveStrategyWrapper(base, group),
        progress=lambda p: done.append(p.bytes_done) if p.phase == "writing" else None,
    )
    return max(done)


def load_counting(
    wanted: dict[str, Any], folder: Path, backend: Any, group: Any, algorithm: Any
) -> int:
    """Load in place, and say how many bytes this rank has read."""
    num_bytes = 0

    def observe(name: str, values: Sequence[Any]) -> None:
        nonlocal num_bytes
        if name == "read_data":
            plan, planner = values
            num_bytes = sum(planner.acquire_tensor(item).nbytes for item in plan.items)

    base = copy.copy(get_default_strategy(StrategyAction.LOAD_SHARDED, *backend))
    strategy = FullyParallelLoadStrategyWrapper(
        observed(base, observe), group, exchange_algo=algorithm, min_shared_bytes=0
    )
    load(wanted, folder, strategy)
    return num_bytes


class BrokenDisk(DefaultLoadPlanner):
    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        raise OSError(5, f"broken disk below {item.dest_index.fqn}")


def failing(folder: Path, group: Any) -> dict[str, Any]:
    """One rank cannot read: what this rank hears of it."""
    planner = BrokenDisk() if dist.get_rank() == 3 else None
    kind = type(get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 2))
    strategy = FullyParallelLoadStrategyWrapper(kind(planner=planner), group, min_shared_bytes=0)
    try:
        load({key: replica(key, torch.zeros_like(whole(key))) for key in SHAPES}, folder, strategy)
    except CheckpointingException as error:
        return {"text": str(error), "ranks": list(error.ranks)}  # type: ignore[attr-defined]
    return {"text": "nothing was raised", "ranks": []}


def main() -> None:
    checkpoints, reports = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    pairs = [odd, even][rank % 2 == 0]
    partial = dist.new_group([0, 1, 2])  # rank 3 is in no group
    groups: dict[str, Any] = {"replicas": None, "pairs": pairs, "partial": partial}
    report: dict[str, Any] = {"written": {}, "read": {}, "wrong": []}
    for case, (backend, algorithms) in CASES.items():
        shard = half if case == "pairs" else replica
        state = {key: shard(key, whole(key)) for key in SHAPES}
        ids = {key: leaf.replica_id for key, leaf in state.items()}
        folder, group = checkpoints / case, groups[case]
        report["written"][case] = save_counting(state, folder, backend, group)
        if {key: leaf.replica_id for key, leaf in state.items()} != ids:
            report["wrong"].append(f"{case}: replica ids were changed")
        for algorithm in algorithms:
            wanted = {key: shard(key, torch.zeros_like(whole(key))) for key in SHAPES}
            read = load_counting(wanted, folder, backend, group, algorithm)
            report["read"][f"{case}-{algorithm}"] = read
            for key, leaf in wanted.items():
                if not torch.equal(leaf.data, state[key].data):  # type: ignore[arg-type]
                    report["wrong"].append(f"{case}: {key} by {algorithm}")
    report["failure"] = failing(checkpoints / "replicas", pairs)
    # A group that tensors on the CPU cannot travel over, such as one of NCCL.
    gpus_only = dist.new_group([0, 2, 3], backend="cuda:gloo")
    report["over gpus only"] = group_comm(gpus_only, default_comm()).all_gather(rank)
    report["outside"] = type(group_comm(partial, default_comm())).__name__
    (reports / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
