"""Nested dicts, lists and tuples: flattened to paths and leaves, rebuilt, laid over each other.

``flatten`` turns a nest of dicts, lists and tuples into ``{path: leaf}`` and a structure. Nothing
is lost: paths keep the type of every step (dict key ``1``, dict key ``"1"`` and list position 1 all
differ), and the structure keeps container types, key order and empty containers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
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
class Structure:
    """The structure of one container: ``prototype`` is an empty one of its kind; for a tuple, which
    cannot be filled, its class. ``keys`` are those of a dict, in order, or the positions in a list
    or tuple. ``below`` has the structure of each entry that is a container, by its number; the
    others are leaves. ``num_leaves`` counts those at any depth.
    """

    prototype: Any
    keys: Sequence[Any]
    below: Mapping[int, Structure]
    num_leaves: int

    @property
    def is_dict(self) -> bool:
        return isinstance(self.prototype, dict)

    def fill(self, values: Sequence[Any], keys: Sequence[Any] | None = None) -> Any:
        """A new container of this kind with a value for each entry, or for some keys of a dict."""
        if isinstance(self.prototype, type):
            return getattr(self.prototype, "_make", tuple)(values)
        pairs = zip(self.keys if keys is None else keys, values, strict=True)
        if type(self.prototype) is dict:
            return dict(pairs)
        container = copy.copy(self.prototype)
        if not self.is_dict:
            container.extend(values)
            return container
        for key, value in pairs:  # not update(): a Counter would add
            container[key] = value
        return container

    def with_leaves(self, below: Iterator[Structure | None]) -> Structure:
        """The same with each leaf, in order, replaced by a tree; None keeps a leaf."""
        children = {}
        for number in range(len(self.keys)):
            old = self.below.get(number)
            new = next(below) if old is None else old.with_leaves(below)
            if new is not None:
                children[number] = new
        num_leaves = len(self.keys) - len(children) + sum(c.num_leaves for c in children.values())
        return replace(self, below=children, num_leaves=num_leaves)


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
    tree: Any, leaves: list[Any], wanted: Callable[[object], bool] | None = None
) -> Structure | None:
    """Append all leaves, in order; the structure, or None if the tree itself is a leaf.

    With ``wanted``, a container without such a leaf at any depth counts as a leaf itself.
    """
    if not is_container(tree):
        leaves.append(tree)
        return None
    children = list(tree.values() if isinstance(tree, dict) else tree)
    kinds = set(filter(_holds_values, set(map(type, children))))
    before = len(leaves)
    below: dict[int, Structure] = {}
    if not kinds:
        leaves += children
    else:
        for number, child in enumerate(children):
            if type(child) not in kinds:
                leaves.append(child)
            elif (structure := take_apart(child, leaves, wanted)) is not None:
                below[number] = structure
    if wanted is not None and not any(map(wanted, leaves[before:])):
        leaves[before:] = [tree]
        return None
    keys = tuple(tree) if isinstance(tree, dict) else range(len(children))
    return Structure(_empty_copy(tree), keys, below, len(leaves) - before)


def paths_of(structure: Structure | None, prefix: Path = ()) -> Iterator[Path]:
    """The path of each leaf, in order."""
    if structure is None:
        yield prefix
        return
    kind = DictKey if structure.is_dict else Position
    for number, key in enumerate(structure.keys):
        path = (*prefix, kind(key))
        if number in structure.below:
            yield from paths_of(structure.below[number], path)
        else:
            yield path


def flatten(
    tree: object, *, wanted: Callable[[object], bool] | None = None
) -> tuple[dict[Path, Any], Structure | None]:
    """The leaves by path and the structure; ``wanted`` is that of ``take_apart``."""
    leaves: list[Any] = []
    structure = take_apart(tree, leaves, wanted)
    return dict(zip(paths_of(structure), leaves, strict=True)), structure


class AtPaths(Mapping[Path, T], Generic[T]):
    """Some leaves of a tree by path, in order; paths are made when one is first asked for.

    ``places`` are their positions among all leaves of the tree.
    """

    def __init__(
        self, leaves: Sequence[T], structure: Structure | None, places: Sequence[int]
    ) -> None:
        self.leaves = leaves
        self.structure = structure
        self.places = places

    @cached_property
    def _by_path(self) -> dict[Path, T]:
        paths = list(paths_of(self.structure)) if self.leaves else []
        return {paths[place]: leaf for place, leaf in zip(self.places, self.leaves, strict=True)}

    def __getitem__(self, path: Path) -> T:
        return self._by_path[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self.leaves)

    def values(self) -> ValuesView[T]:
        return self.leaves  # type: ignore[return-value]  # no view, which would be slower

    def replaced(self, leaves: Sequence[Any]) -> AtPaths[Any]:
        return AtPaths(leaves, self.structure, self.places)

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
        return AtPaths([*one.leaves, *other.leaves], one.structure, [*one.places, *other.places])
    return {**one, **other}


def value_at(tree: Any, path: Path) -> Any:
    for step, _ in path:
        tree = tree[step]
    return tree


def put_at(tree: Any, path: Path, value: object) -> None:
    """Put a value in place of the one at a path of a dict or list, also into tuples in it."""
    *above, last = path
    container = value_at(tree, tuple(above))
    if isinstance(container, tuple):
        values = [value if n == last[0] else known for n, known in enumerate(container)]
        put_at(tree, tuple(above), getattr(type(container), "_make", tuple)(values))
    else:
        container[last[0]] = value


def unflatten(structure: Structure | None, leaves: Mapping[Path, Any]) -> Any:
    """The inverse of ``flatten``; ``leaves`` must have every leaf."""
    return part_of(structure, map(leaves.__getitem__, paths_of(structure)))


def mapped(tree: object, change: Callable[[Any], Any]) -> Any:
    """The tree with what a function makes of each leaf, in order; ``{}`` if all become MISSING."""
    leaves: list[Any] = []
    part = part_of(take_apart(tree, leaves), map(change, leaves))
    return {} if part is MISSING else part


def part_of(structure: Structure | None, leaves: Iterator[Any]) -> Any:
    """The tree of all leaves in order, without those that are MISSING; MISSING if none is left.

    A dict loses the keys of absent leaves. In a list or tuple, None replaces an absent leaf, so
    that the others keep their positions. Containers that were empty from the start are kept.
    """
    if structure is None:
        return next(leaves)
    below, count = structure.below, len(structure.keys)
    if below:
        values = [part_of(below.get(number), leaves) for number in range(count)]
    else:
        values = list(islice(leaves, count))
    kept = [number for number, value in enumerate(values) if value is not MISSING]
    if len(kept) == count:
        return structure.fill(values)
    if not kept:
        return MISSING
    if structure.is_dict:
        return structure.fill([values[n] for n in kept], [structure.keys[n] for n in kept])
    values = [None if value is MISSING else value for value in values]
    # Not a named tuple: its fields would have values of a wrong type.
    return tuple(values) if isinstance(structure.prototype, type) else structure.fill(values)


def overlay(base: Any, structure: Structure | None, values: Sequence[Any], path: Path = ()) -> Any:
    """``base`` with a value put in for each leaf, in order; NO_LEAF for what is not put in.

    The base is a tree that ``part_of`` made, or an older writer, which left no None in lists. A
    leaf that is MISSING keeps its position, but has no value. StateMismatchError if ``base`` has a
    value at the path of a leaf.
    """
    if all(value is NO_LEAF for value in values):
        return base
    is_absent = base is MISSING or base is None
    if structure is None:
        if is_absent or values[0] is MISSING:
            return values[0] if is_absent else base
        raise _conflict(path, "a wrapped leaf", base)
    if is_absent:
        base = {} if structure.is_dict else ()
    known = _entries_of_base(base, structure, values, path)
    is_flat = not known and not structure.below
    if is_flat and all(v is not MISSING and v is not NO_LEAF for v in values):
        return structure.fill(values)
    merged: dict[Any, Any] = {}
    kind = DictKey if structure.is_dict else Position
    for number, child, below in _entries(structure, values):
        value = known.pop(key := structure.keys[number], MISSING)
        if child is None and value is MISSING:
            value = MISSING if below[0] is NO_LEAF else below[0]
        else:
            value = overlay(value, child, below, (*path, kind(key)))
        if value is not MISSING:
            merged[key] = value
        elif not structure.is_dict:
            # A leaf without a value must keep its position, or the others would move up.
            merged[key] = None
    merged |= known
    return structure.fill([*merged.values()], [*merged])


def _entries(
    structure: Structure, values: Sequence[Any]
) -> Iterator[tuple[int, Structure | None, Sequence[Any]]]:
    end = 0
    for number in range(len(structure.keys)):
        child = structure.below.get(number)
        begin, end = end, end + (1 if child is None else child.num_leaves)
        yield number, child, values[begin:end]


def _entries_of_base(
    base: Any, structure: Structure, values: Sequence[Any], path: Path
) -> dict[Any, Any]:
    """The entries of a dict; those of a list or tuple by their positions in the template."""
    if structure.is_dict:
        if not isinstance(base, dict):
            raise _conflict(path, "a dict", base)
        return dict(base)
    if not isinstance(base, list | tuple):
        raise _conflict(path, "a list", base)
    if len(base) == len(structure.keys):
        return dict(enumerate(base))
    plain = [
        number
        for number, child, below in _entries(structure, values)
        if part_of(child, (MISSING if v is not NO_LEAF else v for v in below)) is not MISSING
    ]
    if len(base) == len(plain):  # the writer left no None for sharded leaves
        return dict(zip(plain, base, strict=True))
    expected = f"length {len(structure.keys)}, or {len(plain)} without the sharded ones"
    raise _conflict(path, expected, f"length {len(base)}")


def _conflict(path: Path, expected: str, found: object) -> StateMismatchError:
    text = repr(found) if isinstance(found, str) else type(found).__name__
    finding = Finding(
        problem=f"{path_text(path)} does not fit the checkpoint's common state",
        expected=f"{expected} (template)",
        found=f"{text} (checkpoint)",
        remedy="Nest the template as the saved state dict was nested.",
    )
    return StateMismatchError("template and checkpoint are nested differently", [finding])
