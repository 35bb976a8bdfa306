"""Shards that torch DCP understands: a state dict of them goes through plain ``dcp.save`` and load.

They speak DCP's ``_Checkpointable`` protocol: three methods with names in double underscores, which
its planners look for on tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import values_of_part
from dist_checkpointing.mapping import ShardedTensor


class _WithoutMemory(torch.Tensor):
    """A tensor that has a shape, a dtype and a device, and no memory of its own."""

    @classmethod
    def made(cls, shape: Sequence[int], like: torch.Tensor) -> Self:
        """A tensor of this shape, with the dtype and device of another tensor."""
        make = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - the name torch gives it
        tensor: Self = make(cls, tuple(shape), dtype=like.dtype, device=like.device)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # an instance method in torch's stubs
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        del types, args, kwargs
        raise NotImplementedError(f"{cls.__name__} is only saved and loaded: {func}")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"{type(self).__name__}(size={tuple(self.size())}, dtype={self.dtype})"


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
            raise _unfit("a flattened shard is not one box of its tensor", sh_ten.key, remedy)
        if tuple(data.shape) != tuple(sh_ten.local_shape):
            expected, found = tuple(sh_ten.local_shape), tuple(data.shape)
            raise _unfit("data has another shape", sh_ten.key, expected=expected, found=found)
        return cls.made(sh_ten.global_shape, data)

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data
        self._sh_ten = sh_ten

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> Self:
        """The shard, to save or to load into.

        Raises:
            InvalidShardingError: if it has no data, or is flattened.
        """
        return cls(_data_of(sh_ten), sh_ten)

    @property
    def _is_empty_part(self) -> bool:
        """Whether this rank has no element of a tensor that has some; DCP must not look here."""
        return 0 in self._sh_ten.box.shape and 0 not in self._sh_ten.global_shape

    def _chunk(self) -> ChunkStorageMetadata:
        box = self._sh_ten.box
        return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))

    def __create_write_items__(
        self, fqn: str, sh_ten: object = None, index: int | None = None
    ) -> list[WriteItem]:
        del sh_ten  # it is this object
        chunk = self._chunk()
        if self._is_empty_part:
            return []
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self._data),
            size=self.size(),
        )
        where = MetadataIndex(fqn, chunk.offsets, index)
        return [WriteItem(index=where, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self._is_empty_part else [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        del index  # there is one
        return self._data[(None,) * self._sh_ten.prepend_axis_num]


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
        self._local_shards = list(local_shards)

    @classmethod
    def from_sh_tens(cls, sh_tens: Sequence[ShardedTensor]) -> Self:
        """All shards of one key that this rank has, flattened ones too.

        A flattened range is cut into the boxes that it consists of, each a view of its data, so
        that DCP sees an ordinary tensor.

        Raises:
            InvalidShardingError: if the list is empty, a shard has no data, or the shards are of
                different tensors.
        """
        return cls([part for sh_ten in sh_tens for part in _parts(sh_ten)])

    def __create_write_items__(self, fqn: str, sh_ten: object = None) -> list[WriteItem]:
        del sh_ten  # it is this object
        return [
            item
            for position, shard in enumerate(self._local_shards)
            for item in shard.__create_write_items__(fqn, shard, position)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for shard in self._local_shards for chunk in shard.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The data of one shard."""
        if index.offset is None:
            raise ValueError(f"{index.fqn!r} has several parts here: an offset must say which one")
        shards, hint = self._local_shards, index.index
        # The hint may count the chunks of all ranks.
        candidates = shards[hint : hint + 1] if hint is not None and hint >= 0 else []
        for shard in (*candidates, *shards):
            at = shard._sh_ten.box.offset  # noqa: SLF001
            if at == tuple(index.offset) and not shard._is_empty_part:  # noqa: SLF001
                return shard.__get_tensor_shard__(index)
        raise ValueError(f"{index.fqn!r} has no part at {tuple(index.offset)} on this rank")


def _unfit(
    problem: str,
    key: str | None = None,
    remedy: str | None = None,
    *,
    expected: object = None,
    found: object = None,
) -> InvalidShardingError:
    finding = Finding(problem, key, expected, found, remedy=remedy)
    return InvalidShardingError("cannot be made checkpointable", [finding])


def _data_of(sh_ten: ShardedTensor) -> torch.Tensor:
    if sh_ten.data is None:
        raise _unfit("has no data", sh_ten.key, "Call its init_data to load into it.")
    return sh_ten.data.detach()


def _parts(sh_ten: ShardedTensor) -> Iterator[CheckpointableShardedTensor]:
    if sh_ten.flat_range is None:
        yield CheckpointableShardedTensor.from_sh_ten(sh_ten)
        return
    for box, values in values_of_part(sh_ten.box, sh_ten.flat_range, _data_of(sh_ten)):
        shard = ShardedTensor(
            sh_ten.key, values, sh_ten.dtype, box.shape, sh_ten.global_shape, box.offset, None
        )
        yield CheckpointableShardedTensor.from_sh_ten(shard)
