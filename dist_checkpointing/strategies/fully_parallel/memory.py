"""Whose memory a unit is: from leaves to what a rank reads, and to where what it gets must go."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dist_checkpointing.errors import Finding, StateMismatchError
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nesting import DictKey
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.strategies.fully_parallel.sharing import Sharing, Unit


def own_share(
    leaves: Leaves, sharing: Sharing, rank: int
) -> tuple[dict[Any, ShardedBase], dict[int, torch.Tensor]]:
    """The leaves that this rank reads, and the array of every unit that it wants."""
    paths = list(leaves)
    shared = {source for unit in sharing.units for source in unit.sources}
    own = {path: leaves[path] for source, path in enumerate(paths) if source not in shared}
    arrays: dict[int, torch.Tensor] = {}
    for number, unit in enumerate(sharing.units):
        if not unit.sources:
            continue
        path = paths[unit.sources[0]]
        leaf = leaves[path]
        assert isinstance(leaf, ShardedTensor)
        if leaf.data is not None:
            arrays[number] = _array(leaf.data, unit)
        if unit.reader != rank:
            continue
        if unit.is_whole:
            own[path] = leaf
        else:
            own[*path, DictKey(number)] = _rows(leaf, arrays[number], unit)
    return own, arrays


def _array(data: torch.Tensor, unit: Unit) -> torch.Tensor:
    """The memory of a whole part, with the axes that exist only globally."""
    return data.detach()[(None,) * (len(unit.shape) - data.ndim)]


def _rows(leaf: ShardedTensor, array: torch.Tensor, unit: Unit) -> ShardedTensor:
    """Some rows of a leaf as a leaf of its own."""
    offset = tuple(a + b for a, b in zip(leaf.global_offset, unit.box.offset, strict=True))
    return replace(
        leaf,
        data=array[unit.box.slices()],
        local_shape=unit.box.shape,
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


def with_memory(leaves: Leaves, sharing: Sharing, rank: int) -> dict[Any, ShardedBase]:
    """Copies of the leaves, with memory for what other ranks read."""
    paths = list(leaves)
    copies = {path: copy.copy(leaf) for path, leaf in leaves.items()}
    for unit in sharing.units:
        for source in unit.sources[0 if unit.reader != rank else 1 :]:
            leaf = copies[paths[source]]
            assert isinstance(leaf, ShardedTensor)
            leaf.init_data("cpu")
    return copies


def as_read(
    paths: list[Any], leaves: Leaves, values: Mapping[Any, Any], sharing: Sharing, rank: int
) -> dict[int, torch.Tensor]:
    """The arrays that this rank has read, wherever the strategy has put them.

    Raises:
        StateMismatchError: if it returned something of another shape or dtype.
    """
    arrays: dict[int, torch.Tensor] = {}
    findings = []
    for number, unit in enumerate(sharing.units):
        if unit.reader != rank:
            continue
        path = paths[unit.sources[0]]
        leaf, value = leaves[path], values[path]
        assert isinstance(leaf, ShardedTensor)
        flat = leaf.flat_range
        shape = tuple(leaf.local_shape) if flat is None else (flat[1] - flat[0],)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, leaf.dtype):
            found = getattr(value, "dtype", type(value).__name__), getattr(value, "shape", "")
            problem = "the strategy returned something else than it was asked for"
            findings.append(Finding(problem, leaf.key, expected=(leaf.dtype, shape), found=found))
        else:
            arrays[number] = _array(value, unit)
    if findings:
        raise StateMismatchError("what was read cannot be passed on", findings)
    return arrays


def fill_doubles(leaves: Leaves, sharing: Sharing, arrays: Mapping[int, torch.Tensor]) -> None:
    """Fill the other leaves of this rank that want the same as its first."""
    listed = list(leaves.values())
    for number, unit in enumerate(sharing.units):
        for source in unit.sources[1:]:
            leaf = listed[source]
            assert isinstance(leaf, ShardedTensor)
            assert leaf.data is not None
            rows = unit.box.slices()
            _array(leaf.data, unit)[rows].copy_(arrays[number][rows])
