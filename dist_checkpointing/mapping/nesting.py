"""Nested state dicts: flattened into leaves and a skeleton, and put together again.

``flatten`` turns a nest of dicts, lists and tuples into ``{path: leaf}`` and a skeleton. Nothing is
lost: paths keep the type of every step (dict key ``1``, dict key ``"1"`` and list position 1 all
differ), and the skeleton keeps container types, key order and empty containers.
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
class Skeleton:
    """The structure of one container.

    Attributes:
        prototype: an empty container of its kind; for a tuple, which cannot be filled, its class.
        entries: the skeleton under each key or position; None for a leaf.
    """

    prototype: Any
    entries: tuple[tuple[Step, Skeleton | None], ...]

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
    """The path as Python code: ``state_dict['a'][0]``."""
    return "state_dict" + "".join(map(str, path))


def is_container(value: object) -> bool:
    """Whether this is a dict or list of any class, a tuple or a named tuple.

    Other subclasses of tuple, such as ``torch.Size`` and struct sequences, are single values.
    """
    if isinstance(value, (dict, list)):
        return True
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _empty_copy(container: Any) -> Any:
    if isinstance(container, tuple):
        return type(container)
    if type(container) in (dict, list):
        return type(container)()
    # A subclass may have attributes (a defaultdict has one): copy it, then empty the copy.
    empty = copy.copy(container)
    empty.clear()
    return empty


def containers_with(tree: object, wanted: Callable[[object], bool]) -> set[int]:
    """The ``id`` of every container in ``tree`` with a wanted leaf below it, at any depth."""
    found: set[int] = set()
    _mark(tree, wanted, found)
    return found


def _mark(value: Any, wanted: Callable[[object], bool], found: set[int]) -> bool:
    if not is_container(value):
        return wanted(value)
    hit = False
    for child in value.values() if isinstance(value, dict) else value:
        hit = (_mark(child, wanted, found) if is_container(child) else wanted(child)) or hit
    if hit:
        found.add(id(value))
    return hit


def flatten(
    tree: object, prefix: Path = (), *, only: Container[int] | None = None
) -> tuple[dict[Path, Any], Skeleton | None]:
    """All leaves by path, in order, and the skeleton (None if ``tree`` itself is a leaf).

    Args:
        tree: any nest; not changed.
        prefix: path of the tree, with which every path begins.
        only: the ``id`` of the containers to open, others count as leaves; None opens all.
    """
    leaves: dict[Path, Any] = {}
    return leaves, _take_apart(tree, prefix, only, leaves)


def _take_apart(
    value: Any, path: Path, only: Container[int] | None, leaves: dict[Path, Any]
) -> Skeleton | None:
    if not is_container(value) or (only is not None and id(value) not in only):
        leaves[path] = value
        return None
    steps: list[tuple[Step, Any]]
    if isinstance(value, dict):
        steps = [(DictKey(key), child) for key, child in value.items()]
    else:
        steps = [(Position(index), child) for index, child in enumerate(value)]
    entries: list[tuple[Step, Skeleton | None]] = []
    for step, child in steps:
        below = (*path, step)
        if only is not None and id(child) not in only:
            leaves[below] = child
            entries.append((step, None))
        else:
            entries.append((step, _take_apart(child, below, only, leaves)))
    return Skeleton(_empty_copy(value), tuple(entries))


def value_at(tree: Any, path: Path) -> Any:
    """The value at a path."""
    for step in path:
        tree = tree[step.key if isinstance(step, DictKey) else step.index]
    return tree


def unflatten(skeleton: Skeleton | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """The inverse of ``flatten``; ``leaves`` must have every leaf."""
    if skeleton is None:
        return leaves[prefix]
    return skeleton.fill(
        [(step, unflatten(child, leaves, (*prefix, step))) for step, child in skeleton.entries]
    )


def unflatten_part(skeleton: Skeleton | None, leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """The tree with only the given leaves, or MISSING if nothing is left of it.

    A dict loses the keys of absent leaves. In a list or tuple, None replaces an absent leaf, so
    that the others keep their positions. Containers that were empty from the start are kept.
    """
    if skeleton is None:
        return leaves.get(prefix, MISSING)
    values = [
        (
            step,
            leaves.get((*prefix, step), MISSING)
            if child is None
            else unflatten_part(child, leaves, (*prefix, step)),
        )
        for step, child in skeleton.entries
    ]
    if values and all(value is MISSING for _, value in values):
        return MISSING
    if isinstance(skeleton.prototype, dict):
        return skeleton.fill([(step, value) for step, value in values if value is not MISSING])
    kept = [(step, None if value is MISSING else value) for step, value in values]
    if skeleton.is_tuple and any(value is MISSING for _, value in values):
        # Not a named tuple: its fields would have values of a wrong type.
        return tuple(value for _, value in kept)
    return skeleton.fill(kept)


def overlay(
    base: Any, skeleton: Skeleton | None, leaves: Mapping[Path, Any], prefix: Path = ()
) -> Any:
    """``base`` with ``leaves`` put in at their paths.

    Args:
        base: a tree that ``unflatten_part`` made, or an older writer, which left no None in lists.
        skeleton: skeleton of the whole tree. Parts without any of ``leaves`` below are ignored.
        leaves: leaves by path; MISSING for one that keeps its position, but has no value.
        prefix: path of the tree.

    Raises:
        StateMismatchError: if ``base`` has a value at the path of a leaf.
    """
    above: set[Path] = set()
    for path in leaves:
        # Most leaves have neighbours.
        if path[:-1] not in above:
            above.update(path[:depth] for depth in range(len(path)))
    return _overlay(base, skeleton, leaves, above, prefix)


def _overlay(
    base: Any, node: Skeleton | None, leaves: Mapping[Path, Any], above: Container[Path], path: Path
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
    base: Any, node: Skeleton, leaves: Mapping[Path, Any], above: Container[Path], path: Path
) -> Any:
    if base is MISSING or base is None:
        base = {}
    if not isinstance(base, dict):
        raise _conflict(path, "a dict", base)
    values: list[tuple[Step, Any]] = []
    for step, child in node.entries:
        below = base.get(step.key, MISSING) if base else MISSING  # type: ignore[union-attr]
        if child is None and below is MISSING:
            value = leaves.get((*path, step), MISSING)
        else:
            value = _overlay(below, child, leaves, above, (*path, step))
        if value is not MISSING:
            values.append((step, value))
    if base:
        known = {step for step, _ in node.entries}
        steps = ((DictKey(key), value) for key, value in base.items())
        values += [(step, value) for step, value in steps if step not in known]
    return node.fill(values)


def _overlay_sequence(
    base: Any, node: Skeleton, leaves: Mapping[Path, Any], above: Container[Path], path: Path
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
    elif len(base) == len(plain):  # the writer left no None for sharded leaves
        below_at = dict(zip(plain, base, strict=True))
    else:
        expected = f"{len(plain)} plain values among {len(paths)} entries"
        raise _conflict(path, expected, f"{len(base)} entries")
    values = [
        (step, _overlay(below_at.get(i, MISSING), child, leaves, above, paths[i]))
        for i, (step, child) in enumerate(node.entries)
    ]
    # A leaf without a value must keep its position, or the others would move up.
    return node.fill([(step, None if value is MISSING else value) for step, value in values])


def _leaves_something(node: Skeleton | None, leaves: Mapping[Path, Any], path: Path) -> bool:
    """Whether anything is left of this part of the tree without ``leaves``."""
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
