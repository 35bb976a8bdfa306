"""A tree with leaves put in where a part of it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dist_checkpointing.errors import Finding, StateMismatchError
from dist_checkpointing.mapping.nesting import (
    MISSING,
    DictKey,
    Path,
    Position,
    Skeleton,
    path_text,
    paths_of,
)

NO_LEAF: Final = object()
"""Stands where ``overlay_all`` has nothing to put."""


def overlay(base: Any, skeleton: Skeleton | None, leaves: Mapping[Path, Any]) -> Any:
    """``base`` with ``leaves`` put in at their paths.

    The base is a tree that ``unflatten_part`` made, or an older writer, which left no None in
    lists. A leaf that is MISSING keeps its position, but has no value.

    Raises:
        StateMismatchError: if ``base`` has a value at the path of a leaf.
    """
    values = [leaves.get(path, NO_LEAF) for path in paths_of(skeleton)]
    return overlay_all(base, skeleton, values)


def overlay_all(
    base: Any, skeleton: Skeleton | None, values: Sequence[Any], path: Path = ()
) -> Any:
    """The same as ``overlay``, of all leaves in order; NO_LEAF for what is not put in."""
    if skeleton is None:
        return _overlay_leaf(base, values[0], path)
    if all(value is NO_LEAF for value in values):
        return base
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
    if base is MISSING or base is None:
        base = {}
    if not isinstance(base, dict):
        raise _conflict(path, "a dict", base)
    if not base and not node.below:
        kept = [value is not MISSING and value is not NO_LEAF for value in values]
        if all(kept):
            return node.fill(values)
    found: dict[Any, Any] = {}
    for key, (child, own) in zip(node.keys, _parts(node, values), strict=True):
        below = base.get(key, MISSING)
        if child is None and below is MISSING:
            value = MISSING if own[0] is NO_LEAF else own[0]
        else:
            value = overlay_all(below, child, own, (*path, DictKey(key)))
        if value is not MISSING:
            found[key] = value
    known = set(node.keys)
    found.update((key, value) for key, value in base.items() if key not in known)
    return node.fill_dict([*found], [*found.values()])


def _overlay_sequence(base: Any, node: Skeleton, values: Sequence[Any], path: Path) -> Any:
    if base is MISSING or base is None:
        base = ()
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
        overlay_all(below_at.get(i, MISSING), child, own, (*path, Position(i)))
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
