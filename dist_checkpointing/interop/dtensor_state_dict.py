"""DTensor state dicts as sharded state dicts, and back: FSDP2, tensor parallel, and their product.

A DTensor becomes one shard, or several if its local part is not one box of the global tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.defaults import chosen_comm
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
from dist_checkpointing.mapping.nested_dicts import (
    DictKey,
    Path,
    flatten,
    path_text,
    unflatten,
)
from dist_checkpointing.mapping.objects_and_factories import ReplicaId


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
    leaves, skeleton = flatten(state_dict, wanted=_is_tensor)
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
    own, _ = flatten(state_dict, wanted=_is_tensor)
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
    """What this rank holds of one tensor, with its key and its global shape."""

    key: str
    global_shape: Ints
    part: LocalPart

    def leaf(self, replica_id: int) -> ShardedTensor | ShardedTensorFactory:
        data = self.part.data
        if len(self.part.boxes) == 1:
            return self._shard(data, self.part.boxes[0], self.part.grid, replica_id)
        # Views of the local tensor: filling them fills it.
        return ShardedTensorFactory(self.key, data, self._build, partial(_first, data), replica_id)

    def _build(self, key: str, data: torch.Tensor, replica_id: ReplicaId, flat: Any) -> Any:
        del key, flat
        pairs = enumerate(zip(self.part.boxes, self.part.local_boxes, strict=True))
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
        part = local_part(key, tensor)
        return None if part is None else _Held(key, tuple(tensor.shape), part)
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
    return _Held(key, whole.shape, LocalPart(tensor.detach(), (whole,), (whole,), ones, ()))


def _replica_numbers(held: Sequence[_Held], comm: Comm) -> list[int]:
    """For each part, how many lower ranks hold it too. Collective."""
    # Hashes, because every rank gets those of all ranks. A collision would be found as a gap.
    own = np.array(
        [xxhash.xxh3_64_intdigest(repr((own.key, own.part.boxes)).encode()) for own in held],
        dtype=np.uint64,
    )
    lower = comm.exchange("finding replicas", lambda: own)[: comm.rank]
    known = np.sort(np.concatenate([*lower, np.array([], dtype=np.uint64)]))
    first, last = (np.searchsorted(known, own, side=side) for side in ("left", "right"))
    numbers: list[int] = (last - first).tolist()
    return numbers
