"""What is measured: sizes, dtypes, ranks, and which contestants take part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

QUICK = ("one_fp32", "small", "durable", "two_ranks", "reshard_4_2_axis1")
OTHERS = frozenset({"memcpy", "torch.save", "safetensors", "DCP default", "megatron-core"})
REFERENCES = frozenset({"raw", "DCP best"})
CHECKSUM = "tensorstore 1 + checksum"
"""Our default backend with its default options."""


@dataclass(frozen=True, slots=True)
class Case:
    """One state, saved by some ranks and loaded by the same or other ranks.

    Attributes:
        name: for ``--cases`` and the JSON.
        title: for people.
        num_tensors: global tensors of the state.
        shape: of each of them.
        dtype: of each of them.
        save_ranks: processes that save together.
        load_ranks: processes that load together.
        axis: along which every tensor is cut into one shard a rank; None: whole tensors are dealt
            to the ranks.
        durable: files are fsynced before a save returns.
        measures: "save", "load" or both.
        contestants: names of those that take part, if they are there.
        rounds: counted rounds, unless ``--rounds`` says otherwise.
        calls: back-to-back calls a round, of which the fastest counts.
        weight: about how many seconds it takes: its share of the time that the run may take.
    """

    name: str
    title: str
    num_tensors: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    save_ranks: int = 1
    load_ranks: int = 1
    axis: int | None = None
    durable: bool = False
    measures: tuple[str, ...] = ("save", "load")
    contestants: frozenset[str] = frozenset()
    rounds: int = 5
    calls: int = 3
    weight: float = 30.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole state."""
        return self.num_tensors * math.prod(self.shape) * self.dtype.itemsize

    @property
    def world_size(self) -> int:
        """Processes that the case needs."""
        return max(self.save_ranks, self.load_ranks)

    @property
    def reshards(self) -> bool:
        """Whether other ranks load than saved."""
        return self.save_ranks != self.load_ranks

    def quick(self) -> Case:
        """The same in small: to see that everything runs, not how fast."""
        count = min(self.num_tensors, 200 if self.num_tensors > 1000 else 8)
        shape = tuple(min(extent, 256) for extent in self.shape)
        return replace(self, num_tensors=count, shape=shape, rounds=1, calls=1)

    def tiny(self) -> Case:
        """A few bytes of the same kind: what a first call imports is not what it costs."""
        shape = tuple(min(extent, 8) for extent in self.shape)
        return replace(self, num_tensors=4, shape=shape)


_SQUARE = (2048, 2048)
DCP_WAYS = frozenset({"torch_dist 1", "DCPWriter tensorstore 1"})
"""Our ways to and from torch DCP."""


def _resharding(save_ranks: int, load_ranks: int, axis: int, mib: int, rounds: int) -> Case:
    return Case(
        f"reshard_{save_ranks}_{load_ranks}_axis{axis}",
        f"{mib} MiB saved by {save_ranks} ranks, loaded by {load_ranks}, cut along axis {axis}",
        mib // 16,
        _SQUARE,
        save_ranks=save_ranks,
        load_ranks=load_ranks,
        axis=axis,
        measures=("load",),
        contestants=REFERENCES | {"tensorstore 1", "tensorstore 1 (pread)"},
        rounds=rounds,
        weight=mib / 16,
    )


CASES = (
    Case(
        "one_fp32",
        "1 GiB in 64 tensors, fp32, one rank",
        64,
        _SQUARE,
        contestants=REFERENCES
        | OTHERS
        | DCP_WAYS
        | {"tensorstore 1", CHECKSUM, "zarr 2", "zarr 1"},
        calls=2,
        weight=180,
    ),
    Case(
        "one_bf16",
        "256 MiB in 16 tensors, bf16, one rank",
        16,
        (4096, 2048),
        torch.bfloat16,
        contestants=REFERENCES | {"tensorstore 1", "zarr 2"},
        weight=15,
    ),
    Case(
        "small",
        "5,000 tensors of 4 KiB, one rank",
        5000,
        (1024,),
        contestants=REFERENCES
        | OTHERS - {"DCP default", "memcpy"}
        | DCP_WAYS
        | {"tensorstore 1", "zarr 2", "zarr 1"},
        calls=2,
        weight=120,
    ),
    Case(
        "durable",
        "1 GiB in 64 tensors, one rank, durable",
        64,
        _SQUARE,
        durable=True,
        measures=("save",),
        contestants=REFERENCES | {CHECKSUM},
        rounds=9,
        calls=1,
        weight=80,
    ),
    Case(
        "one_tensor",
        "one tensor of 2 GiB: memory",
        1,
        (32768, 16384),
        contestants=frozenset({"tensorstore 1", CHECKSUM, "zarr 2"}),
        rounds=0,
        weight=15,
    ),
    Case(
        "two_ranks",
        "1 GiB in 64 tensors, two ranks",
        64,
        _SQUARE,
        save_ranks=2,
        load_ranks=2,
        axis=0,
        contestants=REFERENCES | DCP_WAYS | {"megatron-core", "tensorstore 1"},
        calls=2,
        weight=90,
    ),
    Case(
        "small_two_ranks",
        "5,000 tensors of 4 KiB, two ranks",
        5000,
        (1024,),
        save_ranks=2,
        load_ranks=2,
        contestants=REFERENCES | {"tensorstore 1"},
        rounds=2,
        calls=1,
        weight=20,
    ),
    Case(
        "four_ranks",
        "256 MiB in 16 tensors, four ranks",
        16,
        _SQUARE,
        save_ranks=4,
        load_ranks=4,
        axis=0,
        contestants=REFERENCES | {"tensorstore 1", "zarr 2"},
        rounds=2,
        calls=2,
        weight=15,
    ),
    _resharding(4, 2, 0, mib=512, rounds=5),
    _resharding(4, 2, 1, mib=512, rounds=5),
    _resharding(2, 4, 0, mib=256, rounds=2),
    _resharding(2, 4, 1, mib=256, rounds=2),
)


def choose(names: list[str] | None, *, quick: bool, rounds: int | None) -> list[Case]:
    """The cases to run; all, or a few that take every path once, if no names are given.

    Raises:
        ValueError: for an unknown name.
    """
    known = {case.name: case for case in CASES}
    unknown = sorted(set(names or ()) - known.keys())
    if unknown:
        raise ValueError(f"no such case: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = (QUICK if quick else known) if names is None else names
    cases = [known[name] for name in chosen]
    if quick:
        cases = [case.quick() for case in cases]
    if rounds is not None:
        cases = [replace(case, rounds=rounds) for case in cases]
    return cases
