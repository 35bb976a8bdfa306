"""DTensor state dicts as sharded state dicts, and back: FSDP2, tensor parallel, and their product.

A DTensor becomes one shard, or several if its local part is not one box of the global tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from dist_checkpointing.mapping.dtensor_boxes import LocalPart, local_part
from dist_checkpointing.mapping.nested_dicts import Path, flatten, path_text, unflatten
from dist_checkpointing.mapping.objects_and_factories import ReplicaId, invalid_sharding


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
    comm = chosen_comm(comm)
    leaves, skeleton = flatten(state_dict, wanted=torch.is_tensor)
    with comm.agreed("describing the tensors"):
        parts = _parts({path: leaf for path, leaf in leaves.items() if torch.is_tensor(leaf)})
    # Hashes, because every rank gets those of all ranks. A collision would be found as a gap.
    hashes = [
        xxhash.xxh3_64_intdigest(repr((_name(path), part.boxes)).encode())
        for path, part in parts.items()
        if part is not None
    ]
    own = np.array(hashes, dtype=np.uint64)
    # A part that lower ranks hold too is a replica.
    known = np.concatenate([own[:0], *comm.exchange("finding replicas", lambda: own)[: comm.rank]])
    known.sort()
    first, last = (np.searchsorted(known, own, side=side) for side in ("left", "right"))
    numbers = iter((last - first).tolist())
    for path, part in parts.items():
        tensor = leaves[path]
        if part is None:
            leaves[path] = LocalNonpersistentObject(tensor)
        else:
            leaves[path] = _leaf(_name(path), tuple(tensor.shape), part, next(numbers))
    sharded: ShardedStateDict = unflatten(skeleton, leaves)
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
    own, _ = flatten(state_dict, wanted=torch.is_tensor)
    tensors = {path: leaf for path, leaf in own.items() if path in leaves and torch.is_tensor(leaf)}
    restored: StateDict = unflatten(skeleton, leaves | tensors)
    return restored


def _name(path: Path) -> str:
    return ".".join(str(step) for step, _ in path)


def _parts(tensors: Mapping[Path, torch.Tensor]) -> dict[Path, LocalPart | None]:
    """What this rank holds of each tensor; None if this rank is not in the tensor's mesh."""
    parts: dict[Path, LocalPart | None] = {}
    by_name: dict[str, list[Path]] = {}
    findings: list[Finding] = []
    for path, tensor in tensors.items():
        name = _name(path)
        by_name.setdefault(name, []).append(path)
        try:
            parts[path] = _part(name, tensor)
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
    InvalidShardingError.raise_if(findings, "tensors that cannot be sharded")
    return parts


def _part(key: str, tensor: torch.Tensor) -> LocalPart | None:
    if isinstance(tensor, DTensor):
        return local_part(key, tensor)
    if hasattr(tensor, "local_shards") or hasattr(tensor, "__create_chunk_list__"):
        raise invalid_sharding(
            key,
            "this kind of tensor has no memory",
            expected="a torch.Tensor or DTensor",
            found=type(tensor).__name__,
            remedy="FSDP1: use FSDP2 (fully_shard), or state dicts of DTensors.",
        )
    whole = Box.whole(tuple(tensor.shape))
    return LocalPart(tensor.detach(), (whole,), (whole,), (1,) * tensor.ndim, ())


def _leaf(
    key: str, shape: Ints, part: LocalPart, number: int
) -> ShardedTensor | ShardedTensorFactory:
    if len(part.boxes) == 1:
        return _shard(key, shape, part.data, part.boxes[0], part.grid, number)
    # Views of the local tensor: filling them fills it.
    merge = partial(_first, part.data)
    return ShardedTensorFactory(key, part.data, partial(_build, shape, part), merge, number)


def _build(
    shape: Ints, part: LocalPart, key: str, data: torch.Tensor, number: ReplicaId, _: Any
) -> dict[str, ShardedTensor]:
    pairs = enumerate(zip(part.boxes, part.local_boxes, strict=True))
    return {
        str(i): _shard(key, shape, data[inner.slices()], box, None, number)
        for i, (box, inner) in pairs
    }


def _shard(
    key: str, shape: Ints, data: torch.Tensor, box: Box, grid: Ints | None, number: ReplicaId
) -> ShardedTensor:
    return ShardedTensor(key, data, data.dtype, box.shape, shape, box.offset, grid, number)


def _first(filled: torch.Tensor, _: object) -> torch.Tensor:
    return filled
