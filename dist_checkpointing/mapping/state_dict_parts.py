"""A state dict taken apart: tensors, objects, common state, local values; and how to rebuild it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

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
    Structure,
    overlay,
    part_of,
    path_text,
    paths_of,
    take_apart,
)

Leaf = TypeVar("Leaf")


class BuiltFactory(NamedTuple):
    """A factory, the structure of what it built, and the number of the first leaf of that."""

    factory: ShardedTensorFactory
    structure: Structure | None
    first: int


STATE_REMEDY: Final = 'Pass {"model": model.state_dict()}, or interop.TorchState(model, optimizer).'


@dataclass(frozen=True, slots=True, eq=False)
class StateDictParts:
    """The parts of one state dict, which itself is not changed.

    ``tensors`` and ``objects`` are the sharded leaves; those that a factory built have paths below
    that of the factory. ``common`` is everything else, nested as in the state dict. ``local`` are
    the values of LocalNonpersistentObjects. ``structure`` is that of the whole; ``built`` is the
    same with what the ``factories``, in the order of the leaves, built in their place.
    """

    tensors: AtPaths[ShardedTensor]
    objects: AtPaths[ShardedObject]
    common: dict[Any, Any]
    local: AtPaths[Any]
    structure: Structure | None
    built: Structure | None
    factories: Sequence[BuiltFactory]

    @classmethod
    def of(cls, state_dict: Mapping[Any, Any]) -> StateDictParts:
        """Take a state dict apart and build its factories.

        InvalidShardingError if it is not a dict, or holds sharded leaves of an unknown kind.
        """
        if not isinstance(state_dict, dict):
            found = type(state_dict).__name__
            finding = Finding("not a dict", None, "dict", found, remedy=STATE_REMEDY)
            raise InvalidShardingError("sharded_state_dict must be a dict", [finding])
        given: list[Any] = []
        try:
            structure = take_apart(state_dict, given, _is_special)
        except RecursionError:
            problem = "its dicts and lists are nested too deeply, or one of them holds itself"
            finding = Finding(problem, remedy="Flatten them.")
            message = "sharded_state_dict cannot be taken apart"
            raise InvalidShardingError(message, [finding]) from None
        types = set(map(type, given))
        leaves, built, factories = given, structure, list[BuiltFactory]()
        if structure is not None and any(issubclass(kind, ShardedTensorFactory) for kind in types):
            leaves, built, factories = _build_factories(given, structure)
        common: Any = MISSING
        if not all(issubclass(kind, _SPECIAL) for kind in types):
            common = part_of(structure, (MISSING if _is_special(leaf) else leaf for leaf in given))
        types = set(map(type, leaves)) if factories else types
        for kind in types:
            if issubclass(kind, ShardedBase) and not issubclass(kind, _SAVED):
                number = [*map(type, leaves)].index(kind)
                where = path_text([*paths_of(built)][number])
                finding = Finding(f"unknown kind of sharded leaf at {where}", found=kind.__name__)
                raise InvalidShardingError("the sharded state dict is invalid", [finding])

        def at_paths(kind: type[Leaf]) -> AtPaths[Leaf]:
            of_kind = {found for found in types if issubclass(found, kind)}
            numbers: Sequence[int] = ()
            if of_kind == types:
                numbers = range(len(leaves))
            elif of_kind:
                numbers = [n for n, leaf in enumerate(leaves) if type(leaf) in of_kind]
            return AtPaths([leaves[number] for number in numbers], built, numbers)

        local = at_paths(LocalNonpersistentObject)
        return cls(
            at_paths(ShardedTensor),
            at_paths(ShardedObject),
            {} if common is MISSING else common,
            local.replaced([wrapped.unwrap() for wrapped in local.leaves]),
            structure,
            built,
            factories,
        )

    def rebuild(
        self, common: Mapping[Any, Any], tensors: Mapping[Path, Any], objects: Mapping[Path, Any]
    ) -> Any:
        """The state dict with loaded values: nested like the template, with all of ``common``.

        A leaf without a value is left out of a dict, and is None in a list. StateMismatchError if
        template and checkpoint are nested differently.
        """
        values = [NO_LEAF] * (1 if self.built is None else self.built.num_leaves)
        pairs = ((self.tensors, tensors), (self.objects, objects), (self.local, self.local))
        for of_kind, loaded in pairs:
            for place, value in zip(of_kind.places, of_kind.aligned(loaded), strict=True):
                values[place] = value
        for factory, built, first in reversed(self.factories):
            end = first + (1 if built is None else built.num_leaves)
            parts, merged = values[first:end], NO_LEAF
            if any(part is not MISSING for part in parts):
                self._require_all(values, first, end)
                merged = factory.merge_fn(part_of(built, iter(parts)))
            elif parts:
                merged = MISSING
            values[first:end] = [merged]
        return overlay(common, self.structure, values)

    def _require_all(self, values: Sequence[Any], first: int, end: int) -> None:
        """Refuse a factory of which some parts, but not all, are in the checkpoint."""
        findings = [
            Finding(
                "not in the checkpoint, but other parts of the same factory are",
                leaf.key,
                remedy="merge_fn needs all parts: correct the factory or leave it out.",
            )
            for of_kind in (self.tensors, self.objects)
            for place, leaf in zip(of_kind.places, of_kind.leaves, strict=True)
            if first <= place < end and values[place] is MISSING
        ]
        StateMismatchError.raise_if(findings, "a factory cannot be merged")

    def nested(self, leaves: Mapping[Path, ShardedBase]) -> dict[Any, Any]:
        """Some of the sharded leaves, nested as in the state dict, for strategies that need a dict.

        A list or tuple without all of its entries becomes a dict with positions as keys, so that
        ``value_at`` finds every path. What a factory built is at the path of the factory.
        """
        if not leaves:
            return {}
        tree = _nested(self.built, (leaves.get(path, MISSING) for path in paths_of(self.built)))
        return {} if tree is MISSING else tree


def with_leaves(common: Mapping[Any, Any], leaves: Sequence[ShardedBase]) -> dict[Any, Any]:
    """A state dict of this common state, and sharded leaves under a key of their own.

    A dict that holds nothing but sharded leaves leaves no trace in the common state.
    """
    free_key = next(name for name in map(str, range(len(common) + 1)) if name not in common)
    return {**common, free_key: dict(enumerate(leaves))} if leaves else dict(common)


_SAVED = (ShardedTensor, ShardedObject)
_SPECIAL = (ShardedBase, LocalNonpersistentObject)


def _is_special(value: object) -> bool:
    # Most leaves are these; the check of an abstract class takes longer.
    return type(value) is ShardedTensor or isinstance(value, _SPECIAL)


def _build_factories(
    given: Sequence[Any], structure: Structure
) -> tuple[list[Any], Structure, list[BuiltFactory]]:
    """The leaves and the structure with what factories build."""
    leaves: list[Any] = []
    below: list[Structure | None] = []
    factories: list[BuiltFactory] = []
    for number, leaf in enumerate(given):
        below.append(None)
        if not isinstance(leaf, ShardedTensorFactory):
            leaves.append(leaf)
            continue
        first = len(leaves)
        below[-1] = take_apart(leaf.build(), leaves)
        factories.append(BuiltFactory(leaf, below[-1], first))
        for part, built in enumerate(leaves[first:]):
            if not isinstance(built, _SAVED):
                path = [*paths_of(structure)][number] + [*paths_of(below[-1])][part]
                problem = (
                    f"build_fn of the factory at {path_text(path)} must return ShardedTensors and "
                    "ShardedObjects"
                )
                finding = Finding(problem, leaf.key, found=type(built).__name__)
                raise InvalidShardingError("the sharded state dict is invalid", [finding])
    return leaves, structure.with_leaves(iter(below)), factories


def _nested(node: Structure | None, values: Iterator[Any]) -> Any:
    if node is None:
        return next(values)
    children = [_nested(node.below.get(number), values) for number in range(len(node.keys))]
    kept = {k: v for k, v in zip(node.keys, children, strict=True) if v is not MISSING}
    if not kept:
        return MISSING
    return children if len(kept) == len(children) and not node.is_dict else kept
