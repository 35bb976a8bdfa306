"""DTensor state dicts as sharded state dicts, and back: FSDP2, tensor parallel, and their product.

A DTensor becomes one shard, or several if its local part is not one box of the global tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from dist_checkpointing.mapping.base import ReplicaId
from dist_checkpointing.mapping.nesting import (
    DictKey,
    Path,
    containers_with,
    flatten,
    path_text,
    unflatten,
)


def shard_state_dict(state_dict: StateDict, *, comm: Comm | None = None) -> ShardedStateDict:
    """The state dict with every tensor wrapped for ``save`` and ``load``. Collective.

    The key of a tensor is its path, joined with dots: its fully qualified name. ``data`` is the
    local tensor itself, so ``load`` fills the DTensors and tensors of ``state_dict`` in place.

    A DTensor may be on any mesh, with any Shard and Replicate placements: uneven, with empty
    shards, several on one axis, in FSDP2's strided order. A local tensor whose rows are not
    neighbours in the global one becomes a ShardedTensorFactory. A plain tensor is a whole global
    tensor. All other values stay as they are, and are common state.

    Ranks that hold the same part of the same tensor are replicas, also if they hold it through
    different meshes. They are numbered in rank order, and replica 0 is written.

    Args:
        state_dict: any nest of dicts, lists and tuples, such as ``model.state_dict()`` or the
            result of ``get_state_dict`` of torch.distributed.checkpoint.state_dict. Not changed.
        comm: the ranks that save or load together; by default all of torch.distributed, or this
            process.

    Raises:
        InvalidShardingError: for placements that cannot be stored (Partial), for classes of tensors
            without memory of their own, and for different paths with the same name.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> state = {"model": model.state_dict(), "step": 17}
        >>> save(shard_state_dict(state), "ckpt/17")
        >>> sorted(load_tensors_metadata("ckpt/17"))
        ['model.bias', 'model.weight']
    """
    comm = default_comm() if comm is None else comm
    leaves, skeleton = flatten(state_dict, only=containers_with(state_dict, _is_tensor))
    with comm.agreed("describing the tensors"):
        held = _describe_all({path: leaf for path, leaf in leaves.items() if _is_tensor(leaf)})
    parts = [part for part in held.values() if part is not None]
    numbers = iter(_replica_numbers(parts, comm))
    wrapped = {
        path: LocalNonpersistentObject(leaves[path]) if part is None else part.leaf(next(numbers))
        for path, part in held.items()
    }
    sharded: ShardedStateDict = unflatten(skeleton, leaves | wrapped)
    return sharded


def unshard_state_dict(loaded: StateDict, state_dict: StateDict) -> StateDict:
    """What ``load`` returned for ``shard_state_dict(state_dict)``, with DTensors again.

    The result has the tensors of ``state_dict``, which ``load`` has filled, and the common state of
    the checkpoint. Pass it to ``model.load_state_dict``, or to ``set_state_dict`` of
    torch.distributed.checkpoint.state_dict.

    Args:
        loaded: result of ``load``; not changed.
        state_dict: state dict that was passed to ``shard_state_dict``.

    Example:
        >>> state = {"model": torch.nn.Linear(3, 2).state_dict(), "step": 17}
        >>> save(shard_state_dict(state), "ckpt/17")
        >>> loaded = load(shard_state_dict(state), "ckpt/17")
        >>> unshard_state_dict(loaded, state)["step"]
        17
    """
    leaves, skeleton = flatten(loaded)
    own, _ = flatten(state_dict, only=containers_with(state_dict, _is_tensor))
    tensors = {path: leaf for path, leaf in own.items() if path in leaves and _is_tensor(leaf)}
    restored: StateDict = unflatten(skeleton, leaves | tensors)
    return restored


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _name(path: Path) -> str:
    return ".".join(str(s.key if isinstance(s, DictKey) else s.index) for s in path)


def _describe_all(tensors: Mapping[Path, torch.Tensor]) -> dict[Path, _Held | None]:
    """What this rank holds of each tensor; None if this rank is not in the tensor's mesh."""
    held: dict[Path, _Held | None] = {}
    by_name: dict[str, list[Path]] = {}
    findings: list[Finding] = []
    for path, tensor in tensors.items():
        name = _name(path)
        by_name.setdefault(name, []).append(path)
        try:
            held[path] = _describe(name, tensor)
        except InvalidShardingError as error:
            findings += error.findings
    findings += [
        Finding(
            "several paths have this name",
            name,
            found=", ".join(map(path_text, same)),
            remedy="Rename a key, so that paths joined with dots differ.",
        )
        for name, same in by_name.items()
        if len(same) > 1
    ]
    if findings:
        raise InvalidShardingError("tensors that cannot be sharded", findings)
    return held


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What this rank holds of one tensor.

    Attributes:
        key: Key of the tensor.
        data: The local tensor.
        global_shape: Shape of the global tensor.
        boxes: Boxes of the global tensor that make up ``data``, in C order of ``local_boxes``.
        local_boxes: The box of ``data`` that each of ``boxes`` fills.
        grid: Number of parts along each axis if they are even, else None.
    """

    key: str
    data: torch.Tensor
    global_shape: Ints
    boxes: tuple[Box, ...]
    local_boxes: tuple[Box, ...]
    grid: Ints | None

    def leaf(self, replica_id: int) -> ShardedTensor | ShardedTensorFactory:
        if len(self.boxes) == 1:
            return self._shard(self.data, self.boxes[0], self.grid, replica_id)
        # Views of the local tensor: filling them fills it.
        return ShardedTensorFactory(
            self.key, self.data, self._build, partial(_first, self.data), replica_id
        )

    def _build(self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Any) -> Any:
        del key, flat
        pairs = enumerate(zip(self.boxes, self.local_boxes, strict=True))
        return {
            str(i): self._shard(data[local_box.slices()], box, None, replica_id)
            for i, (box, local_box) in pairs
        }

    def _shard(
        self, data: torch.Tensor, box: Box, grid: Ints | None, replica_id: ReplicaId
    ) -> ShardedTensor:
        return ShardedTensor(
            self.key, data, data.dtype, box.shape, self.global_shape, box.offset, grid, replica_id
        )


def _first(filled: torch.Tensor, parts: object) -> torch.Tensor:
    del parts
    return filled


def _describe(key: str, tensor: torch.Tensor) -> _Held | None:
    """What this rank holds of a tensor; None if this rank is not in its mesh."""
    if isinstance(tensor, DTensor):
        return _describe_dtensor(key, tensor)
    if hasattr(tensor, "local_shards") or hasattr(tensor, "__create_chunk_list__"):
        finding = Finding(
            "this kind of tensor has no memory of its own",
            key,
            expected="a torch.Tensor or DTensor",
            found=type(tensor).__name__,
            remedy="FSDP1: use FSDP2 (fully_shard), or state dicts of DTensors.",
        )
        raise InvalidShardingError("cannot be sharded", [finding])
    whole = Box.whole(tuple(tensor.shape))
    ones = (1,) * tensor.ndim
    return _Held(key, tensor.detach(), whole.shape, (whole,), (whole,), ones)


def _describe_dtensor(key: str, tensor: DTensor) -> _Held | None:
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return None
    shape = tuple(tensor.shape)
    cuts: list[list[_MeshCut]] = [[] for _ in shape]
    for mesh_axis, placement in enumerate(tensor.placements):
        own = coordinates[mesh_axis]
        axis = getattr(placement, "dim", None)
        if placement.is_replicate():
            continue
        if axis is not None and not placement.is_partial():
            # Only strided shards (FSDP2) have a split factor.
            factor = int(getattr(placement, "split_factor", 1))
            cuts[axis].append(_MeshCut(tensor.device_mesh.size(mesh_axis), own, factor))
        else:
            finding = Finding(
                "this placement cannot be stored",
                key,
                expected="Shard or Replicate",
                found=repr(placement),
                remedy="Call redistribute() first: it adds up the parts.",
            )
            raise InvalidShardingError("cannot be sharded", [finding])
    with torch.no_grad():
        data = tensor.to_local().detach()
    runs = [
        _runs_of_axis(extent, of_axis, local)
        for extent, of_axis, local in zip(shape, cuts, data.shape, strict=True)
    ]
    if any(found is None for found in runs):
        finding = Finding(
            "the local tensor is not what the placements say",
            key,
            expected=f"{tensor.placements} of {shape} on {tensor.device_mesh}",
            found=f"{tuple(data.shape)} at {coordinates}",
        )
        raise InvalidShardingError("cannot be sharded", [finding])
    boxes, local_boxes = _boxes([found for found in runs if found is not None])
    counts = tuple(math.prod(cut.count for cut in of_axis) for of_axis in cuts)
    even = all(extent % count == 0 for extent, count in zip(shape, counts, strict=True))
    return _Held(key, data, shape, boxes, local_boxes, counts if even else None)


@dataclass(frozen=True, slots=True)
class _MeshCut:
    """One placement: this rank has part ``index`` of ``count``.

    A strided cut first cuts into ``factor`` parts, and then takes part ``index`` of each.
    """

    count: int
    index: int
    factor: int = 1


def _runs_of_axis(extent: int, cuts: Sequence[_MeshCut], local_extent: int) -> list[range] | None:
    """The indices of one axis that a rank holds, as ranges; None if there are not so many.

    FSDP2 cuts what tensor parallelism has already cut, but its mesh axis comes first: a strided cut
    means "after the cuts that follow". Applied from left to right, it gives other rows if the
    extent is uneven. So both are tried, and compared with the extent of the local tensor.
    """
    for runs in (_cut_as_fsdp(extent, cuts), _cut_from_left(extent, cuts)):
        if runs is not None and sum(map(len, runs)) == local_extent:
            return runs or [range(extent, extent)]
    return None


def _cut_as_fsdp(extent: int, cuts: Sequence[_MeshCut]) -> list[range] | None:
    late = [i for i, cut in enumerate(cuts) if cut.factor > 1]
    if any(cuts[i].factor != math.prod(cut.count for cut in cuts[i + 1 :]) for i in late):
        return None
    runs = [range(extent)]
    for cut in [*(c for c in cuts if c.factor == 1), *(cuts[i] for i in reversed(late))]:
        runs = _part(runs, cut.count, cut.index)
    return runs


def _cut_from_left(extent: int, cuts: Sequence[_MeshCut]) -> list[range]:
    runs = [range(extent)]
    for cut in cuts:
        parts = [_part(runs, cut.factor, part) for part in range(cut.factor)]
        runs = _joined(run for part in parts for run in _part(part, cut.count, cut.index))
    return runs


def _part(runs: Sequence[range], count: int, index: int) -> list[range]:
    """Part ``index`` of ``count`` as ``torch.chunk`` cuts: equal parts, the last ones smaller."""
    block = -(-sum(map(len, runs)) // count)
    start, stop = index * block, (index + 1) * block
    taken = []
    for run in runs:
        taken.append(run[max(start, 0) : max(stop, 0)])
        start, stop = start - len(run), stop - len(run)
    return _joined(taken)


def _joined(runs: Iterable[range]) -> list[range]:
    joined: list[range] = []
    for run in runs:
        if joined and len(run) and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        elif len(run):
            joined.append(run)
    return joined


def _boxes(runs: Sequence[Sequence[range]]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """The boxes that ranges along every axis make up, and the box of each in the local tensor."""
    starts = [[*itertools.accumulate(map(len, of_axis), initial=0)] for of_axis in runs]
    boxes, local_boxes = [], []
    for choice in itertools.product(*(range(len(of_axis)) for of_axis in runs)):
        chosen = [of_axis[i] for of_axis, i in zip(runs, choice, strict=True)]
        shape = tuple(map(len, chosen))
        boxes.append(Box(tuple(run.start for run in chosen), shape))
        local_boxes.append(Box(tuple(s[i] for s, i in zip(starts, choice, strict=True)), shape))
    return tuple(boxes), tuple(local_boxes)


def _replica_numbers(held: Sequence[_Held], comm: Comm) -> list[int]:
    """For each part, how many lower ranks hold it too. Collective."""
    # Hashes, because every rank gets those of all ranks. A collision would be found as a gap.
    own = np.array(
        [xxhash.xxh3_64_intdigest(repr((part.key, part.boxes)).encode()) for part in held],
        dtype=np.uint64,
    )
    lower = comm.exchange("finding replicas", lambda: own)[: comm.rank]
    known = np.sort(np.concatenate([*lower, np.array([], dtype=np.uint64)]))
    first, last = (np.searchsorted(known, own, side=side) for side in ("left", "right"))
    numbers: list[int] = (last - first).tolist()
    return numbers
