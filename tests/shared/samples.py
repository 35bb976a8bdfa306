"""One checkpoint of each backend, and the fixtures of real releases, to look into."""

import argparse
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dist_checkpointing import ShardedObject
from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import assert_same_bits
from states import between, blanks, cell, flat, rows, save_on, shard

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_NAMES = ("mc0.12.0_zarr", "mc0.15.3_zarr", "mc0.15.3_torch_dist")
BACKENDS: dict[str, Callable[[], Any]] = {
    "tensorstore": lambda: "tensorstore",
    "zarr-2": lambda: ("zarr", 2),
    "zarr-2-zstd": partial(Zarr3SaveShardedStrategy, codec="zstd"),
    "zarr-1": lambda: ("zarr", 1),
    "torch_dist": lambda: "torch_dist",
}
COMMON = {
    "args": argparse.Namespace(lr=1e-4, betas=(0.9, 0.95), name="tiny"),
    "iteration": 1000,
    "history": [0.5, 0.25],
}
METADATA = {"made_by": "a test"}
RANKS = 2


@dataclass(frozen=True)
class Sample:
    """A checkpoint, and what it holds.

    Attributes:
        name: of the backend, or of the fixture.
        folder: where it is.
        tensors: the plain full tensors by key.
        objects: key -> cell -> value.
    """

    name: str
    folder: Path
    tensors: dict[str, torch.Tensor]
    objects: dict[str, dict[tuple[int, ...], Any]] = field(default_factory=dict)

    def template(self) -> dict[str, Any]:
        """What loads all of it, on one rank."""
        cells = {
            k: [ShardedObject(k, None, (len(v),), place) for place in sorted(v)]
            for k, v in self.objects.items()
        }
        return {**blanks(self.tensors), **cells}

    def assert_is(self, loaded: dict[str, Any]) -> None:
        """What was loaded with the template is this, bit for bit."""
        for key, tensor in self.tensors.items():
            assert_same_bits(loaded[key], tensor, key)
        assert loaded["rng"] == [value for _, value in sorted(self.objects["rng"].items())]
        assert loaded["iteration"] == COMMON["iteration"]
        assert loaded["history"] == COMMON["history"]

    def copied(self, folder: Path) -> "Sample":
        """The same in another place, to be broken."""
        shutil.copytree(self.folder, folder)
        return Sample(self.name, folder, {**self.tensors}, self.objects)


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    moment = normal(8, 6)
    moment[2, 3], moment[5, 0], moment[5, 1] = float("nan"), float("inf"), -float("inf")
    return {
        "decoder.weight": normal(16, 12),
        "decoder.bias": torch.arange(12, dtype=torch.int32),
        "decoder.half": normal(8, 4, 3).bfloat16(),
        "decoder.mask": torch.tensor([True, False, True, True]),
        "optimizer.moment": moment,
        "optimizer.step": torch.tensor(7),
        "uneven": torch.arange(35, dtype=torch.float64).reshape(7, 5),
        "flat": torch.arange(60.0).reshape(6, 10),
        "empty": torch.zeros(0, 5),
    }


def _state(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, Any]:
    rank = comm.rank
    state: dict[str, Any] = {}
    for key, tensor in full.items():
        if key == "uneven":
            state[key] = between(key, tensor, *((0, 2), (2, 7))[rank])
        elif key == "flat":
            state[key] = flat(key, tensor, *((0, 25), (25, 60))[rank])
        elif tensor.ndim > 1 and tensor.numel():
            state[key] = rows(key, tensor, comm)
        else:
            state[key] = shard(key, tensor, replica_id=rank)
    state["rng"] = cell("rng", {"seed": [rank, 5]}, comm)
    return {"state": state, **COMMON}


def save_sample(
    folder: Path, strategy: Any, tensors: dict[str, torch.Tensor] | None = None
) -> Sample:
    """Save by two ranks: on a chunk grid, replicated, unevenly cut, flattened."""
    full = full_tensors() if tensors is None else tensors
    save_on(RANKS, partial(_state, full), folder, strategy, content_metadata=METADATA)
    cells: dict[tuple[int, ...], Any] = {(rank,): {"seed": [rank, 5]} for rank in range(RANKS)}
    return Sample(folder.name, folder, full, {"rng": cells})


def golden_sample(name: str) -> Sample:
    expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())
    tensors = {
        key: torch.tensor(t["flat_values"], dtype=getattr(torch, t["dtype"])).reshape(t["shape"])
        for key, t in expected["tensors"].items()
    }
    return Sample(name, GOLDEN / name, tensors)


def dcp_sample(folder: Path) -> "Sample":
    tensors = {key: t for key, t in full_tensors().items() if key != "empty"}
    state = {**{key: t.clone() for key, t in tensors.items()}, "iteration": 1000}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        dcp_save(state, checkpoint_id=folder, no_dist=True)
    return Sample("dcp", folder, tensors)


@dataclass(frozen=True)
class Finished:
    """A command that has come to its end."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, which must be one document and nothing else."""

        def refuse(word: str) -> Any:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


Samples = Callable[[str], Sample]
"""Makes the sample of a backend, or finds the fixture of that name."""

Run = Callable[..., Finished]
"""Runs ``dckpt`` with these arguments."""
