"""Sharded leaves in nested dicts and lists: taking them out, and renaming them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from dist_checkpointing.interop.megatron.modules import dict_utils
from dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

_ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]

fallback_logger: logging.Logger = logging.getLogger(__name__)
_names: list[str] = []
_loggers: list[logging.Logger] = []


def zip_strict(*args: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    """``zip`` of as many values each."""
    lists = [list(values) for values in args]
    assert len({len(values) for values in lists}) <= 1, f"lengths {list(map(len, lists))} differ"
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), sharded_tensor.flat_range


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[Any, ...]:
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


Extractor = Callable[[StateDict], tuple[Any, Any]]


def _extractor(*kinds: type) -> Extractor:
    return lambda sharded_state_dict: dict_utils.extract_matching_values(
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
    return (x for x in dict_utils.nested_values(sharded_state_dict) if isinstance(x, ShardedBase))


def add_prefix_for_sharding(sharded_state_dict: StateDict, prefix: str) -> None:
    """Put the prefix before all keys, in place."""
    for leaf in _leaves(sharded_state_dict):
        leaf.key = prefix + leaf.key


def replace_prefix_for_sharding(
    sharded_state_dict: StateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix of all keys, in place; ValueError for a key without it."""
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
    for leaf in dict_utils.nested_values(sharded_state_dict):
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
    """Log how long the body took, if that is at least ``threshold`` seconds."""
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
    """Log a message with the names of all bodies that are running."""
    with logger_stack() as (names, last):
        last.debug("%s %s", names, msg)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}
