"""State dicts and leaves that many tests save: small, and known in every value."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.testing import assert_same_bits, run_ranks

ALONE: Final = SingleProcess()
BACKENDS: Final = [("tensorstore", 1), ("zarr", 2), ("zarr", 1), ("torch_dist", 1)]
BACKEND: Final = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: f"{b[0]}{b[1]}")
FORMAT: Final = pytest.mark.parametrize(
    "file_format", [("zarr", 1), ("zarr", 2)], ids=["zarr1", "zarr2"]
)

shard = dc.ShardedTensor.from_rank_offsets
"""A whole tensor, or a part of it: ``shard(key, part, (axis, rank, count))``."""


def rows(key: str, full: torch.Tensor, comm: Comm, axis: int = 0) -> dc.ShardedTensor:
    """The part of this rank where all have even parts along an axis, in memory of its own."""
    part = full.chunk(comm.world_size, axis)[comm.rank].clone()
    return shard(key, part, (axis, comm.rank, comm.world_size))


def between(key: str, full: torch.Tensor, start: int, stop: int) -> dc.ShardedTensor:
    """Rows ``start .. stop`` of a tensor that is cut unevenly, in memory of their own."""
    part = full[start:stop].clone()
    offset = (start, *[0] * (full.ndim - 1))
    return dc.ShardedTensor(
        key, part, part.dtype, tuple(part.shape), tuple(full.shape), offset, None
    )


def flat(key: str, full: torch.Tensor, start: int, stop: int) -> dc.ShardedTensor:
    """Elements ``start .. stop`` of the flattening of a tensor, in memory of their own."""
    part = full.reshape(-1)[start:stop].clone()
    return dc.ShardedTensor.from_rank_offsets_flat(
        key, part, tuple(full.shape), flattened_range=slice(start, stop)
    )


def cell(key: str, value: Any, comm: Comm = ALONE) -> dc.ShardedObject:
    """The object of this rank where each has one."""
    return dc.ShardedObject(key, value, (comm.world_size,), (comm.rank,))


def counted_rows(key: str, rank: int = 0, count: int = 1, **changes: Any) -> dc.ShardedTensor:
    """Part ``rank`` of ``count`` of a tensor with two rows of three a part."""
    data = torch.arange(6.0).reshape(2, 3) + 10 * rank
    return replace(shard(key, data, (0, rank, count)), **changes)


def counted_cell(key: str, rank: int = 0, count: int = 1, **changes: Any) -> dc.ShardedObject:
    """Object ``rank`` of ``count``, which says its number."""
    return replace(dc.ShardedObject(key, {"rank": rank}, (count,), (rank,)), **changes)


def wholes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Each tensor as one shard."""
    return {key: shard(key, tensor) for key, tensor in tensors.items()}


def blanks(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A template for each whole tensor, whose memory holds nothing yet."""
    return wholes({key: torch.empty_like(tensor) for key, tensor in tensors.items()})


def every_kind(fill: float | None = None) -> dict[str, Any]:
    """Tensors on a grid, cut unevenly, flattened and whole; one rank holds all parts.

    Args:
        fill: value of all elements in a template; None for those that are saved.
    """

    def values(*shape: int) -> torch.Tensor:
        if fill is not None:
            return torch.full(shape, fill)
        return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)

    parts = enumerate(values(4, 40).chunk(2))
    return {
        "grid": [shard("grid", part.clone(), (0, i, 2)) for i, part in parts],
        "uneven": [between("uneven", values(100), *cut) for cut in ((0, 30), (30, 100))],
        "flat": [flat("flat", values(6, 10), *cut) for cut in ((0, 25), (25, 60))],
        "bits": shard("bits", values(64).bfloat16()),
    }


def at_step(step: float, comm: Comm = ALONE, shape: tuple[int, ...] = (4, 3)) -> dict[str, Any]:
    """What a training has after so many steps: one tensor full of the number of the step.

    Args:
        step: the number.
        comm: of the ranks, each of which holds as much.
        shape: of the part of a rank.
    """
    data = torch.full(shape, float(step))
    return {"w": shard("w", data, (0, comm.rank, comm.world_size)), "step": step}


def trained(
    step: int, comm: Comm = ALONE, shape: tuple[int, ...] = (4, 3), key: str = "w"
) -> dict[str, Any]:
    """The same with the state of an optimizer and of a random number generator."""
    part = (0, comm.rank, comm.world_size)
    return {
        "w": shard(key, torch.full(shape, float(step)), part),
        "m": shard("optimizer.m", torch.full((4,), float(step)), part),
        "rng": cell("rng", [step], comm),
        "step": step,
    }


def trained_template(comm: Comm = ALONE, **given: Any) -> dict[str, Any]:
    """What to load of it."""
    made = trained(-1, comm, **given)
    made["rng"].data = None
    return made


def full_at_step(step: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and layouts, of which ranks hold parts or copies."""
    table = torch.arange(48, dtype=torch.float32).reshape(8, 6) + 1000 * step
    return {
        "rows": table,
        "strided": (table.t() * 2).to(torch.bfloat16),
        "replicated": torch.full((5,), step, dtype=torch.int64),
        "scalar": torch.tensor(float(step)),
        "none": torch.zeros(0, 3),
    }


def parts_at_step(step: int, comm: Comm) -> dict[str, Any]:
    """What this rank holds of them; the strided part shares its memory with the others'."""
    full = full_at_step(step)
    strided = full["strided"].chunk(comm.world_size, 1)[comm.rank]
    return {
        "rows": rows("rows", full["rows"], comm),
        "strided": shard("strided", strided, (1, comm.rank, comm.world_size)),
        **{k: shard(k, full[k], replica_id=comm.rank) for k in ("replicated", "scalar", "none")},
    }


def assert_at_step(folder: Path, step: float, key: str = "w") -> None:
    """A checkpoint holds what ``at_step`` or ``trained`` gave."""
    found = dc.load_plain_tensors(folder)
    assert found["step"] == step
    assert found[key].unique().tolist() == [step]


def save_on(
    count: int, state_of: Callable[[Comm], dict[str, Any]], folder: Path, *args: Any, **options: Any
) -> None:
    """Save what each of so many simulated ranks holds."""
    run_ranks(count, lambda comm: dc.save(state_of(comm), folder, *args, comm=comm, **options))


def assert_holds(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint is sound, and holds these tensors bit for bit."""
    dc.verify_checkpoint(folder)
    found = dc.load_plain_tensors(folder)
    for key, tensor in tensors.items():
        assert_same_bits(found[key], tensor, key)


def bits(tree: Any) -> Any:
    """A nest to be compared with ``==``: types count, and tensors are dtype, shape and bytes."""
    if isinstance(tree, torch.Tensor):
        data = tree.detach().contiguous().reshape(-1).view(torch.uint8)
        return tree.dtype, tree.shape, data.numpy().tobytes()
    if isinstance(tree, dict):
        return type(tree), {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [bits(value) for value in tree]
    return type(tree), tree


def num_shared(folder: Path) -> int:
    """How many files of a checkpoint have another name elsewhere."""
    return sum(path.is_file() and path.stat().st_nlink > 1 for path in folder.rglob("*"))
