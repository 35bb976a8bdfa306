"""A state dict taken apart: tensors, objects, common state, local values; and how to rebuild it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_checkpointing.mapping.nested_dicts import (
    MISSING,
    NO_LEAF,
    AtPaths,
    Path,
    Skeleton,
    flatten,
    overlay,
    part_of,
    path_text,
    paths_of,
    take_apart,
    unflatten,
)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The parts of one state dict, which itself is not changed.

    Attributes:
        tensors: The ShardedTensors by path. Those that a factory built have paths below its own.
        objects: The ShardedObjects by path, likewise.
        common: Everything else, nested as in the state dict.
        local: The values of LocalNonpersistentObjects by path.
        factories: Each factory by path, with the skeleton of what it built.
        skeleton: Skeleton of the whole state dict.
    """

    tensors: Mapping[Path, ShardedTensor]
    objects: Mapping[Path, ShardedObject]
    common: dict[Any, Any]
    local: Mapping[Path, Any]
    factories: Mapping[Path, tuple[ShardedTensorFactory, Skeleton | None]]
    skeleton: Skeleton | None

    def rebuild(
        self, common: dict[Any, Any], tensors: Mapping[Path, Any], objects: Mapping[Path, Any]
    ) -> Any:
        """The state dict with loaded values: nested like the template, with all of ``common``.

        A leaf without a value is left out of a dict, and is None in a list.

        Raises:
            StateMismatchError: if template and checkpoint are nested differently.
        """
        if self.factories:
            return self._rebuild_factories(common, {**tensors, **objects})
        count = 1 if self.skeleton is None else self.skeleton.num_leaves
        values = [NO_LEAF] * count
        pairs = ((self.tensors, tensors), (self.objects, objects), (self.local, self.local))
        for own, loaded in pairs:
            assert isinstance(own, AtPaths)
            for place, value in zip(own.places, own.aligned(loaded), strict=True):
                values[place] = value
        return overlay(common, self.skeleton, values)

    def _rebuild_factories(self, common: dict[Any, Any], loaded: Mapping[Path, Any]) -> Any:
        values: dict[Path, Any] = {}
        of_factory: dict[Path, dict[Path, Any]] = {path: {} for path in self.factories}
        for path in (*self.tensors, *self.objects):
            owners = (path[:depth] for depth in range(len(path) + 1))
            target = next((of_factory[o] for o in owners if o in of_factory), values)
            target[path] = loaded.get(path, MISSING)
        for path, parts in of_factory.items():
            if any(part is not MISSING for part in parts.values()):
                self._require_all(parts)
                factory, built = self.factories[path]
                values[path] = factory.merge_fn(unflatten(built, parts, path))
            elif parts:
                values[path] = MISSING
        values.update(self.local)
        at_paths = [values.get(path, NO_LEAF) for path in paths_of(self.skeleton)]
        return overlay(common, self.skeleton, at_paths)

    def _require_all(self, parts: Mapping[Path, Any]) -> None:
        leaves: dict[Path, ShardedBase] = {**self.tensors, **self.objects}
        findings = [
            Finding(
                "not in the checkpoint, but other parts of the same factory are",
                leaves[path].key,
                remedy="merge_fn needs all parts: correct the factory or leave it out.",
            )
            for path, part in parts.items()
            if part is MISSING
        ]
        if findings:
            raise StateMismatchError("a factory cannot be merged", findings)

    def nested(self, leaves: Mapping[Path, ShardedBase]) -> dict[Any, Any]:
        """Some of the sharded leaves, nested as in the state dict, for strategies that need a dict.

        A list or tuple without all of its entries becomes a dict with positions as keys, so that
        ``value_at`` finds every path. What a factory built is at the path of the factory.
        """
        if not leaves:
            return {}
        tree = self._nest(self.skeleton, (), leaves)
        return {} if tree is MISSING else tree

    def _nest(self, node: Skeleton | None, path: Path, leaves: Mapping[Path, ShardedBase]) -> Any:
        if node is None and path in self.factories:
            node = self.factories[path][1]
        if node is None:
            return leaves.get(path, MISSING)
        values = [
            self._nest(node.below.get(number), (*path, node.step(number)), leaves)
            for number in range(len(node.keys))
        ]
        pairs = zip(node.keys, values, strict=True)
        kept = {key: value for key, value in pairs if value is not MISSING}
        if not kept:
            return MISSING
        return values if len(kept) == len(values) and not node.is_dict else kept


_KINDS = (ShardedTensor, ShardedObject, LocalNonpersistentObject, ShardedTensorFactory)


def _is_special(value: object) -> bool:
    # Most leaves are these; the check of an abstract class takes longer.
    return type(value) is ShardedTensor or isinstance(value, ShardedBase | LocalNonpersistentObject)


def partition(state_dict: Mapping[Any, Any]) -> Partition:
    """Take a state dict apart and build its factories.

    Raises:
        InvalidShardingError: if it is not a dict, or holds sharded leaves of an unknown kind.
    """
    if not isinstance(state_dict, dict):
        finding = Finding(
            "not a dict",
            expected="dict",
            found=type(state_dict).__name__,
            remedy='Pass {"model": model.state_dict()}, or interop.TorchState(model, optimizer).',
        )
        raise InvalidShardingError("sharded_state_dict must be a dict", [finding])
    try:
        leaves, skeleton = take_apart(state_dict, _is_special)
    except RecursionError:
        finding = Finding(
            "its dicts and lists are nested too deeply, or one of them holds itself",
            remedy="Flatten them.",
        )
        raise InvalidShardingError("sharded_state_dict cannot be taken apart", [finding]) from None
    common, places = _sorted(leaves, skeleton)
    tensors, objects, local, factories = (
        AtPaths([leaves[place] for place in own], skeleton, own) for own in places
    )
    values = local.replaced([wrapped.unwrap() for wrapped in local.leaves])
    parts = Partition(tensors, objects, common, values, {}, skeleton)
    return _with_factories(parts, leaves, factories) if factories else parts


def _sorted(leaves: Sequence[Any], skeleton: Skeleton | None) -> tuple[Any, list[Sequence[int]]]:
    """The common state; positions of tensors, objects, local values and factories."""
    if {ShardedTensor}.issuperset(map(type, leaves)):
        common = part_of(skeleton, itertools.repeat(MISSING))
        return {} if common is MISSING else common, [range(len(leaves)), (), (), ()]
    places: list[list[int]] = [[] for _ in _KINDS]
    plain = list(leaves)
    for place, leaf in enumerate(leaves):
        for kind, own in zip(_KINDS, places, strict=True):
            if isinstance(leaf, kind):
                own.append(place)
                plain[place] = MISSING
                break
        else:
            if isinstance(leaf, ShardedBase):
                raise _unknown_leaf(list(paths_of(skeleton))[place], leaf, None)
    common = part_of(skeleton, iter(plain))
    return {} if common is MISSING else common, [*places]


def _with_factories(
    parts: Partition, leaves: Sequence[Any], factories: Mapping[Path, ShardedTensorFactory]
) -> Partition:
    """The same with what factories build, in the order of the leaves."""
    tensors: dict[Path, ShardedTensor] = {}
    objects: dict[Path, ShardedObject] = {}
    built: dict[Path, tuple[ShardedTensorFactory, Skeleton | None]] = {}
    for path, leaf in zip(paths_of(parts.skeleton), leaves, strict=True):
        found, owner = {path: leaf}, None
        if path in factories:
            owner = factories[path]
            found, skeleton = flatten(owner.build(), path)
            built[path] = (owner, skeleton)
        for below, part in found.items():
            if isinstance(part, ShardedTensor):
                tensors[below] = part
            elif isinstance(part, ShardedObject):
                objects[below] = part
            elif owner is not None:
                raise _unknown_leaf(below, part, owner)
    return replace(parts, tensors=tensors, objects=objects, factories=built)


def _unknown_leaf(
    path: Path, leaf: object, owner: ShardedTensorFactory | None
) -> InvalidShardingError:
    where = path_text(path)
    if owner is not None:
        finding = Finding(
            f"build_fn of the factory at {where} must return ShardedTensors and ShardedObjects",
            owner.key,
            found=type(leaf).__name__,
        )
    else:
        finding = Finding(f"unknown kind of sharded leaf at {where}", found=type(leaf).__name__)
    return InvalidShardingError("the sharded state dict is invalid", [finding])
