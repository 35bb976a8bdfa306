"""Functions of nested dicts and lists, and of sharded leaves in them; a tuple is a leaf."""

from __future__ import annotations

import logging
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch

from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

Nest = dict[Any, Any] | list[Any]


def _items(x: Nest) -> Iterable[tuple[Any, Any]]:
    return x.items() if isinstance(x, dict) else enumerate(x)


def _is_nest(x: object) -> typing.TypeGuard[Nest]:
    return isinstance(x, dict | list)


def extract_matching_values(
    x: Nest, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """The leaves for which the predicate holds, and the others, each nested as they were.

    A list loses the places of what went elsewhere, or becomes a dict from place to value. An empty
    dict or list stays with the others; in a list, the predicate decides.
    """
    if not _is_nest(x):
        raise ValueError(f"expected a dict or a list, found {type(x).__name__}")
    found: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for step, value in _items(x):
        if _is_nest(value) and (value or isinstance(x, dict)):
            matching, others = extract_matching_values(value, predicate, return_lists_as_dicts)
            if matching:
                found[0][step] = matching
            if others or not value:
                found[1][step] = others
        else:
            found[0 if predicate(value) else 1][step] = value
    if isinstance(x, dict) or return_lists_as_dicts:
        return found
    return list(found[0].values()), list(found[1].values())


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Paths that only one side has, and ``(path, type, type, ...)`` of leaves that differ."""
    left: list[Any]
    right: list[Any]
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        pairs = [(key, x1[key], x2[key]) for key in x1.keys() & x2.keys()]
    elif isinstance(x1, list | tuple | np.ndarray):
        assert type(x1) is type(x2), (prefix, type(x1), type(x2))
        left, right = (list(range(len(a) - 1, len(b) - 1, -1)) for a, b in ((x1, x2), (x2, x1)))
        pairs = [(place, a, b) for place, (a, b) in enumerate(zip(x1, x2, strict=False))]
    elif hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
        assert type(x1) is type(x2), (prefix, type(x1), type(x2))
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    else:
        details = _difference(x1, x2)
        return [], [], [] if details is None else [(prefix, type(x1), type(x2), *details)]
    different: list[Any] = []
    for step, a, b in pairs:
        parts = diff(a, b, (*prefix, step))
        left, right, different = left + parts[0], right + parts[1], different + parts[2]
    return left, right, different


def _difference(x1: Any, x2: Any) -> tuple[Any, ...] | None:
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        try:
            unequal = x1 != (x2 if x1.device == x2.device else x2.to(x1.device))
        except (RuntimeError, TypeError, ValueError):
            return x1.shape, x2.shape
        if not unequal.any():
            return None
        return unequal.sum(), unequal.shape, unequal.nonzero().tolist()
    try:
        return () if bool(x1 != x2) else None
    except RuntimeError:
        return ()


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    for step, value in _items(x) if _is_nest(x) else [("", x)]:
        kind = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        print(" " * indent * len(prefix) + f"{step}: {kind}")  # noqa: T201 - that is what it does
        if _is_nest(value):
            inspect_types(value, (*prefix, step), indent)


def nested_values(x: Nest) -> Iterator[Any]:
    return (value for _, _, value in nested_items_iter(x))


def nested_items_iter(x: Nest) -> Iterator[tuple[Any, Any, Any]]:
    """``(dict or list that holds it, key or place, leaf)`` of all leaves."""
    for step, value in _items(x):
        if _is_nest(value):
            yield from nested_items_iter(value)
        else:
            yield x, step, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    dict_map_with_key(lambda _, value: f(value), d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    for container, step, value in nested_items_iter(d):
        container[step] = f(step, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with each leaf replaced by ``f(leaf)``; ``f(x)`` if it is a leaf itself."""
    if not _is_nest(x):
        return f(x)
    for step, value in _items(x):
        x[step] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    if not _is_nest(x):
        return f(x)
    mapped = {step: dict_list_map_outplace(f, value) for step, value in _items(x)}
    return mapped if isinstance(x, dict) else list(mapped.values())


def merge(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """``x1`` with all that only ``x2`` has, in place; ValueError if both have a leaf at one path,
    or lists of different lengths.
    """
    same_kind = _is_nest(x1) and isinstance(x2, dict) is isinstance(x1, dict) and _is_nest(x2)
    if not same_kind:
        raise ValueError(
            f"Duplicate non-dict and non-list values encountered: {x1!r} and {x2!r} at {key}"
        )
    if isinstance(x1, list) and len(x1) != len(x2):
        raise ValueError(f"cannot merge lists of {len(x1)} and {len(x2)} entries at {key}")
    for step, value in _items(x2):
        known = isinstance(x1, list) or step in x1
        x1[step] = merge(x1[step], value, (*key, step)) if known else value
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """``{key: reduce_fn([value, ...])}`` of all values that have one key."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}


# Sharded leaves.

_ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]

fallback_logger: logging.Logger = logging.getLogger(__name__)
_names: list[str] = []
_loggers: list[logging.Logger] = []


def zip_strict(*args: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    lists = [list(values) for values in args]
    assert len({len(values) for values in lists}) <= 1, f"lengths {list(map(len, lists))} differ"
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), sharded_tensor.flat_range


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[Any, ...]:
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


Extractor = Callable[[StateDict], tuple[Any, Any]]


def _extractor(*kinds: type) -> Extractor:
    return lambda sharded_state_dict: extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, kinds)
    )


extract_sharded_tensors: Extractor = _extractor(ShardedTensor)
extract_sharded_tensors_and_factories: Extractor = _extractor(ShardedTensor, ShardedTensorFactory)
extract_sharded_tensors_or_nonpersistent: Extractor = _extractor(
    ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject
)
extract_sharded_base: Extractor = _extractor(ShardedBase)
extract_nonpersistent: Extractor = _extractor(LocalNonpersistentObject)


def _leaves(sharded_state_dict: StateDict) -> Iterator[ShardedBase]:
    return (x for x in nested_values(sharded_state_dict) if isinstance(x, ShardedBase))


def add_prefix_for_sharding(sharded_state_dict: StateDict, prefix: str) -> None:
    for leaf in _leaves(sharded_state_dict):
        leaf.key = prefix + leaf.key


def replace_prefix_for_sharding(
    sharded_state_dict: StateDict, old_prefix: str, new_prefix: str
) -> None:
    for leaf in _leaves(sharded_state_dict):
        if not leaf.key.startswith(old_prefix):
            raise ValueError(f"Expected {leaf.key} to begin with prefix {old_prefix}")
        leaf.key = new_prefix + leaf.key.removeprefix(old_prefix)


def apply_prefix_mapping(sharded_state_dict: StateDict, prefix_map: dict[str, str]) -> None:
    """Replace the first prefix of the map with which a key begins, in place."""
    for leaf in _leaves(sharded_state_dict):
        old = next((old for old in prefix_map if leaf.key.startswith(old)), "")
        leaf.key = prefix_map.get(old, "") + leaf.key.removeprefix(old)


def force_all_tensors_to_non_fp8(sharded_state_dict: StateDict) -> None:
    """Replace the data of leaves that TransformerEngine keeps in fp8 by their values."""
    try:
        fp8 = import_module("megatron.core.fp8_utils")
    except ImportError:
        return
    for leaf in nested_values(sharded_state_dict):
        if hasattr(leaf, "data") and fp8.is_float8tensor(leaf.data):
            leaf.data = fp8.dequantize_fp8_tensor(leaf.data)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """The names of all bodies that are running, and the logger of the innermost that has one."""
    names = [name] if name else []
    loggers = [current_logger] if current_logger else []
    _names.extend(names)
    _loggers.extend(loggers)
    try:
        yield ".".join(_names), (_loggers or [fallback_logger])[-1]
    finally:
        del _names[len(_names) - len(names) :], _loggers[len(_loggers) - len(loggers) :]


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    if level is None:
        level = logging.DEBUG if threshold == float("-inf") else logging.WARNING
    with logger_stack(name, logger) as (names, last):
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if seconds >= threshold:
                last.log(level, "%s took %.4fs", names, seconds)


def debug_msg(msg: str) -> None:
    with logger_stack() as (names, last):
        last.debug("%s %s", names, msg)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}
