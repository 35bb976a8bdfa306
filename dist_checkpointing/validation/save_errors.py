"""What a save refuses about a state dict: no data, unwrapped distributed tensors, layouts, and keys
that clash.
"""

from __future__ import annotations

import argparse
import collections
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from dist_checkpointing.mapping.nested_dicts import (
    DictKey,
    Path,
    Position,
    is_container,
    path_text,
)
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.shard_table import ShardTable

logger: logging.Logger = logging.getLogger(__name__)

LARGE_BYTES: Final = 64 << 20
"""``save`` warns about more than this of tensors in the common state."""

_PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A step into an object."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


ValuePath = tuple[Any, ...]
"""A path in which some steps may be Attributes."""

_NUMBERS_AND_TEXTS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Found(NamedTuple):
    """A value in a nest, its container (for the outermost value its path), and what makes the last
    step of its path from ``argument``.
    """

    value: Any
    parent: Found | ValuePath
    step: Callable[[Any], Any] | None = None
    argument: Any = None

    @property
    def path(self) -> ValuePath:
        """Path of the value; only computed on request, because few values are ever named."""
        steps: list[Any] = []
        found: Found | ValuePath = self
        while isinstance(found, Found):
            if found.step is not None:
                steps.append(found.step(found.argument))
            found = found.parent
        return (*found, *reversed(steps))


def walk(tree: object, path: ValuePath = ()) -> Iterator[Found]:
    """Every value in a nest but numbers and texts; every container once.

    Not only dicts, lists and tuples are opened, but also sets (members have the path of the set),
    deques and namespaces.
    """
    seen: set[int] = set()
    waiting = [Found(tree, path)]
    while waiting:
        found = waiting.pop()
        below = _children(found)
        if below is not None:
            if id(found.value) in seen:
                continue
            seen.add(id(found.value))
            waiting += reversed(below)
        yield found


def _children(found: Found) -> list[Found] | None:
    value = found.value
    step: Callable[[Any], Any] | None
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        step, pairs = DictKey, value.items()
    elif is_container(value) or isinstance(value, collections.deque):
        step, pairs = Position, enumerate(value)
    elif type(value) in (set, frozenset):
        step, pairs = None, enumerate(value)
    elif type(value) in (argparse.Namespace, types.SimpleNamespace):
        step, pairs = Attribute, vars(value).items()
    else:
        return None
    known = _NUMBERS_AND_TEXTS
    return [Found(child, found, step, key) for key, child in pairs if type(child) not in known]


def is_distributed_tensor(value: object) -> bool:
    """Whether this is a tensor that knows its own sharding: a DTensor or torch's ShardedTensor."""
    # By attributes, so that looking at plain tensors does not import torch.distributed.
    if type(value) in _PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    return any(
        hasattr(value, name) for name in ("device_mesh", "local_shards", "__create_chunk_list__")
    )


def refuse_distributed(parts: StateDictParts, objects: Mapping[Path, ShardedObject]) -> None:
    """Refuse tensors that know their own sharding where that would be ignored: in the common state,
    as data of ShardedTensors, and in these objects. InvalidShardingError with all of them.
    """
    findings = [
        _unwrapped(found.value, path_text(found.path))
        for found in walk(parts.common)
        if is_distributed_tensor(found.value)
    ]
    findings += [
        _unwrapped(found.value, leaf.key, f" inside a ShardedObject at {path_text(found.path)}")
        for path, leaf in objects.items()
        for found in walk(leaf.data, path)
        if is_distributed_tensor(found.value)
    ]
    kinds = set(map(type, map(attrgetter("data"), parts.tensors.values())))
    if not kinds.issubset({*_PLAIN_TENSORS, type(None)}):
        what = " but is the data of the ShardedTensor "
        findings += [
            _unwrapped(leaf.data, leaf.key, f"{what}{path_text(path)}")
            for path, leaf in parts.tensors.items()
            if is_distributed_tensor(leaf.data)
        ]
    _refuse("the state dict holds sharded tensors that are not wrapped", findings)


def _refuse(message: str, findings: Sequence[Finding]) -> None:
    if findings:
        raise InvalidShardingError(message, findings)


def _unwrapped(value: object, key: str, where: str = "") -> Finding:
    kind = type(value)
    return Finding(
        f"this {kind.__name__} is not wrapped{where}, so its sharding would be ignored",
        key,
        found=f"{kind.__module__}.{kind.__qualname__}",
        remedy="Pass the state dict through dist_checkpointing.interop.shard_state_dict: "
        "save(shard_state_dict(state), path), load(shard_state_dict(state), path).",
    )


def check_data(parts: StateDictParts) -> None:
    """Refuse main replicas without data."""
    # Paths are made when they are asked for, and most states have all data.
    if all(leaf.data is not None for leaf in parts.tensors.values()):
        return
    findings = [
        Finding(
            f"data is None at {path_text(path)}",
            leaf.key,
            remedy="A leaf without data can only be loaded.",
        )
        for path, leaf in parts.tensors.items()
        if leaf.data is None and is_main_replica(leaf.replica_id)
    ]
    _refuse("there is nothing to save for some shards", findings)


def refuse_shared_keys(index: Index, objects: ShardTable) -> None:
    """Refuse keys that are tensors on some ranks and objects on others."""
    keys = np.array(objects.key_column)
    findings = [
        Finding(
            "is a ShardedTensor on some ranks and a ShardedObject on others",
            key,
            ranks=tuple(objects.ranks_of(keys == key).tolist()),
            remedy="Rename one of them.",
        )
        for key in sorted({*objects.key_column})
        if key in index
    ]
    _refuse("keys of the state dict clash", findings)


def check_storable(tensors: Mapping[Path, ShardedTensor]) -> None:
    """Refuse shards whose data is not dense or not in memory: InvalidShardingError with all of
    them.
    """
    if not any(leaf.data is not None and without_values(leaf.data) for leaf in tensors.values()):
        return
    findings = [
        Finding(f"the data at {path_text(path)} is {problem}", leaf.key, remedy=remedy)
        for path, leaf in tensors.items()
        if leaf.data is not None
        for problem, remedy in without_values(leaf.data)
    ]
    _refuse("the data of some shards cannot be stored", findings)


def without_values(tensor: torch.Tensor) -> list[tuple[str, str]]:
    """Why a tensor has no dense values to write, with a remedy; empty if it has."""
    if tensor.is_meta:
        return [("on the meta device", "Materialise it, for example with to_empty() and a load.")]
    if tensor.is_nested:
        return [("a nested tensor", "Save its values and its offsets, or a padded tensor.")]
    if tensor.layout is not torch.strided:
        remedy = "Save its indices and values, or to_dense()."
        return [(f"a tensor of layout {tensor.layout}", remedy)]
    return []


def warn_of_large_tensors(common: Mapping[Any, Any]) -> None:
    """Log a warning if the tensors in the common state are so large that they should be sharded."""
    tensors = {
        id(found.value): found
        for found in walk(common)
        if isinstance(found.value, torch.Tensor) and found.value.layout is torch.strided
    }
    num_bytes = sum(found.value.nbytes for found in tensors.values())
    if num_bytes <= LARGE_BYTES:
        return
    largest = max(tensors.values(), key=lambda found: int(found.value.nbytes))
    logger.warning(
        "the common state holds %s of tensors; the largest is %s (%s). Rank 0 writes all of it, "
        "and every rank reads all of it. Wrap tensors that are sharded or large:\n"
        "    from dist_checkpointing.interop import shard_state_dict\n"
        "    save(shard_state_dict(state_dict), path)\n"
        "    load(shard_state_dict(state_dict), path)",
        bytes_text(num_bytes),
        path_text(largest.path),
        bytes_text(largest.value.nbytes),
    )
