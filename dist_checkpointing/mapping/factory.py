"""ShardedTensorFactory: values whose form in a checkpoint is another one than in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_checkpointing.mapping.base import (
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    plain_range,
    plain_replica_id,
)

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

    def visit(container: Any) -> None:
        steps = container.items() if isinstance(container, dict) else enumerate(container)
        for step, value in list(steps):
            if isinstance(value, ShardedTensorFactory):
                container[step] = value.build()
            elif isinstance(value, dict | list):
                visit(value)

    visit(sharded_state_dict)


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
