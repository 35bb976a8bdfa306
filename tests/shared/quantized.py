"""Quantized tensors as a folder of Hugging Face has them, and parts of tensors for ranks."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dist_checkpointing import ShardedTensor, load
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import Recipe
from dist_checkpointing.serialization import get_default_load_sharded_strategy
from dist_checkpointing.strategies import FullyParallelLoadStrategyWrapper
from dist_checkpointing.testing import assert_same_bits, run_ranks
from dist_checkpointing.validation.load_errors import Cast
from states import flat

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def of_blocks(codes: torch.Tensor, scales: torch.Tensor, *block: int) -> torch.Tensor:
    """Values in float32 of codes with one scale for each block."""
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis).narrow(axis, 0, codes.shape[axis])
    return codes.float() * scales.float()


def written(folder: Path, tensors: Tensors) -> Path:
    """A folder as of Hugging Face; scales are in another file than the codes."""
    folder.mkdir(exist_ok=True)
    names = {key: "b" if "scale" in key else "a" for key in tensors}
    for name in {*names.values()}:
        own = {key: tensor for key, tensor in tensors.items() if names[key] == name}
        save_file(own, folder / f"{name}.safetensors")
    weight_map = {key: f"{name}.safetensors" for key, name in names.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def part_of(key: str, full: torch.Tensor, comm: Comm, cut: str, at: list[float]) -> Any:
    """A template for the part of a rank, in memory that is no row, and what it must hold."""
    axis = full.ndim - 1 if cut == "columns" else 0
    extent = full.numel() if cut == "flat" else full.shape[axis]
    places = [0, *sorted(int(share * extent) for share in at[: comm.world_size - 1]), extent]
    start, stop = places[comm.rank : comm.rank + 2]
    if cut == "flat":
        blank = torch.full(full.shape, 1.0).to(full.dtype)
        return flat(key, blank, start, stop), full.reshape(-1)[start:stop]
    part = full.narrow(axis, start, stop - start)
    offset = [0] * full.ndim
    offset[axis] = start
    memory = torch.full([*reversed(part.shape)], 1.0).to(full.dtype)
    memory = memory.permute(*reversed(range(full.ndim)))
    return ShardedTensor.from_offset(key, memory, full.shape, offset), part


def check_parts(
    folder: Path,
    full: Tensors,
    recipe: Recipe,
    *,
    cut: str,
    at: list[float],
    world_size: int,
    shares: bool,
    cast: Cast = "error",
) -> None:
    """Load the parts of all ranks, which may read for each other; they are those of ``full``."""

    def on_rank(comm: Comm) -> None:
        template, wanted = {}, {}
        for key, own in full.items():
            template[key], wanted[key] = part_of(key, own, comm, cut, at)
        strategy = None
        if shares:
            reading: Any = get_default_load_sharded_strategy(str(folder))
            strategy = FullyParallelLoadStrategyWrapper(reading, comm, min_shared_bytes=0)
        found = load(template, folder, strategy, recipe=recipe, cast=cast, comm=comm)
        for key, own in wanted.items():
            assert_same_bits(found[key], own.contiguous(), key)

    run_ranks(world_size, on_rank)
