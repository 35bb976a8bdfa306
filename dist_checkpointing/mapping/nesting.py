"""Nested state dicts taken apart once and put together again, nothing lost.

``flatten`` turns a nest of dicts, lists and tuples into ``{path: leaf}`` and a skeleton. Paths keep
the type of every step (dict key ``1``, dict key ``"1"`` and list position 1 all differ), and the
skeleton keeps container types, key order and empty containers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

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


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
_NO_LEAF: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """The shape of one container: an empty one of its kind, and what was under each key.

    For a tuple, which cannot be emptied and filled, the prototype is its class. A child of None is
    a leaf.
    """

    prototype: Any
    entries: tuple[tuple[Step, Node | None], ...]

    @property
    def is_tuple(self) -> bool:
        """Whether the container is a tuple or named tuple."""
        return isinstance(self.prototype, type)

    def fill(self, values: Sequence[tuple[Step, Any]]) -> Any:
        """A new container of this kind holding ``values``."""
        if self.is_tuple:
            make = getattr(self.prototype, "_make", tuple)
            return make(value for _, value in values)
        container = copy.copy(self.prototype)
        if isinstance(container, dict):
            for step, value in values:  # not update(): a Counter would add
                container[step.key] = value  # type: ignore[union-attr]
        else:
            container.extend(value for _, value in values)
        return container


def path_text(path: Path) -> str:
    """How a user would write the path in code."""
    return "state_dict" + "".join(map(str, path))


def is_container(value: object) -> bool:
    """Dicts and lists of any class, tuples and named tuples; other tuple classes are leaves.

    ``torch.Size`` and struct sequences look like tuples, but mean one value.
    """
    if isinstance(value, (dict, list)):
        return True
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _empty_copy(container: Any) -> Any:
    if isinstance(container, tuple):
        return type(container)
    if type(container) in (dict, list):
        return type(container)()
    # A subclass may carry attributes (a defaultdict its factory): copy the object, then empty it.
    empty = copy.copy(container)
    empty.clear()
    return empty


def containers_with(tree: object, wanted: Callable[[object], bool]) -> set[int]:
    """The ``id`` of every container in ``tree`` that has a wanted leaf somewhere below it."""
    found: set[int] = set()
    _mark(tree, wanted, found)
    return found


def _mark(value: Any, wanted: Callable[[object], bool], found: set[int]) -> bool:
    if not is_container(value):
        return wanted(value)
    hit = False
    for child in value.values() if isinstance(value, dict) else value:
        hit = _mark(child, wanted, found) or hit
    if hit:
        found.add(id(value))
    return hit


def flatten(
    tree: object, prefix: Path = (), *, only: Container[int] | None = None
) -> tuple[dict[Path, Any], Node | None]:
    """All leaves by path, in order, and the skeleton (None if ``tree`` itself is a leaf).

    The tree is read, never changed.

    Args:
        tree: any nest.
        prefix: put in front of every path.
        only: if given, the ``id`` of the containers to open; others count as leaves.
    """
    leaves: dict[Path, Any] = {}
    return leaves, _take_apart(tree, prefix, only, leaves)


def _take_apart(
    value: Any, path: Path, only: Container[int] | None, leaves: dict[Path, Any]
) -> Node | None:
    if not is_container(value) or (only is not None and id(value) not in only):
        leaves[path] = value
        return None
    steps: list[tuple[Step, Any]]
    if isinstance(value, dict):
        steps = [(DictKey(key), child) for key, child in value.items()]
    else:
        steps = [(Position(index), child) for index, child in enumerate(value)]
    entries = [(step, _take_apart(child, (*path, step), only, leaves)) for step, child in steps]
    return Node(_empty_copy(value), tuple(entries))


def value_at(tree: Any, path: Path) -> Any:
    """What stands at a path."""
    for step in path:
        tree = tree[step.key if isinstance(step, DictKey) else step.index]
    return tree


def unflatten(skeleton: Node | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """The inverse of ``flatten``; every leaf must be there."""
    if skeleton is None:
        return leaves[prefix]
    return skeleton.fill(
        [(step, unflatten(child, leaves, (*prefix, step))) for step, child in skeleton.entries]
    )


def unflatten_part(skeleton: Node | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """The tree with only the given leaves in it, or MISSING if nothing is left of it.

    What is absent vanishes from a dict. In a list or tuple that keeps anything it leaves a None, so
    that the rest stays in place. Containers that were empty from the start are kept.
    """
    if skeleton is None:
        return leaves.get(prefix, MISSING)
    values = [
        (step, unflatten_part(child, leaves, (*prefix, step))) for step, child in skeleton.entries
    ]
    if values and all(value is MISSING for _, value in values):
        return MISSING
    if isinstance(skeleton.prototype, dict):
        return skeleton.fill([(step, value) for step, value in values if value is not MISSING])
    kept = [(step, None if value is MISSING else value) for step, value in values]
    if skeleton.is_tuple and any(value is MISSING for _, value in values):
        # A named tuple with holes in it would be a lie about its type.
        return tuple(value for _, value in kept)
    return skeleton.fill(kept)


def overlay(base: Any, skeleton: Node | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """``base`` with ``leaves`` put in at their places in ``skeleton``.

    A leaf that is MISSING has its place, but no value. ``base`` is a tree that ``unflatten_part``
    (or an older writer, which closed the gaps in lists) left over; parts of the skeleton without
    any of ``leaves`` below them are ignored.

    Raises:
        StateMismatchError: if ``base`` has something else at a place where a leaf must go.
    """
    above: set[Path] = set()
    for path in leaves:
        # Most leaves have neighbours.
        if path[:-1] not in above:
            above.update(path[:depth] for depth in range(len(path)))
    return _overlay(base, skeleton, leaves, above, prefix)


def _overlay(
    base: Any, node: Node | None, leaves: Mapping[Path, Any], above: Container[Path], path: Path
) -> Any:
    if node is None:
        value = leaves.get(path, _NO_LEAF)
        if value is _NO_LEAF:
            return base
        if base is MISSING or base is None:
            return value
        if value is MISSING:
            return base
        raise _conflict(path, "a wrapped leaf", base)
    if path not in above:
        return base
    if isinstance(node.prototype, dict):
        return _overlay_dict(base, node, leaves, above, path)
    return _overlay_sequence(base, node, leaves, above, path)


def _overlay_dict(
    base: Any, node: Node, leaves: Mapping[Path, Any], above: Container[Path], path: Path
) -> Any:
    if base is MISSING or base is None:
        base = {}
    if not isinstance(base, dict):
        raise _conflict(path, "a dict", base)
    values: list[tuple[Step, Any]] = []
    for step, child in node.entries:
        below = base.get(step.key, MISSING)  # type: ignore[union-attr]
        value = _overlay(below, child, leaves, above, (*path, step))
        if value is not MISSING:
            values.append((step, value))
    if base:
        known = {step for step, _ in node.entries}
        steps = ((DictKey(key), value) for key, value in base.items())
        values += [(step, value) for step, value in steps if step not in known]
    return node.fill(values)


def _overlay_sequence(
    base: Any, node: Node, leaves: Mapping[Path, Any], above: Container[Path], path: Path
) -> Any:
    if base is MISSING or base is None:
        base = ()
    if not isinstance(base, list | tuple):
        raise _conflict(path, "a list", base)
    paths = [(*path, step) for step, _ in node.entries]
    plain = [
        index
        for index, (_, child) in enumerate(node.entries)
        if _leaves_something(child, leaves, paths[index])
    ]
    below_at: dict[int, Any] = {}
    if len(base) == len(paths):
        below_at = dict(enumerate(base))
    elif len(base) == len(plain):  # written by a library that closes the gaps
        below_at = dict(zip(plain, base, strict=True))
    else:
        expected = f"{len(plain)} plain values among {len(paths)} entries"
        raise _conflict(path, expected, f"{len(base)} entries")
    values = [
        (step, _overlay(below_at.get(i, MISSING), child, leaves, above, paths[i]))
        for i, (step, child) in enumerate(node.entries)
    ]
    # A leaf without a value must not let the others move up.
    return node.fill([(step, None if value is MISSING else value) for step, value in values])


def _leaves_something(node: Node | None, leaves: Mapping[Path, Any], path: Path) -> bool:
    """Whether anything is left of a part of the tree when ``leaves`` are taken out."""
    if node is None:
        return path not in leaves
    if not node.entries:
        return True
    return any(_leaves_something(child, leaves, (*path, step)) for step, child in node.entries)


def _conflict(path: Path, expected: str, found: object) -> StateMismatchError:
    text = repr(found) if isinstance(found, str) else type(found).__name__
    finding = Finding(
        problem=f"{path_text(path)} does not fit the checkpoint's common state",
        expected=f"{expected} (template)",
        found=f"{text} (checkpoint)",
        remedy="Nest the template as the saved state dict was nested.",
    )
    return StateMismatchError("template and checkpoint are nested differently", [finding])
