"""Nested dicts, lists and tuples: flattened to paths and leaves, rebuilt, laid over each other.

``flatten`` turns a nest of dicts, lists and tuples into ``{path: leaf}`` and a skeleton. Nothing is
lost: paths keep the type of every step (dict key ``1``, dict key ``"1"`` and list position 1 all
differ), and the skeleton keeps container types, key order and empty containers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from dist_checkpointing.errors import Finding, StateMismatchError


class DictKey(NamedTuple):
    """A step into a dict.

    A tuple, because paths are hashed many times; ``kind`` tells it from the other step.
    """

    key: object
    kind: Literal["key"] = "key"

    def __str__(self) -> str:
        return f"[{self.key!r}]"


class Position(NamedTuple):
    """A step into a list or tuple."""

    index: int  # type: ignore[assignment]
    kind: Literal["position"] = "position"

    def __str__(self) -> str:
        return f"[{self.index}]"


Step = DictKey | Position
Path = tuple[Step, ...]
MISSING: Final = object()
"""Stands for a leaf without a value."""
NO_LEAF: Final = object()
"""Stands where ``overlay`` has nothing to put."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """The structure of one container.

    Attributes:
        prototype: An empty container of its kind; for a tuple, which cannot be filled, its class.
        keys: The keys of a dict, in order; the positions of a list or tuple.
        below: Number of each entry that is a container -> its skeleton. The others are leaves.
        num_leaves: Leaves at any depth.
    """

    prototype: Any
    keys: Sequence[Any]
    below: Mapping[int, Skeleton]
    num_leaves: int

    @property
    def is_tuple(self) -> bool:
        """Whether the container is a tuple or named tuple."""
        return isinstance(self.prototype, type)

    @property
    def is_dict(self) -> bool:
        return isinstance(self.prototype, dict)

    def step(self, number: int) -> Step:
        return DictKey(self.keys[number]) if self.is_dict else Position(number)

    def fill(self, values: Sequence[Any]) -> Any:
        """A new container of this kind with a value for each entry."""
        if self.is_dict:
            return self.fill_dict(self.keys, values)
        if self.is_tuple:
            return getattr(self.prototype, "_make", tuple)(values)
        container = copy.copy(self.prototype)
        container.extend(values)
        return container

    def fill_dict(self, keys: Sequence[Any], values: Sequence[Any]) -> Any:
        if type(self.prototype) is dict:
            return dict(zip(keys, values, strict=True))
        container = copy.copy(self.prototype)
        for key, value in zip(keys, values, strict=True):  # not update(): a Counter would add
            container[key] = value
        return container


def path_text(path: Path) -> str:
    """The path as Python code: ``state_dict['a'][0]``."""
    return "state_dict" + "".join(map(str, path))


def is_container(value: object) -> bool:
    """Whether this is a dict or list of any class, a tuple or a named tuple.

    Other subclasses of tuple, such as ``torch.Size`` and struct sequences, are single values.
    """
    return _holds_values(type(value))


def _holds_values(kind: type) -> bool:
    if issubclass(kind, (dict, list)):
        return True
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _empty_copy(container: Any) -> Any:
    if isinstance(container, tuple):
        return type(container)
    if type(container) in (dict, list):
        return type(container)()
    # A subclass may have attributes (a defaultdict has one): copy it, then empty the copy.
    empty = copy.copy(container)
    empty.clear()
    return empty


def take_apart(
    tree: object, wanted: Callable[[object], bool] | None = None
) -> tuple[list[Any], Skeleton | None]:
    """All leaves, in order, and the skeleton (None if ``tree`` itself is a leaf).

    With ``wanted``, a container without such a leaf at any depth counts as a leaf itself.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(tree, wanted, leaves)


def _take_apart(
    value: Any, wanted: Callable[[object], bool] | None, leaves: list[Any]
) -> Skeleton | None:
    if not is_container(value):
        leaves.append(value)
        return None
    children = list(value.values() if isinstance(value, dict) else value)
    kinds = set(filter(_holds_values, set(map(type, children))))
    before = len(leaves)
    below: dict[int, Skeleton] = {}
    if not kinds:
        leaves += children
    else:
        for number, child in enumerate(children):
            if type(child) not in kinds:
                leaves.append(child)
            elif (skeleton := _take_apart(child, wanted, leaves)) is not None:
                below[number] = skeleton
    if wanted is not None and not any(map(wanted, leaves[before:])):
        leaves[before:] = [value]
        return None
    keys = tuple(value) if isinstance(value, dict) else range(len(children))
    return Skeleton(_empty_copy(value), keys, below, len(leaves) - before)


def paths_of(skeleton: Skeleton | None, prefix: Path = ()) -> Iterator[Path]:
    """The path of each leaf, in order."""
    if skeleton is None:
        yield prefix
        return
    kind = DictKey if skeleton.is_dict else Position
    for number, key in enumerate(skeleton.keys):
        path = (*prefix, kind(key))
        if number in skeleton.below:
            yield from paths_of(skeleton.below[number], path)
        else:
            yield path


def flatten(
    tree: object, prefix: Path = (), *, wanted: Callable[[object], bool] | None = None
) -> tuple[dict[Path, Any], Skeleton | None]:
    """The same as ``take_apart``, with leaves by path; every path begins with ``prefix``."""
    leaves, skeleton = take_apart(tree, wanted)
    return dict(zip(paths_of(skeleton, prefix), leaves, strict=True)), skeleton


class AtPaths(Mapping[Path, T], Generic[T]):
    """Some leaves of a tree by path, in order; paths are made when one is first asked for.

    ``places`` are their positions among all leaves of the tree.
    """

    def __init__(
        self, leaves: Sequence[T], skeleton: Skeleton | None, places: Sequence[int]
    ) -> None:
        self.leaves = leaves
        self.skeleton = skeleton
        self.places = places

    @cached_property
    def _by_path(self) -> dict[Path, T]:
        paths = list(paths_of(self.skeleton))
        return {paths[place]: leaf for place, leaf in zip(self.places, self.leaves, strict=True)}

    def __getitem__(self, path: Path) -> T:
        return self._by_path[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self.leaves)

    def values(self) -> ValuesView[T]:
        return _Leaves(self)

    def replaced(self, leaves: Sequence[Any]) -> AtPaths[Any]:
        return AtPaths(leaves, self.skeleton, self.places)

    def aligned(self, other: Mapping[Path, Any]) -> Sequence[Any]:
        """The leaves that another mapping has at these paths; MISSING where it has none."""
        if isinstance(other, AtPaths) and other.places is self.places:
            return other.leaves
        return [other.get(path, MISSING) for path in self] if other else [MISSING] * len(self)


def chained(one: Mapping[Path, T], other: Mapping[Path, T]) -> Mapping[Path, T]:
    """The leaves of one mapping, then those of another one."""
    if not other:
        return one
    if isinstance(one, AtPaths) and isinstance(other, AtPaths):
        places = [*one.places, *other.places]
        return AtPaths([*one.leaves, *other.leaves], one.skeleton, places)
    return {**one, **other}


class _Leaves(ValuesView[T]):
    _mapping: AtPaths[T]

    def __iter__(self) -> Iterator[T]:
        return iter(self._mapping.leaves)


def value_at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step.key if isinstance(step, DictKey) else step.index]
    return tree


def unflatten(skeleton: Skeleton | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """The inverse of ``flatten``; ``leaves`` must have every leaf."""
    return _assembled(skeleton, map(leaves.__getitem__, paths_of(skeleton, prefix)))


def _assembled(node: Skeleton | None, leaves: Iterator[Any]) -> Any:
    if node is None:
        return next(leaves)
    return node.fill(_entries(node, leaves, _assembled))


def _entries(
    node: Skeleton, leaves: Iterator[Any], make: Callable[[Skeleton | None, Iterator[Any]], Any]
) -> list[Any]:
    """A value for each entry of a container, of the next leaves."""
    if not node.below:
        return list(islice(leaves, node.num_leaves))
    return [make(node.below.get(number), leaves) for number in range(len(node.keys))]


def unflatten_part(skeleton: Skeleton | None, leaves: Mapping[Path, Any]) -> Any:
    """The tree with only the given leaves, or MISSING if nothing is left of it.

    A dict loses the keys of absent leaves. In a list or tuple, None replaces an absent leaf, so
    that the others keep their positions. Containers that were empty from the start are kept.
    """
    return part_of(skeleton, (leaves.get(path, MISSING) for path in paths_of(skeleton)))


def part_of(skeleton: Skeleton | None, leaves: Iterator[Any]) -> Any:
    """The same as ``unflatten_part``, of all leaves in order; absent ones are MISSING."""
    if skeleton is None:
        return next(leaves)
    values = _entries(skeleton, leaves, part_of)
    absent = [number for number, value in enumerate(values) if value is MISSING]
    if values and len(absent) == len(values):
        return MISSING
    if not absent:
        return skeleton.fill(values)
    if skeleton.is_dict:
        kept = [n for n, value in enumerate(values) if value is not MISSING]
        return skeleton.fill_dict([skeleton.keys[n] for n in kept], [values[n] for n in kept])
    for number in absent:
        values[number] = None
    # Not a named tuple: its fields would have values of a wrong type.
    return tuple(values) if skeleton.is_tuple else skeleton.fill(values)


def overlay(base: Any, skeleton: Skeleton | None, values: Sequence[Any], path: Path = ()) -> Any:
    """``base`` with a value put in for each leaf, in order; NO_LEAF for what is not put in.

    The base is a tree that ``unflatten_part`` made, or an older writer, which left no None in
    lists. A leaf that is MISSING keeps its position, but has no value.

    Raises:
        StateMismatchError: if ``base`` has a value at the path of a leaf.
    """
    if skeleton is None:
        return _overlay_leaf(base, values[0], path)
    if all(value is NO_LEAF for value in values):
        return base
    if base is MISSING or base is None:
        base = {} if skeleton.is_dict else ()
    if skeleton.is_dict:
        return _overlay_dict(base, skeleton, values, path)
    return _overlay_sequence(base, skeleton, values, path)


def _overlay_leaf(base: Any, value: Any, path: Path) -> Any:
    if value is NO_LEAF:
        return base
    if base is MISSING or base is None:
        return value
    if value is MISSING:
        return base
    raise _conflict(path, "a wrapped leaf", base)


def _parts(
    node: Skeleton, values: Sequence[Any]
) -> Iterator[tuple[Skeleton | None, Sequence[Any]]]:
    """The skeleton and the leaves of each entry."""
    place = 0
    for number in range(len(node.keys)):
        child = node.below.get(number)
        end = place + (1 if child is None else child.num_leaves)
        yield child, values[place:end]
        place = end


def _overlay_dict(base: Any, node: Skeleton, values: Sequence[Any], path: Path) -> Any:
    if not isinstance(base, dict):
        raise _conflict(path, "a dict", base)
    if not base and not node.below and all(v is not MISSING and v is not NO_LEAF for v in values):
        return node.fill(values)
    found: dict[Any, Any] = {}
    for key, (child, own) in zip(node.keys, _parts(node, values), strict=True):
        below = base.get(key, MISSING)
        if child is None and below is MISSING:
            value = MISSING if own[0] is NO_LEAF else own[0]
        else:
            value = overlay(below, child, own, (*path, DictKey(key)))
        if value is not MISSING:
            found[key] = value
    known = set(node.keys)
    found.update((key, value) for key, value in base.items() if key not in known)
    return node.fill_dict([*found], [*found.values()])


def _overlay_sequence(base: Any, node: Skeleton, values: Sequence[Any], path: Path) -> Any:
    if not isinstance(base, list | tuple):
        raise _conflict(path, "a list", base)
    parts = list(_parts(node, values))
    plain = [index for index, part in enumerate(parts) if _leaves_something(*part)]
    below_at: dict[int, Any] = {}
    if len(base) == len(parts):
        below_at = dict(enumerate(base))
    elif len(base) == len(plain):  # the writer left no None for sharded leaves
        below_at = dict(zip(plain, base, strict=True))
    else:
        expected = f"{len(plain)} plain values among {len(parts)} entries"
        raise _conflict(path, expected, f"{len(base)} entries")
    found = [
        overlay(below_at.get(i, MISSING), child, own, (*path, Position(i)))
        for i, (child, own) in enumerate(parts)
    ]
    # A leaf without a value must keep its position, or the others would move up.
    return node.fill([None if value is MISSING else value for value in found])


def _leaves_something(node: Skeleton | None, values: Sequence[Any]) -> bool:
    """Whether anything is left of this part of the tree without the values."""
    if node is None:
        return values[0] is NO_LEAF
    if not node.keys:
        return True
    return any(_leaves_something(*part) for part in _parts(node, values))


def _conflict(path: Path, expected: str, found: object) -> StateMismatchError:
    text = repr(found) if isinstance(found, str) else type(found).__name__
    finding = Finding(
        problem=f"{path_text(path)} does not fit the checkpoint's common state",
        expected=f"{expected} (template)",
        found=f"{text} (checkpoint)",
        remedy="Nest the template as the saved state dict was nested.",
    )
    return StateMismatchError("template and checkpoint are nested differently", [finding])
