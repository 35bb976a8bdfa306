"""A state dict taken apart: tensors, objects, common state, local values; and how to rebuild it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_checkpointing.errors import Finding, InvalidShardingError, StateMismatchError
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from dist_checkpointing.mapping.nesting import (
    MISSING,
    DictKey,
    Path,
    Position,
    Skeleton,
    containers_with,
    flatten,
    overlay,
    path_text,
    unflatten,
    unflatten_part,
)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The parts of one state dict, which itself is not changed.

    Attributes:
        tensors: the ShardedTensors by path. Those that a factory built have paths below its own.
        objects: the ShardedObjects by path, likewise.
        common: everything else, nested as in the state dict.
        local: the values of LocalNonpersistentObjects by path.
        factories: each factory by path, with the skeleton of what it built.
        skeleton: skeleton of the whole state dict.
    """

    tensors: Mapping[Path, ShardedTensor]
    objects: Mapping[Path, ShardedObject]
    common: dict[Any, Any]
    local: Mapping[Path, Any]
    factories: Mapping[Path, tuple[ShardedTensorFactory, Skeleton | None]]
    skeleton: Skeleton | None

    def rebuild(self, common: dict[Any, Any], loaded: Mapping[Path, Any]) -> Any:
        """The state dict with loaded values: nested like the template, with all of ``common``.

        Args:
            common: the common state of a checkpoint.
            loaded: values for the paths in ``tensors`` and ``objects``. A leaf without a value is
                left out of a dict, and is None in a list.

        Raises:
            StateMismatchError: if template and checkpoint are nested differently.
        """
        values: dict[Path, Any] = {}
        of_factory: dict[Path, dict[Path, Any]] = {path: {} for path in self.factories}
        for path in (*self.tensors, *self.objects):
            target = values
            if of_factory:
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
        return overlay(common, self.skeleton, values)

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
        values = [(step, self._nest(child, (*path, step), leaves)) for step, child in node.entries]
        kept = [(step, value) for step, value in values if value is not MISSING]
        if not kept:
            return MISSING
        if len(kept) == len(values) and isinstance(kept[0][0], Position):
            return [value for _, value in kept]
        return {
            step.key if isinstance(step, DictKey) else step.index: value for step, value in kept
        }


def _is_special(value: object) -> bool:
    # Most leaves are these; the check of an abstract class takes longer.
    return type(value) is ShardedTensor or isinstance(value, ShardedBase | LocalNonpersistentObject)


def partition(state_dict: Mapping[Any, Any]) -> Partition:
    """Take a state dict apart and build its factories.

    Raises:
        InvalidShardingError: if it is not a dict, or holds sharded leaves of an unknown kind.
    """
    if not isinstance(state_dict, dict):
        finding = Finding("not a dict", expected="dict", found=type(state_dict).__name__)
        raise InvalidShardingError("a state dict must be a dict", [finding])
    special = containers_with(state_dict, _is_special)
    leaves, skeleton = flatten(state_dict, only=special)
    tensors: dict[Path, ShardedTensor] = {}
    objects: dict[Path, ShardedObject] = {}
    local: dict[Path, Any] = {}
    plain: dict[Path, Any] = {}
    factories: dict[Path, tuple[ShardedTensorFactory, Skeleton | None]] = {}

    def sort_in(path: Path, leaf: Any, owner: ShardedTensorFactory | None) -> None:
        if isinstance(leaf, ShardedTensor):
            tensors[path] = leaf
        elif isinstance(leaf, ShardedObject):
            objects[path] = leaf
        elif isinstance(leaf, ShardedTensorFactory) and owner is None:
            built, built_skeleton = flatten(leaf.build(), path)
            factories[path] = (leaf, built_skeleton)
            for below, part in built.items():
                sort_in(below, part, leaf)
        elif owner is not None or isinstance(leaf, ShardedBase):
            raise _unknown_leaf(path, leaf, owner)
        elif isinstance(leaf, LocalNonpersistentObject):
            local[path] = leaf.unwrap()
        else:
            plain[path] = leaf

    for path, leaf in leaves.items():
        if type(leaf) is ShardedTensor:
            tensors[path] = leaf
        else:
            sort_in(path, leaf, None)
    common = unflatten_part(skeleton, plain)
    return Partition(
        tensors, objects, {} if common is MISSING else common, local, factories, skeleton
    )


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
