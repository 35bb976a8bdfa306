"""The state of a rank: every element follows from its place, so that all can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench_cases import Case
from dist_checkpointing.comm import Comm, TorchComm

_BLOCK_ELEMENTS = 1 << 18  # small enough to reuse memory that was touched before
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """What one rank holds of a global tensor: part ``position`` of ``count`` along ``axis``.

    Attributes:
        key: of the global tensor.
        number: of the global tensor; its values follow from it.
        data: the local values.
        global_shape: of the global tensor.
        axis: that is cut; None: this rank holds it all.
        position: of this part.
        count: of parts.
    """

    key: str
    number: int
    data: torch.Tensor
    global_shape: tuple[int, ...]
    axis: int | None
    position: int
    count: int

    def _blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks of rows as integers (some are NaN as floats), in place, and the right values."""
        integers = _INTEGERS[self.data.itemsize]
        bits = self.data.view(integers)
        rows = max(1, _BLOCK_ELEMENTS * len(bits) // max(1, bits.numel()))
        for start in range(0, len(bits), rows):
            block = bits[start : start + rows]
            values = torch.full((), 1_000_003 * (self.number + 1) % 65_521, dtype=torch.int32)
            for axis, extent in enumerate(block.shape):
                first = self.position * self.data.shape[axis] if axis == self.axis else 0
                first += start if axis == 0 else 0
                steps = torch.arange(first, first + extent, dtype=torch.int32) * (40_503 + 2 * axis)
                values = values.unsqueeze(-1) + steps
            yield block, values.to(integers)

    def fill(self) -> None:
        for block, values in self._blocks():
            block.copy_(values)

    def is_right(self) -> bool:
        return all(torch.equal(block, values) for block, values in self._blocks())


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The ranks that save, or those that load: the first ``size`` of the world.

    Attributes:
        size: number of ranks.
        rank: of this process among them; None if it is not one of them.
        group: their process group; None for a single rank.
        mesh: the same for DTensors.
        comm: the same for dist_checkpointing; None: its own default.
    """

    size: int
    rank: int | None
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    comm: Comm | None = None


def make_side(size: int, rank: int, world_size: int) -> Side:
    """Collective over the world."""
    if world_size == 1:
        return Side(1, 0)
    mesh = DeviceMesh("cpu", list(range(size)))
    if size == world_size:
        return Side(size, rank, dist.group.WORLD, mesh)
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return Side(size, None, None, mesh)
    assert isinstance(group, dist.ProcessGroup)
    return Side(size, rank, group, mesh, TorchComm(group))


def make_tensors(case: Case, side: Side) -> list[LocalTensor]:
    """This rank's part of the state, not filled (zeros, each page touched)."""
    if side.rank is None:
        return []
    tensors = []
    for number in range(case.num_tensors):
        shape, axis, position, count = list(case.shape), case.axis, side.rank, side.size
        if axis is None:
            if number % side.size != side.rank:
                continue
            position, count = 0, 1
        else:
            shape[axis] //= count
        data = torch.empty(shape, dtype=case.dtype).fill_(0)
        key = f"layers.{number:05d}.weight"
        tensors.append(LocalTensor(key, number, data, case.shape, axis, position, count))
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A case as one rank sees it.

    Attributes:
        case: the case.
        saving: the ranks that save.
        loading: the ranks that load.
        saved: what this rank saves, filled.
        target: what this rank loads into.
    """

    case: Case
    saving: Side
    loading: Side
    saved: Sequence[LocalTensor]
    target: Sequence[LocalTensor]

    @classmethod
    def make(cls, case: Case, saving: Side, loading: Side) -> Work:
        saved, target = make_tensors(case, saving), make_tensors(case, loading)
        for tensor in saved:
            tensor.fill()
        return cls(case, saving, loading, saved, target)

    def clear_target(self) -> None:
        """So that what is found there after a load was loaded."""
        for tensor in self.target:
            tensor.data.zero_()

    @property
    def target_is_right(self) -> bool:
        return all(tensor.is_right() for tensor in self.target)

    @property
    def target_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.target)
