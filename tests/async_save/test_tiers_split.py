"""CheckpointManager with fast disks of which each machine has its own."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import (
    CheckpointManager,
    Retention,
    ShardedObject,
    ShardedTensor,
    load,
    verify_checkpoint,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.object_path import ObjectPath
from dist_checkpointing.filesystem.object_store import ObjectStore
from dist_checkpointing.manager import drain
from dist_checkpointing.mapping import ShardedStateDict
from dist_checkpointing.testing import run_ranks
from stores import new_url

ROWS, COLUMNS = 12, 7
RANKS_A_NODE = 2


def whole(step: int) -> torch.Tensor:
    """The plain tensor: what is saved of a step, and what any layout must find."""
    return torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) * 1.0 + 1000 * step


def state(comm: Comm, step: int | None) -> ShardedStateDict:
    """What a rank has of a step: rows, a replicated tensor, an object; empty without a step."""
    values = torch.full((ROWS, COLUMNS), -1.0) if step is None else whole(step)
    rows = values.chunk(comm.world_size)[comm.rank].clone()
    replica = values[0].clone()
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, comm.rank, comm.world_size)),
        "same": ShardedTensor.from_rank_offsets("same", replica, replica_id=comm.rank),
        "object": ShardedObject(
            "object", {"step": step}, (1,), (0,), replica_id=comm.rank
        ),
        "step": step,
    }


def check(comm: Comm, loaded: Any, step: int) -> None:
    rows = whole(step).chunk(comm.world_size)[comm.rank]
    assert torch.equal(loaded["rows"], rows)
    assert torch.equal(loaded["same"], whole(step)[0])
    assert loaded["object"] == {"step": step}
    assert loaded["step"] == step


def disk(folder: Path, comm: Comm) -> Path:
    return folder / f"node{comm.rank // RANKS_A_NODE}"


def save_steps(folder: Path, root: object, steps: list[int], ranks: int = 4, **options: Any) -> None:
    def train(comm: Comm) -> None:
        with CheckpointManager(
            root, fast=disk(folder, comm), comm=comm, **options  # type: ignore[arg-type]
        ) as manager:
            for step in steps:
                manager.async_save(step, state(comm, step))

    run_ranks(ranks, train)


def check_newest(folder: Path, root: object, step: int, ranks: int) -> None:
    def resume(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(folder, comm), comm=comm) as manager:  # type: ignore[arg-type]
            check(comm, manager.load(state(comm, None)), step)

    run_ranks(ranks, resume)


def steps_in(place: str | Path) -> list[int]:
    if isinstance(place, Path):
        return sorted(int(path.name[5:]) for path in place.glob("step-*"))
    root = ObjectPath.of(place)
    return [int(n[5:]) for n in root.store.list_folder(root.prefix)[0] if n.startswith("step-")]


@pytest.mark.parametrize("strategy", ["tensorstore", "zarr", "torch_dist"])
@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
def test_any_layout_loads_what_two_nodes_have_saved(
    ranks: int, strategy: str, tmp_path: Path
) -> None:
    root = new_url()
    save_steps(tmp_path, root, [1, 2], sharded_strategy=strategy)
    for name in ("node0", "node1"):
        assert steps_in(tmp_path / name) == [1, 2]
        assert any(path.is_file() for path in (tmp_path / name).rglob("*"))
    verify_checkpoint(f"{root}/step-00000002")
    check_newest(tmp_path, root, 2, ranks)
