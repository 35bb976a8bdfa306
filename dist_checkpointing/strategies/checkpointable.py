"""Shards that torch DCP understands: a state dict of them goes through plain ``dcp.save`` and load.

They speak DCP's ``_Checkpointable`` protocol: three methods with names in double underscores, which
its planners look for on tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, values_of_part
from dist_checkpointing.mapping import ShardedTensor


def shard_item(
    fqn: str, box: Box, properties: TensorProperties, size: Sequence[int], position: int | None
) -> WriteItem:
    """A box of a tensor as an item of a plan of DCP."""
    chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
    index = MetadataIndex(fqn, chunk.offsets, position)
    data = TensorWriteData(chunk, properties, torch.Size(size))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _WithoutMemory(torch.Tensor):
    """A tensor that has a shape, a dtype and a device, and parts instead of memory of its own."""

    _parts: list[tuple[ShardedTensor, torch.Tensor]]

    @classmethod
    def made(cls, shape: Sequence[int], like: torch.Tensor) -> Self:
        """A tensor of this shape, with the dtype and device of another tensor."""
        make = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - the name torch gives it
        return make(cls, tuple(shape), dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(f"{cls.__name__} is only saved and loaded: {func}")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(size={tuple(self.size())}, dtype={self.dtype})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = [sh_ten.box for sh_ten, _ in self._parts]
        return [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]

    def __create_write_items__(self, fqn: str, sh_ten: object = None) -> list[WriteItem]:
        of_part = TensorProperties.create_from_tensor
        return [
            shard_item(fqn, part.box, of_part(data), self.size(), position)
            for position, (part, data) in enumerate(self._parts)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data of one part."""
        if index.offset is None and len(self._parts) > 1:
            raise ValueError(f"{index.fqn!r} has several parts here: an offset must say which one")
        # The hint may count the chunks of all ranks.
        hint = index.index or 0
        for sh_ten, data in chain(self._parts[hint : hint + 1], self._parts):
            if index.offset is None or sh_ten.box.offset == tuple(index.offset):
                return data[(None,) * sh_ten.prepend_axis_num]
        raise ValueError(f"{index.fqn!r} has no part at {tuple(index.offset or ())} on this rank")


class CheckpointableShardedTensor(_WithoutMemory):
    """A ShardedTensor as one tensor of its global shape. This rank has one part of it.

    It has no memory of its own: DCP saves from and loads into the data of the ShardedTensor. On an
    axis that exists only globally, the part has extent 1.

    Args:
        data: Data of the shard.
        sh_ten: The shard, which must not be flattened.

    Raises:
        InvalidShardingError: if the shard is flattened, or ``data`` has another shape than its
            local shape.

    Example:
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from dist_checkpointing import ShardedTensor
        >>> from dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> state = {"w": CheckpointableShardedTensor.from_sh_ten(shard)}
        >>> _ = dcp.save({"w": torch.ones(2)}, checkpoint_id="ckpt", no_dist=True)
        >>> dcp.load(state, checkpoint_id="ckpt", no_dist=True)
        >>> shard.data
        tensor([1., 1.])
    """

    def __new__(cls, data: torch.Tensor, sh_ten: ShardedTensor) -> Self:
        if sh_ten.flattened_range is not None:
            remedy = "Use LocalShardsContainer.from_sh_tens, which cuts it into boxes."
            problem = "a flattened shard is not one box of its tensor"
            raise _unfit(problem, sh_ten.key, remedy=remedy)
        if tuple(data.shape) != tuple(sh_ten.local_shape):
            expected, found = tuple(sh_ten.local_shape), tuple(data.shape)
            raise _unfit("data has another shape", sh_ten.key, expected=expected, found=found)
        return cls.made(sh_ten.global_shape, data)

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._sh_ten = sh_ten
        # Of a tensor that has elements DCP must not look at a part that has none.
        is_nothing = 0 in sh_ten.box.shape and 0 not in sh_ten.global_shape
        self._parts = [] if is_nothing else [(sh_ten, data)]

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> Self:
        """The shard, to save or to load into.

        Raises:
            InvalidShardingError: if it has no data, or is flattened.
        """
        return cls(_data_of(sh_ten), sh_ten)


class LocalShardsContainer(_WithoutMemory):
    """Several parts of one global tensor that one rank has.

    Args:
        local_shards: One or more shards of one tensor.

    Raises:
        InvalidShardingError: if the list is empty, or its shards are of different tensors.

    Example:
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from dist_checkpointing import ShardedTensor
        >>> from dist_checkpointing.strategies.checkpointable import LocalShardsContainer
        >>> halves = [
        ...     ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, half, 2))
        ...     for half in range(2)
        ... ]
        >>> _ = dcp.save({"w": torch.arange(4.0)}, checkpoint_id="ckpt", no_dist=True)
        >>> state = {"w": LocalShardsContainer.from_sh_tens(halves)}
        >>> dcp.load(state, checkpoint_id="ckpt", no_dist=True)
        >>> halves[1].data
        tensor([2., 3.])
    """

    def __new__(cls, local_shards: Sequence[CheckpointableShardedTensor]) -> Self:
        shards = list(local_shards)
        kinds = {(shard._sh_ten.key, shard.size(), shard.dtype) for shard in shards}  # noqa: SLF001
        if len(kinds) != 1:
            one = "one key, global shape and dtype"
            found = sorted(map(str, kinds))
            raise _unfit("a container needs shards of one tensor", expected=one, found=found)
        return cls.made(shards[0].size(), shards[0])

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._parts = [part for shard in local_shards for part in shard._parts]  # noqa: SLF001

    @classmethod
    def from_sh_tens(cls, sh_tens: Sequence[ShardedTensor]) -> Self:
        """All shards of one key that this rank has, flattened ones too.

        A flattened range is cut into the boxes that it consists of, each a view of its data, so
        that DCP sees an ordinary tensor.

        Raises:
            InvalidShardingError: if the list is empty, a shard has no data, or the shards are of
                different tensors.
        """
        shards: list[ShardedTensor] = []
        for own in sh_tens:
            if own.flat_range is None:
                shards.append(own)
                continue
            for box, values in values_of_part(own.box, own.flat_range, _data_of(own)):
                at = box.shape, own.global_shape, box.offset
                shards.append(ShardedTensor(own.key, values, own.dtype, *at, None))
        return cls([CheckpointableShardedTensor.from_sh_ten(shard) for shard in shards])


def _unfit(problem: str, key: str | None = None, **values: Any) -> InvalidShardingError:
    return InvalidShardingError("cannot be made checkpointable", [Finding(problem, key, **values)])


def _data_of(sh_ten: ShardedTensor) -> torch.Tensor:
    if sh_ten.data is None:
        raise _unfit("has no data", sh_ten.key, remedy="Call its init_data to load into it.")
    return sh_ten.data.detach()
