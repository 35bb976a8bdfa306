"""What every rank of a topology would ask a checkpoint for: leaves without data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.mapping.state_dict_parts import partition
from dist_checkpointing.tools.forecast.topology import KeyCut, part_of


@dataclass(frozen=True, slots=True)
class RankWants:
    """What some ranks want, all of them the same.

    Attributes:
        ranks: Ranks that want this.
        tensors: Shards without data, by path.
        objects: Cells of sharded objects.
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
                (DictKey(cut.key),): ShardedTensor.of_box(
                    index[cut.key], part_of(index[cut.key], cut, part, parts)
                )
                for cut in cuts
            },
        )
        for part in range(parts)
    ]


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
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is not of the form MODULE:FUNCTION")
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
