"""Leaves that are not tensors: objects that are saved, and objects that are never saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dist_checkpointing.mapping.base import ReplicaId, ShardedBase, plain_ints, plain_replica_id
from dist_checkpointing.mapping.base import invalid_sharding as _invalid


@dataclass
class ShardedObject(ShardedBase):
    """A Python object that is one cell of a grid of such objects.

    Attributes:
        key: Name of the global object.
        data: Any object that ``torch.load(weights_only=True)`` can read back.
        global_shape: Number of cells along each axis.
        global_offset: Index of this cell.
        replica_id: All zeros on exactly one of the ranks that hold the same cell.

    Integers of other types, such as numpy's, become plain ints.

    Example:
        >>> rank, world_size = 1, 4  # each rank has a state of its own
        >>> state = {"rng": ShardedObject("rng", torch.get_rng_state(), (world_size,), (rank,))}
        >>> state["rng"].unique_key
        'rng/shard_1_4'
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = plain_ints(self.global_shape, "global_shape", self.key)
        self.global_offset = plain_ints(self.global_offset, "global_offset", self.key)
        self.replica_id = plain_replica_id(self.replica_id, self.key)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        for name in ("global_shape", "global_offset"):
            plain_ints(getattr(self, name), name, self.key)
        plain_replica_id(self.replica_id, self.key)
        if len(self.global_shape) != len(self.global_offset):
            raise _invalid(
                self.key,
                "global_offset must have as many entries as global_shape",
                expected=len(self.global_shape),
                found=self.global_offset,
            )

    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """``key/shard_<offset>_<shape>``, the name of this cell on disk."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The cell that ``unique_key`` names, without data.

        Raises:
            InvalidShardingError: if the name has another form.
        """
        key, _, name = unique_key.rpartition("/")
        parts = name.split("_")
        try:
            if not key or len(parts) != 3 or parts[0] != "shard":
                raise ValueError(name)
            offset, shape = (
                tuple(int(number) for number in part.split(".") if part) for part in parts[1:]
            )
        except ValueError:
            raise _invalid(
                unique_key, "not the name of a sharded object", expected="key/shard_0.1_2.2"
            ) from None
        if len(shape) + 1 == len(offset):
            shape = (*shape, -1)  # old writers cut off the last extent like a file suffix
        return cls(key, None, shape, offset, replica_id)


@dataclass
class LocalNonpersistentObject:
    """A value that is never saved; ``load`` returns it at the same path.

    Example:
        >>> save({"step": 7, "loader": LocalNonpersistentObject("an open file")}, "ckpt/7")
        >>> load({"loader": LocalNonpersistentObject("another file")}, "ckpt/7")
        {'loader': 'another file', 'step': 7}
    """

    obj: Any

    def unwrap(self) -> Any:
        """The wrapped value."""
        return self.obj
