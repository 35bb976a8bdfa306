"""ShardedObject, LocalNonpersistentObject, ShardedTensorFactory, ShardedStateful, and the base
class of all leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError

StateDict = dict[str, Any]
"""Names and values, which may be nested: dicts, lists and tuples with tensors and plain values."""
CommonStateDict = dict[str, Any]
"""What is the same on all ranks and is saved once: all that is in no leaf of its own."""
ShardedStateDict = dict[str, Any]
"""A state dict whose distributed tensors and objects are leaves, such as ``ShardedTensor``."""
ReplicaId = int | tuple[int, ...]
"""Which copy this is; the copy with zeros only is the main one, which is written."""
_INT = frozenset({int})
Leaf = TypeVar("Leaf", bound="ShardedBase")


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this is the replica that is written: 0, or a tuple (or list) of zeros.

    Example:
        >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
        (True, True, False)
    """
    if type(replica_id) is not tuple:
        replica_id = plain_replica_id(replica_id, "replica_id")
    if isinstance(replica_id, int):
        return replica_id == 0
    return replica_id.count(0) == len(replica_id)


def invalid_sharding(key: str | None, problem: str, **details: Any) -> InvalidShardingError:
    return InvalidShardingError(f"invalid sharding of {key!r}", [Finding(problem, key, **details)])


def plain_int(value: Any, name: str, key: str) -> int:
    """A field of the leaf ``key`` as an int; anything with ``__index__`` is an integer."""
    if type(value) is int:
        return value
    try:
        return index(value)
    except TypeError:
        raise _no_integer(key, f"{name} must be an integer", value) from None


def plain_ints(values: Any, name: str, key: str) -> tuple[int, ...]:
    """Like ``plain_int``, for a field that is a sequence of integers: a tuple."""
    if type(values) is tuple and _INT.issuperset(map(type, values)):
        return values
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise _no_integer(key, f"{name} must hold integers", values) from None


def plain_replica_id(replica_id: Any, key: str) -> ReplicaId:
    """Like ``plain_int``, for a replica id: an integer or a sequence of integers."""
    if type(replica_id) is int:
        return replica_id
    try:
        return index(replica_id)
    except TypeError:
        return plain_ints(replica_id, "replica_id", key)


def plain_range(flat: Any, key: str) -> slice | None:
    """Like ``plain_int``, for a flattened range; an end that is None stays for a later check."""
    if flat is None:
        return None
    if not isinstance(flat, slice):
        raise _no_integer(key, "flattened_range must be a slice", flat)
    start, stop = (
        None if end is None else plain_int(end, "flattened_range", key)
        for end in (flat.start, flat.stop)
    )
    return slice(start, stop, flat.step)


def _no_integer(key: str, problem: str, value: Any) -> InvalidShardingError:
    return invalid_sharding(key, problem, found=f"{value!r} ({type(value).__name__})")


def shallow_copy(leaf: Leaf) -> Leaf:
    """A leaf with the same fields, as ``copy.copy`` makes it, in a fifth of the time."""
    copied = object.__new__(type(leaf))
    copied.__dict__.update(leaf.__dict__)
    return copied


class ShardedBase(ABC):
    """A sharded leaf of a state dict: it has a key, data and a replica id."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise InvalidShardingError if the fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """The same description with ``data=None``."""

    def _wrong(self, problem: str, **details: Any) -> InvalidShardingError:
        return invalid_sharding(self.key, problem, **details)


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, slice | None], Any]
FactoryMergeFn = Callable[[Any], Any]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A value that is saved in another form than it has in training.

    Attributes:
        key: Key, which ``build_fn`` gets.
        data: Tensor, which ``build_fn`` gets.
        build_fn: ``(key, data, replica_id, flattened_range)`` -> a sharded leaf or a nest of them.
        merge_fn: The loaded nest -> the value that ``load`` returns.
        replica_id: Replica id, which ``build_fn`` gets.
        flattened_range: Flattened range, which ``build_fn`` gets.

    Example:
        >>> def build(key, fused, replica_id, flattened_range):
        ...     names = (f"{key}.gate", f"{key}.up")
        ...     return [
        ...         ShardedTensor.from_rank_offsets(name, half, replica_id=replica_id)
        ...         for name, half in zip(names, fused.chunk(2))
        ...     ]
        >>> fused = ShardedTensorFactory("mlp", torch.ones(8, 3), build, torch.cat)
        >>> [leaf.key for leaf in fused.build()]
        ['mlp.gate', 'mlp.up']
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.replica_id = plain_replica_id(self.replica_id, self.key)
        self.flattened_range = plain_range(self.flattened_range, self.key)

    def build(self) -> Any:
        """The sharded leaf, or nest of leaves, that is saved or loaded instead."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: only what the factory builds can be checked."""

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)  # type: ignore[arg-type]


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory in the nested dict by what it builds, in place.

    ``save`` and ``load`` do this themselves, on a copy.

    Example:
        >>> def build(key, data, replica_id, flattened_range):
        ...     return ShardedTensor.from_rank_offsets(key, data.T, replica_id=replica_id)
        >>> state = {"w": ShardedTensorFactory("w", torch.ones(4, 2), build, torch.t)}
        >>> apply_factories(state)
        >>> state["w"].global_shape
        (2, 4)
    """
    nest: Any = sharded_state_dict
    for step, value in list(nest.items() if isinstance(nest, dict) else enumerate(nest)):
        if isinstance(value, ShardedTensorFactory):
            nest[step] = value.build()
        elif isinstance(value, dict | list):
            apply_factories(value)  # type: ignore[arg-type]


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """``x1``, where each factory in ``x2`` has merged the values at its path. In place.

    Args:
        x1: loaded values, nested like ``x2``; a list may correspond to a dict with integer keys.
        x2: the factories alone, at their paths.
        key: the path so far, for messages.

    Raises:
        ValueError: if a path of ``x2`` does not exist in ``x1``.

    Example:
        >>> halves = {"w": [torch.zeros(1), torch.ones(1)]}
        >>> factory = ShardedTensorFactory("w", torch.empty(2), lambda *_: None, torch.cat)
        >>> apply_factory_merges(halves, {"w": factory})
        {'w': tensor([0., 1.])}
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} entries at {key}")
    if isinstance(x1, dict) and isinstance(x2, dict):
        steps, known = list(x2.items()), x1.keys()
    elif isinstance(x1, list) and isinstance(x2, list | dict):
        steps = list(x2.items()) if isinstance(x2, dict) else list(enumerate(x2))
        known = dict.fromkeys(range(len(x1))).keys()
    else:
        raise ValueError(  # noqa: TRY004 - what Megatron raises
            f"cannot merge {type(x2).__name__} into {type(x1).__name__} at {key}"
        )
    for step, below in steps:
        if step not in known or (isinstance(x1, list) and type(step) is not int):
            raise ValueError(f"{step!r} at {key} is not among the loaded values {list(known)}")
        x1[step] = apply_factory_merges(x1[step], below, (*key, step))
    return x1


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
            problem = "global_offset must have as many entries as global_shape"
            raise self._wrong(problem, expected=len(self.global_shape), found=self.global_offset)

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
            raise invalid_sharding(
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


@dataclass(frozen=True, slots=True)
class StoredState:
    """What a checkpoint holds, or what a recipe makes of it, before a tensor of it is read.

    Attributes:
        tensors: Global shape and dtype of every stored tensor, by key.
        common: Common state of the checkpoint.
        sources: Keys of the stored tensors that a recipe makes each tensor of; empty without one.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    common: CommonStateDict
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@runtime_checkable
class ShardedStateful(Protocol):
    """An object that says what of it is saved, and takes back what is loaded.

    ``save``, ``load`` and the manager take one in place of a state dict; ``interop.TorchState`` is
    one. Both methods are collective.
    """

    def sharded_state_dict(self, comm: Comm) -> ShardedStateDict:
        """What ``save`` writes."""

    def template_for(
        self, stored: StoredState, comm: Comm
    ) -> tuple[ShardedStateDict, Callable[[StateDict], None]]:
        """The template that ``load`` fills, and what puts the loaded state dict into the object."""


def as_state_dict(state: ShardedStateDict | ShardedStateful, comm: Comm) -> ShardedStateDict:
    """The state dict to save; collective if ``state`` is an object."""
    # A dict first: whether an object follows a protocol takes long to find out.
    if type(state) is dict or not isinstance(state, ShardedStateful):
        return state
    return state.sharded_state_dict(comm)
