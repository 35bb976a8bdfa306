"""What every rank of a topology would ask a checkpoint for: leaves without data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.index import Index, ints_from_json
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.mapping.nesting import DictKey
from dist_checkpointing.mapping.nesting import Path as TreePath
from dist_checkpointing.mapping.partition import partition
from dist_checkpointing.tools.forecast.topology import KeyCut, part_of

_MAX_TEMPLATE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RankWants:
    """What some ranks want, all of them the same.

    Attributes:
        ranks: which.
        tensors: the shards, without data.
        objects: the sharded objects.
    """

    ranks: tuple[int, ...]
    tensors: dict[TreePath, ShardedTensor]
    objects: tuple[ShardedObject, ...] = ()


def of_tensor_parallel(
    index: Index, cuts: Sequence[KeyCut], *, parts: int, replicas: int
) -> list[RankWants]:
    """Ranks that hold ``parts`` of every tensor, each part ``replicas`` times.

    Rank ``r`` holds part ``r % parts``, as in Megatron, where tensor-parallel ranks are neighbours.
    """
    return [
        RankWants(
            tuple(range(part, parts * replicas, parts)),
            {
                (DictKey(cut.key),): _leaf(
                    index, cut.key, part_of(index[cut.key], cut, part, parts)
                )
                for cut in cuts
            },
        )
        for part in range(parts)
    ]


def _leaf(index: Index, key: str, box: Any) -> ShardedTensor:
    stored = index[key]
    return ShardedTensor(
        key, None, stored.dtype.torch, box.shape, stored.global_shape, box.offset, None
    )


def of_json(path: Path, index: Index) -> list[RankWants]:
    """The ranks of a JSON file: a list with a list of shards for each rank.

    A shard is ``{"key", "shape", "offset", "global_shape"}``, and perhaps ``"dtype"`` (otherwise
    the stored one) and ``"flat_range": [start, stop]``.

    Raises:
        ValueError: naming rank and shard, if the file does not say this.
    """
    try:
        content = local.parse_json(local.read_bytes(path, _MAX_TEMPLATE_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path} must hold a list with one list of shards for each rank")
    wants = []
    for rank, shards in enumerate(content):
        if not isinstance(shards, list):
            raise ValueError(f"{path}: rank {rank} is not a list of shards")  # noqa: TRY004 - a file
        tensors: dict[TreePath, ShardedTensor] = {}
        for number, shard in enumerate(shards):
            try:
                tensors[DictKey(number),] = _from_json(shard, index)
            except (ValueError, KeyError, TypeError, InvalidShardingError) as error:
                problem = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}: rank {rank}, shard {number}: {problem}") from error
        wants.append(RankWants((rank,), tensors))
    return wants


def _from_json(shard: Any, index: Index) -> ShardedTensor:
    if not isinstance(shard, dict) or not isinstance(shard.get("key"), str):
        raise ValueError("it needs a 'key'")  # noqa: TRY004 - a file
    key = shard["key"]
    shape, offset, whole = (
        tuple(ints_from_json(shard[name])) for name in ("shape", "offset", "global_shape")
    )
    if "dtype" in shard:
        dtype = dtypes.from_name(shard["dtype"]).torch
    else:
        dtype = index[key].dtype.torch if key in index else torch.float32
    flat = shard.get("flat_range")
    flat_range = None if flat is None else slice(*ints_from_json(flat))
    return ShardedTensor(key, None, dtype, shape, whole, offset, None, flattened_range=flat_range)


def of_function(name: str, world_size: int) -> list[RankWants]:
    """The ranks whose sharded state dicts ``module:function(rank, world_size)`` returns.

    It is called with PyTorch's default device set to "meta", so that the tensors it makes take no
    memory.

    Raises:
        ValueError: if there is no such function, or it fails.
    """
    function = _imported(name)
    wants = []
    for rank in range(world_size):
        try:
            with torch.device("meta"):
                parts = partition(function(rank, world_size))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}({rank}, {world_size}) failed: {what}") from error
        tensors = {path: leaf.without_data() for path, leaf in parts.tensors.items()}
        wants.append(RankWants((rank,), tensors, tuple(parts.objects.values())))
    return wants


def _imported(name: str) -> Callable[[int, int], Any]:
    module_name, _, attribute = name.partition(":")
    # As `python -m` does it: what lies in the current folder can be imported.
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot import {name!r}: {what}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")  # noqa: TRY004 - a text
    return function  # type: ignore[no-any-return]


def unknown_objects(wants: Sequence[RankWants], stored: Container[str]) -> list[Finding]:
    """The sharded objects that a template wants and the checkpoint does not have."""
    missing: dict[str, list[int]] = {}
    for want in wants:
        for leaf in want.objects:
            if leaf.key not in stored:
                missing.setdefault(leaf.unique_key, []).extend(want.ranks)
    return [
        Finding("object not in the checkpoint", key, ranks=tuple(ranks))
        for key, ranks in sorted(missing.items())
    ]
