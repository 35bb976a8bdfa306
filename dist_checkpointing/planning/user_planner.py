"""The one door for planners and storages of users: their classes get what they lack, and hooks as
many parameters as they have; what is open about the items of a load is filled in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    StateMismatchError,
)
from dist_checkpointing.format.geometry import Box, Ints, Window
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.planning.items import LoadItemType, MetadataIndex, ReadItem
from dist_checkpointing.planning.load_plan import LoadPlan, array_shape

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_hook(hook: Callable[..., Any], *args: Any, **facts: Any) -> Any:
    """Call a method with what it must have, and with those of the facts that it has names for."""
    # What is no method may hold on to memory of its user.
    function = getattr(hook, "__func__", None)
    names = _names(hook) if function is None else _names_of_method(function)
    if names is not None:
        facts = {name: fact for name, fact in facts.items() if name in names}
    return hook(*args, **facts)


def _names(hook: Callable[..., Any]) -> frozenset[str] | None:
    """The parameters that have names; None if it takes any keyword."""
    parameters = inspect.signature(hook).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)


_names_of_method = lru_cache(maxsize=64)(_names)


def adapted(given: Any, kind: type[Any]) -> Any:
    """An object as one of ``kind``, which has the same attributes; itself if it is one.

    What its class lacks is that of ``kind``.

    Raises:
        CheckpointingException: if it lacks a method that has no default.
    """
    if isinstance(given, kind):
        return given
    try:
        whole: Any = object.__new__(type(type(given).__name__, (type(given), kind), {}))
        whole.__dict__ = vars(given)
    except TypeError as error:
        finding = Finding(str(error), remedy=f"Derive its class from {kind.__name__}.")
        raise CheckpointingException(f"this cannot be a {kind.__name__}", [finding]) from error
    return whole


def overrides(planner: object, base: type, *names: str) -> bool:
    """Whether any of these methods of a planner is another than that of ``base``."""
    methods = [getattr(getattr(planner, name), "__func__", None) for name in names]
    return methods != [getattr(base, name) for name in names]


def placed(plan: LoadPlan, index: Index, leaves: Sequence[ShardedBase]) -> LoadPlan:
    """A plan, with all that a planner of the user's own has left open about its items.

    Raises:
        StateMismatchError: with every item that reads or fills what is not there.
    """
    given = plan.table.given
    if given is None or all(item.is_placed for item in given):
        return plan
    items: list[ReadItem] = []
    findings: list[Finding] = []
    for item in given:
        try:
            items.append(item if item.is_placed else _placed(item, index, leaves))
        except InvalidShardingError as error:
            findings += error.findings
    StateMismatchError.raise_if(findings, "the checkpoint does not hold what is planned")
    return plan.with_items(items)


def _placed(item: ReadItem, index: Index, leaves: Sequence[ShardedBase]) -> ReadItem:
    source = _source(item.dest_index, leaves)
    dest_index = replace(item.dest_index, index=source)
    stored, key = item.storage_index, item.storage_index.fqn
    if key not in (index.objects if item.type is LoadItemType.BYTE_IO else index):
        raise _misplaced("not in the checkpoint", key)
    if item.type is LoadItemType.BYTE_IO:
        cell = tuple(stored.offset or (0,) * len(index.objects[key]))
        return replace(item, dest_index=dest_index, storage_index=MetadataIndex(key, cell))
    number = _piece(stored, index[key])
    shape = array_shape(index[key], number)
    storage = _window(item.storage.box, shape, key, "the stored chunk")
    leaf = leaves[source] if source is not None and 0 <= source < len(leaves) else None
    if isinstance(leaf, ShardedTensor):
        flat = leaf.flat_range
        own = leaf.box.shape if flat is None else (flat[1] - flat[0],)
        dest = _window(item.dest.box, own, leaf.key, "the shard to fill")
    else:  # where it goes, only the planner knows
        dest = Window(0, item.dest.box.stop, item.dest.box)
    storage_index = MetadataIndex(key, stored.offset or (0,) * len(shape), number)
    return ReadItem(item.type, dest_index, dest, storage_index, storage)


def _source(wanted: MetadataIndex, leaves: Sequence[ShardedBase]) -> int | None:
    """Which leaf an index means; None if it is none of these."""

    def is_it(leaf: ShardedBase) -> bool:
        if leaf.key != wanted.fqn or not isinstance(leaf, ShardedTensor | ShardedObject):
            return False
        return wanted.offset is None or tuple(wanted.offset) == tuple(leaf.global_offset)

    hint = wanted.index
    if hint is not None and 0 <= hint < len(leaves) and is_it(leaves[hint]):
        return hint
    return next((source for source, leaf in enumerate(leaves) if is_it(leaf)), hint)


def _piece(chunk: MetadataIndex, tensor: StoredTensor) -> int | None:
    """The number of the piece that an index means; None on a grid."""
    offset = tuple(chunk.offset or (0,) * len(tensor.global_shape))
    if tensor.pieces is None:
        grid = tensor.grid
        if Box.whole(tensor.global_shape).contains(Box(offset, (0,) * len(offset))) and not any(
            o % n for o, n in zip(offset, grid.chunk_shape, strict=True)
        ):
            return None
        begins: object = f"a multiple of {grid.chunk_shape} in {tensor.global_shape}"
    else:
        offsets = [box.offset for box, _ in tensor.pieces]
        hint = chunk.index
        if hint is None or not 0 <= hint < len(offsets) or offsets[hint] != offset:
            hint = offsets.index(offset) if offset in offsets else None
        if hint is not None:
            return hint
        begins = f"one of {sorted(set(offsets))[:16]}"
    raise _misplaced("no stored chunk begins here", chunk.fqn, begins, offset)


def _window(box: Box, shape: Ints, key: str, what: str) -> Window:
    if len(box.shape) != len(shape) or not Box.whole(shape).contains(box):
        problem = f"the box of a ReadItem is not inside {what}"
        raise _misplaced(problem, key, f"inside {shape}", str(box))
    return Window(0, shape, box)


def _misplaced(
    problem: str, key: str, expected: object = None, found: object = None
) -> InvalidShardingError:
    remedy = "Compare storage_index and dest_index with what configure_planner was given."
    finding = Finding(problem, key, expected, found, remedy=remedy)
    return InvalidShardingError("the plan cannot be read", [finding])
