import copy
import itertools
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import given, strategies as st

from dist_checkpointing.mapping import flatten, unflatten
from dist_checkpointing.mapping.nested_dicts import (
    MISSING,
    NO_LEAF,
    Path,
    Structure,
    overlay,
    part_of,
    paths_of,
)
from tiers import examples


class Point(NamedTuple):
    x: Any
    y: Any


Old = namedtuple("Old", "only")  # noqa: PYI024 - users have these too


def overlaid(base: Any, structure: Structure | None, leaves: Mapping[Path, Any]) -> Any:
    """``overlay`` with leaves by path."""
    return overlay(base, structure, [leaves.get(path, NO_LEAF) for path in paths_of(structure)])


class Wrapped:
    """Stands for a sharded leaf: equal to nothing but itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __deepcopy__(self, memo: object) -> "Wrapped":
        return self

    def __repr__(self) -> str:
        return f"Wrapped({self.name})"


keys = st.one_of(
    st.integers(-2, 3),
    st.sampled_from(["", "a", "b", "0", "1", "a.b", "x/y", "[0]"]),
    st.tuples(st.integers(0, 1), st.sampled_from(["", "z"])),
    st.none(),
)
leaves: st.SearchStrategy[Any] = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(torch.Size([1, 2])), st.just(frozenset())
)


def _nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, children, max_size=4)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(partial(defaultdict, list)),
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Point, children, children),
        st.builds(Old, children),
    )


trees = st.recursive(leaves, _nests, max_leaves=14)


def same(a: Any, b: Any) -> bool:
    """Equal with all types and the order of keys, where ``==`` looks at neither."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    return a is b or bool(a == b)


def identities(tree: Any) -> Any:
    """The nest with every container as ``(id, contents)``: notices an exchanged container."""
    if isinstance(tree, dict):
        return id(tree), [(k, identities(v)) for k, v in tree.items()]
    if isinstance(tree, list | tuple):
        return id(tree), [identities(v) for v in tree]
    return id(tree)


@examples(150)
@given(trees)
def test_unflatten_inverts_flatten(tree: Any) -> None:
    before, ids = copy.deepcopy(tree), identities(tree)
    found, structure = flatten(tree)
    one, other = unflatten(structure, found), unflatten(structure, found)
    assert same(one, tree)
    assert same(tree, before)
    assert identities(tree) == ids
    # No two of them share a container that can be changed.
    assert not mutable(tree) & mutable(one)
    assert not mutable(other) & mutable(one)
    # Leaves come in the order of the tree.
    expected = walk(tree)
    assert len(found) == len(expected)
    assert all(a is b for a, b in zip(found.values(), expected, strict=True))
    # The part of everything is the tree, and that of nothing has no leaf: empty containers stay,
    # and a None keeps the place of what is gone beside them in a list.
    assert same(part_of(structure, iter(found.values())), tree)
    rest = part_of(structure, itertools.repeat(MISSING))
    assert rest is MISSING or set(flatten(rest)[0].values()) <= {None}


def mutable(value: Any) -> set[int]:
    ids = {id(value)} if isinstance(value, dict | list) else set()
    if isinstance(value, dict | list | tuple):
        for child in value.values() if isinstance(value, dict) else value:
            ids |= mutable(child)
    return ids


def walk(value: Any) -> list[Any]:
    """All leaves: a ``torch.Size`` is one."""
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in walk(child)]
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [leaf for child in value for leaf in walk(child)]
    return [value]


@examples(150)
@given(trees, st.data())
def test_part_and_overlay_rebuild_the_tree_however_the_leaves_are_split(
    tree: Any, data: st.DataObject
) -> None:
    template_leaves, structure = flatten(tree)
    is_wrapped = data.draw(
        st.lists(st.booleans(), min_size=len(template_leaves), max_size=len(template_leaves))
    )
    wrapped = {p: v for (p, v), w in zip(template_leaves.items(), is_wrapped, strict=True) if w}
    common = {p: v for p, v in template_leaves.items() if p not in wrapped}

    part = part_of(structure, (common.get(p, MISSING) for p in template_leaves))
    before, ids = copy.deepcopy(part), identities(part)
    again = overlaid(part, structure, wrapped)
    assert same(again, tree)
    assert part is MISSING or same(part, before)
    assert identities(part) == ids


def _close_gaps(tree: Any) -> Any:
    """What a Megatron writer leaves of a nest of dicts and lists when wrapped leaves are taken out.

    Megatron treats tuples as leaves, drops what became empty and closes the gaps in lists.
    """

    def stays(old: Any, new: Any) -> bool:
        return bool(new or not isinstance(old, dict | list) or not old)

    if isinstance(tree, dict):
        kept: Any = {k: _close_gaps(v) for k, v in tree.items() if not isinstance(v, Wrapped)}
        return {k: v for k, v in kept.items() if stays(tree[k], v)}
    if isinstance(tree, list):
        pairs = [(v, _close_gaps(v)) for v in tree if not isinstance(v, Wrapped)]
        return [v for old, v in pairs if stays(old, v)]
    return tree


old_trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        st.one_of(st.integers(0, 9), st.text(max_size=2), st.builds(Wrapped, st.just("w"))),
        lambda children: (
            st.lists(children, max_size=4)
            | st.dictionaries(st.sampled_from("xyz"), children, max_size=3)
        ),
        max_leaves=12,
    ),
    max_size=3,
)


@examples(150)
@given(old_trees)
def test_overlay_opens_the_lists_that_an_older_writer_closed(tree: dict[str, Any]) -> None:
    found, structure = flatten(tree)
    wrapped = {path: leaf for path, leaf in found.items() if isinstance(leaf, Wrapped)}
    assert same(overlaid(_close_gaps(tree), structure, wrapped), tree)


class Annotated(dict[str, Any]):
    note = ""


class Strict(list[Any]):
    def __init__(self, values: list[Any], limit: int) -> None:
        super().__init__(values)
        self.limit = limit


def test_subclasses_keep_their_class_and_attributes() -> None:
    annotated = Annotated(a=1)
    annotated.note = "kept"
    strict = Strict([1, Wrapped("w")], 7)
    tree = {"d": annotated, "l": strict, "c": Counter("abb"), "e": Counter()}
    found, structure = flatten(tree)
    again = unflatten(structure, found)
    assert same(again, tree)
    assert again["d"].note == "kept"
    assert again["l"].limit == 7
    assert again["c"] == Counter("abb")


def test_a_structure_keeps_no_leaf_alive() -> None:
    leaf = Wrapped("large")
    tree = {"d": {"x": leaf}, "l": [leaf], "t": (leaf,), "p": Point(leaf, leaf)}
    alive = weakref.ref(leaf)
    found, structure = flatten(tree)
    del tree, found, leaf
    assert structure is not None
    assert alive() is None, "large tensors must not wait for the garbage collector either"
