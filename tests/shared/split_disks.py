"""Ranks on machines of two, each with a fast disk of its own: what they save and how it is lost."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CheckpointManager, ObjectPath, ShardedObject, ShardedTensor
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.mapping import ShardedStateDict
from dist_checkpointing.testing import run_ranks
from faults import short_waits, store_down, without_waiting

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
    found: ShardedStateDict = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, comm.rank, comm.world_size)),
        "same": ShardedTensor.from_rank_offsets("same", replica, replica_id=comm.rank),
        "object": ShardedObject("object", {"step": step}, (1,), (0,), replica_id=comm.rank),
        "step": step,
    }
    if comm.rank == comm.world_size - 1:  # in a folder that rank 0's disk does not have
        found["last"] = ShardedTensor.from_rank_offsets("optimizer.m", values[1].clone())
    return found


def check(comm: Comm, loaded: Any, step: int) -> None:
    rows = whole(step).chunk(comm.world_size)[comm.rank]
    assert torch.equal(loaded["rows"], rows)
    assert torch.equal(loaded["same"], whole(step)[0])
    assert loaded["object"] == {"step": step}
    assert loaded["step"] == step
    if comm.rank == comm.world_size - 1:
        assert torch.equal(loaded["last"], whole(step)[1])


def disk(folder: Path, comm: Comm) -> Path:
    return folder / f"node{comm.rank // RANKS_A_NODE}"


def save_steps(folder: Path, root: str, steps: list[int], ranks: int = 4, **options: Any) -> None:
    def train(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(folder, comm), comm=comm, **options) as manager:
            for step in steps:
                manager.async_save(step, state(comm, step))

    run_ranks(ranks, train)


def check_newest(folder: Path, root: str, step: int, ranks: int) -> None:
    def resume(comm: Comm) -> None:
        with CheckpointManager(root, fast=disk(folder, comm), comm=comm) as manager:
            check(comm, manager.load(state(comm, None)), step)

    run_ranks(ranks, resume)


def steps_in(place: str | Path) -> list[int]:
    if isinstance(place, Path):
        return sorted(int(path.name[5:]) for path in place.glob("step-*"))
    root = ObjectPath.of(place)
    return [int(n[5:]) for n in root.store.list_folder(root.prefix)[0] if n.startswith("step-")]


def save_with_store_down(
    folder: Path, root: str, first: int = 1, steps: Sequence[int] = (2,), loaded: int | None = None
) -> None:
    """Save steps, which are committed on the disks, and not in the store; from step ``loaded``."""
    with ExitStack() as down:

        def train(comm: Comm) -> None:
            manager = CheckpointManager(root, fast=disk(folder, comm), comm=comm)
            if loaded is not None:
                check(comm, manager.load(state(comm, None), loaded), loaded)
            comm.all_gather(None)
            if comm.rank == 0:
                for fault in (without_waiting(), short_waits(), store_down(first)):
                    down.enter_context(fault)
            comm.all_gather(None)
            for step in steps:
                manager.save(step, state(comm, step))
            with pytest.raises(CheckpointingException, match=f"step {max(steps)} is not in the"):
                manager.close()

        run_ranks(4, train)
    with CheckpointManager(root) as stored:
        assert stored.latest() != steps[-1]


def flip(folder: Path) -> None:
    """Flip a byte in every file of values."""
    for path in (path for path in folder.rglob("data/model/*") if path.is_file()):
        content = bytearray(path.read_bytes())
        content[5] ^= 1
        path.write_bytes(content)
