"""The state of a rank: every element follows from its place, so that all can be checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dist_checkpointing.comm import Comm, SingleProcess, TorchComm

_BLOCK_ELEMENTS = 1 << 18  # small enough to reuse memory that was touched before
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class State:
    """A state that some ranks save, and the same or other ranks load.

    Attributes:
        num_tensors: Number of global tensors.
        shape: Shape of each of them.
        dtype: Dtype of each of them.
        save_ranks: Processes that save together.
        load_ranks: Processes that load together.
        axis: Axis along which every tensor is cut into one shard a rank; None: whole tensors are
            dealt to the ranks.
        durable: Files are fsynced before a save returns.
    """

    num_tensors: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    save_ranks: int = 1
    load_ranks: int = 1
    axis: int | None = None
    durable: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_tensors * math.prod(self.shape) * self.dtype.itemsize

    @property
    def reshards(self) -> bool:
        return self.save_ranks != self.load_ranks

    def at_most(self, num_tensors: int, extent: int | None = None) -> State:
        """The same with fewer and smaller tensors."""
        shape = self.shape if extent is None else tuple(min(n, extent) for n in self.shape)
        return replace(self, num_tensors=min(self.num_tensors, num_tensors), shape=shape)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """What one rank holds of a global tensor: part ``position`` of ``count`` along ``axis``.

    Attributes:
        key: Key of the global tensor.
        number: Number of the global tensor; its values follow from it.
        data: The local values.
        axis: Axis that is cut; None: this rank holds it all.
        position: Which part this is.
        count: Number of parts.
    """

    key: str
    number: int
    data: torch.Tensor
    axis: int | None
    position: int
    count: int

    @property
    def bits(self) -> torch.Tensor:
        """The values as integers: some are NaN as floats."""
        return self.data.view(_INTEGERS[self.data.itemsize])

    def _blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Blocks of rows, in place, and the right values."""
        bits = self.bits
        rows = max(1, _BLOCK_ELEMENTS * len(bits) // max(1, bits.numel()))
        for start in range(0, len(bits), rows):
            block = bits[start : start + rows]
            values = torch.full((), 1_000_003 * (self.number + 1) % 65_521, dtype=torch.int32)
            for axis, extent in enumerate(block.shape):
                first = self.position * self.data.shape[axis] if axis == self.axis else 0
                first += start if axis == 0 else 0
                steps = torch.arange(first, first + extent, dtype=torch.int32) * (40_503 + 2 * axis)
                values = values.unsqueeze(-1) + steps
            yield block, values.to(bits.dtype)

    def fill(self) -> None:
        for block, values in self._blocks():
            block.copy_(values)

    def is_right(self) -> bool:
        return all(torch.equal(block, values) for block, values in self._blocks())


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The ranks that save, or those that load: the first ``size`` of the world.

    Attributes:
        size: Number of ranks.
        rank: Rank of this process among them; None if it is not one of them.
        group: Their process group; None for a single rank.
        mesh: The same for DTensors.
        comm: The same for dist_checkpointing; None: its own default.
    """

    size: int
    rank: int | None
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    comm: Comm | None = None


def make_side(size: int, rank: int, world_size: int) -> Side:
    """Collective over the world."""
    if world_size == 1:
        return Side(1, 0, comm=SingleProcess())
    mesh = DeviceMesh("cpu", list(range(size)))
    if size == world_size:
        return Side(size, rank, dist.group.WORLD, mesh)
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return Side(size, None, None, mesh)
    assert isinstance(group, dist.ProcessGroup)
    return Side(size, rank, group, mesh, TorchComm(group))


def _make_tensors(state: State, side: Side) -> list[LocalTensor]:
    """This rank's part of the state, not filled (zeros, each page touched)."""
    if side.rank is None:
        return []
    tensors = []
    for number in range(state.num_tensors):
        shape, axis, position, count = list(state.shape), state.axis, side.rank, side.size
        if axis is None:
            if number % side.size != side.rank:
                continue
            position, count = 0, 1
        else:
            shape[axis] //= count
        data = torch.empty(shape, dtype=state.dtype).fill_(0)
        tensors.append(
            LocalTensor(f"layers.{number:05d}.weight", number, data, axis, position, count)
        )
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A state as one rank sees it.

    Attributes:
        state: The state.
        saving: The ranks that save.
        loading: The ranks that load.
        saved: What this rank saves, filled.
        target: What this rank loads into.
    """

    state: State
    saving: Side
    loading: Side
    saved: Sequence[LocalTensor]
    target: Sequence[LocalTensor]

    @classmethod
    def make(cls, state: State, saving: Side, loading: Side) -> Work:
        saved, target = _make_tensors(state, saving), _make_tensors(state, loading)
        for tensor in saved:
            tensor.fill()
        return cls(state, saving, loading, saved, target)

    @classmethod
    def alone(cls, state: State) -> Work:
        """For one rank that saves and loads."""
        side = make_side(1, 0, 1)
        return cls.make(state, side, side)

    def clear_target(self) -> None:
        """So that what is found there after a load was loaded."""
        for tensor in self.target:
            tensor.data.zero_()

    @property
    def target_is_right(self) -> bool:
        if self.state.reshards:
            return all(tensor.is_right() for tensor in self.target)
        pairs = zip(self.saved, self.target, strict=True)
        return all(torch.equal(one.bits, other.bits) for one, other in pairs)

    @property
    def target_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.target)


def by_key(tensors: Sequence[LocalTensor]) -> dict[str, torch.Tensor]:
    """The plain tensors of one rank."""
    return {tensor.key: tensor.data for tensor in tensors}
