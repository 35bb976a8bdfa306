"""The boxes of a global tensor that a rank holds of a DTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.mapping.objects_and_factories import invalid_sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """What this rank holds of a tensor: ``boxes`` of the global one, which fill ``local_boxes`` of
    ``data``, in C order.

    ``grid`` is the number of parts along each axis if they are even. ``replica_id`` is the position
    of this rank along the mesh axes that replicate the tensor.
    """

    data: torch.Tensor
    boxes: tuple[Box, ...]
    local_boxes: tuple[Box, ...]
    grid: Ints | None
    replica_id: Ints


def local_part(key: str, tensor: DTensor) -> LocalPart | None:
    """What this rank holds of a DTensor; None if this rank is not in its mesh."""
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        return None
    shape = tuple(tensor.shape)
    cuts: list[list[_MeshCut]] = [[] for _ in shape]
    replica_id: list[int] = []
    for mesh_axis, placement in enumerate(tensor.placements):
        own = coordinates[mesh_axis]
        axis = getattr(placement, "dim", None)
        if placement.is_replicate():
            replica_id.append(own)
        elif axis is not None and not placement.is_partial():
            # Only strided shards (FSDP2) have a split factor.
            factor = int(getattr(placement, "split_factor", 1))
            cuts[axis].append(_MeshCut(tensor.device_mesh.size(mesh_axis), own, factor))
        else:
            raise invalid_sharding(
                key,
                "this placement cannot be stored",
                expected="Shard or Replicate",
                found=repr(placement),
                remedy="Call redistribute() first: it adds up the parts.",
            )
    with torch.no_grad():
        data = tensor.to_local().detach()
    runs = [
        _runs_of_axis(extent, of_axis, local)
        for extent, of_axis, local in zip(shape, cuts, data.shape, strict=True)
    ]
    if not all(runs):
        raise invalid_sharding(
            key,
            "the local tensor is not what the placements say",
            expected=f"{tensor.placements} of {shape} on {tensor.device_mesh}",
            found=f"{tuple(data.shape)} at {coordinates}",
        )
    boxes, local_boxes = _boxes(runs)
    counts = tuple(math.prod(cut.parts for cut in of_axis) for of_axis in cuts)
    even = all(extent % count == 0 for extent, count in zip(shape, counts, strict=True))
    return LocalPart(data, boxes, local_boxes, counts if even else None, tuple(replica_id))


def local_box(key: str, tensor: DTensor) -> LocalPart:
    """What this rank holds of a DTensor, if that is one box."""
    if not hasattr(tensor, "placements"):
        raise invalid_sharding(key, "not a DTensor", found=type(tensor).__name__)
    part = local_part(key, tensor)
    if part is None:
        raise invalid_sharding(
            key,
            "this rank is not in the mesh of the DTensor",
            found=tensor.device_mesh,
            remedy="Leave the tensor out of the state dict of this rank.",
        )
    if len(part.boxes) > 1:
        raise invalid_sharding(
            key,
            "the rows of this rank are not neighbours in the global tensor",
            found=f"{len(part.boxes)} boxes: {tensor.placements} on {tensor.device_mesh}",
            remedy="Use dist_checkpointing.interop.shard_state_dict.",
        )
    return part


class _MeshCut(NamedTuple):
    """One placement: this rank has part ``part`` of ``parts``; of each of ``factor`` equal ranges,
    if it is strided.
    """

    parts: int
    part: int
    factor: int


def _runs_of_axis(extent: int, cuts: Sequence[_MeshCut], local_extent: int) -> list[range]:
    """The indices of one axis that a rank holds, as ranges; no range if there are not so many.

    FSDP2 cuts what tensor parallelism has already cut, but its mesh axis comes first: a strided cut
    means "after the cuts that follow". Applied from left to right, it gives other rows if the
    extent is uneven. So both are tried, and compared with the extent of the local tensor.
    """
    for runs in (_cut_as_fsdp(extent, cuts), _cut_from_left(extent, cuts)):
        if runs is not None and sum(map(len, runs)) == local_extent:
            return runs or [range(extent, extent)]
    return []


def _cut_as_fsdp(extent: int, cuts: Sequence[_MeshCut]) -> list[range] | None:
    late = [i for i, cut in enumerate(cuts) if cut.factor > 1]
    if any(cuts[i].factor != math.prod(cut.parts for cut in cuts[i + 1 :]) for i in late):
        return None
    runs = [range(extent)]
    for cut in [*(c for c in cuts if c.factor == 1), *(cuts[i] for i in reversed(late))]:
        runs = _part(runs, cut.parts, cut.part)
    return runs


def _cut_from_left(extent: int, cuts: Sequence[_MeshCut]) -> list[range]:
    runs = [range(extent)]
    for cut in cuts:
        parts = [_part(runs, cut.factor, part) for part in range(cut.factor)]
        runs = _joined(run for part in parts for run in _part(part, cut.parts, cut.part))
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
    axes = [
        zip(of_axis, itertools.accumulate(map(len, of_axis), initial=0), strict=False)
        for of_axis in runs
    ]
    boxes, local_boxes = [], []
    for chosen in itertools.product(*axes):
        shape = tuple(len(run) for run, _ in chosen)
        boxes.append(Box(tuple(run.start for run, _ in chosen), shape))
        local_boxes.append(Box(tuple(start for _, start in chosen), shape))
    return tuple(boxes), tuple(local_boxes)
