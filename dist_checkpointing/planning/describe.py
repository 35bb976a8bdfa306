"""This rank's leaves as a table: checked and turned into columns all at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import MAX_EXTENT, Box
from dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
    tensor_memory,
)
from dist_checkpointing.mapping.sharded_tensor import fields_of
from dist_checkpointing.planning.shard_table import (
    OBJECT,
    Bools,
    ShardRow,
    ShardTable,
    table_of,
    table_of_rows,
)


def describe(leaves: Sequence[ShardedBase], rank: int) -> ShardTable:
    """The table of this rank's tensors and objects, in the given order.

    Raises:
        InvalidShardingError: for a leaf whose fields contradict each other (they are mutable, so
            they are checked again here), a dtype that cannot be stored or an empty key.
    """
    table = _columns(leaves, rank)
    if table is not None:
        return table
    # One by one, to say of each what is wrong with it.
    findings: list[Finding] = []
    rows: list[ShardRow] = []
    for source, leaf in enumerate(leaves):
        try:
            rows.append(_row(leaf, source))
        except InvalidShardingError as error:
            findings += error.findings
    if findings:
        raise InvalidShardingError("the sharded state dict is invalid", findings)
    return table_of_rows(rank, rows)


def _columns(leaves: Sequence[ShardedBase], rank: int) -> ShardTable | None:
    """The table, unless there is anything unusual about any leaf: ``_row`` knows what it is."""
    if not leaves or not {ShardedTensor, ShardedObject}.issuperset(map(type, leaves)):
        return None
    rows = [
        (*fields_of(leaf), leaf.data) if type(leaf) is ShardedTensor else _object(leaf)
        for leaf in leaves
    ]
    keys, types, local, whole, offsets, grids, replicas, prepended, padding, ranges, data = zip(
        *rows, strict=True
    )
    del rows
    try:
        if not (
            {str}.issuperset(map(type, keys))
            and all(keys)
            and "".join(keys).encode()
            and all(map(_are_ints, (local, whole, offsets)))
            and _are_ints([(number,) for number in prepended])
            and min(prepended) >= 0
            and _are_ints([r if type(r) is tuple else (r,) for r in replicas])
            and _are_ints([(r.start, r.stop) for r in ranges if r is not None])
            and all(r is None or r.step is None for r in ranges)
            and all(map(_fits, data, types, local, ranges))
        ):
            return None
        name_of = {
            t: OBJECT if t is OBJECT else tensor_memory.from_torch(t).name for t in set(types)
        }
        dtype_names = [name_of[dtype] for dtype in types]
        boxes: Sequence[Any] = local
        if any(prepended):
            boxes = [(1,) * more + own for more, own in zip(prepended, local, strict=True)]
        ndim = list(map(len, whole))
        if not list(map(len, offsets)) == list(map(len, boxes)) == ndim:
            return None
        flat = [None if r is None else (r.start, r.stop) for r in ranges]
        is_main = {replica: is_main_replica(replica) for replica in set(replicas)}
        main = [is_main[replica] for replica in replicas]
        columns = (keys, dtype_names, whole, offsets, boxes, flat, main, range(len(leaves)))
        table = table_of(rank, *columns)
        is_flat = np.array([r is not None for r in ranges])
        is_padded = np.array([bool(may) for may in padding])
        is_right = _is_right(table, is_flat, is_padded) and _are_on_grid(table, grids)
    except (AttributeError, TypeError, UnicodeEncodeError, OverflowError, InvalidShardingError):
        return None
    return table if is_right else None


def _object(leaf: Any) -> tuple[Any, ...]:
    cell = (1,) * len(leaf.global_shape)
    shape, offset = leaf.global_shape, leaf.global_offset
    return leaf.key, OBJECT, cell, shape, offset, None, leaf.replica_id, 0, True, None, None


def _are_ints(rows: Sequence[Any]) -> bool:
    """Whether all are tuples of ints."""
    # type() and not isinstance(): True is an int to Python, and a subclass may be anything.
    return {tuple}.issuperset(map(type, rows)) and {int}.issuperset(
        map(type, itertools.chain.from_iterable(rows))
    )


def _fits(data: Any, dtype: Any, local_shape: Any, flat: Any) -> bool:
    if data is None or dtype is OBJECT:
        return True
    if not isinstance(data, torch.Tensor) or data.is_nested or data.dtype != dtype:
        return False
    shape = local_shape if flat is None else (flat.stop - flat.start,)
    return bool(data.shape == shape)


def _is_right(table: ShardTable, is_flat: Bools, is_padded: Bools) -> bool:
    """Whether numbers are extents, shards lie in their tensors, and ranges in their shards."""
    columns = (table.global_shapes, table.offsets, table.shapes)
    if any((c < 0).any() or (c >= MAX_EXTENT).any() for c in columns):
        return False
    start, stop = table.flat[is_flat].T
    sizes = table.shapes[is_flat].astype(np.float64).prod(axis=1)
    inside = (table.offsets + table.shapes <= table.global_shapes).all(axis=1)
    return bool(
        (inside | is_padded).all()
        and (sizes < MAX_EXTENT).all()
        and ((start >= 0) & (start <= stop)).all()
        and (stop <= table.shapes[is_flat].prod(axis=1)).all()
    )


def _are_on_grid(table: ShardTable, grids: Sequence[Any]) -> bool:
    """Whether shards that name a regular grid begin at a multiple of their shape."""
    rows = np.array([grid is not None for grid in grids], dtype=np.bool_)
    counts = [grid for grid in grids if grid is not None]
    if not _are_ints(counts) or list(map(len, counts)) != table.ndim[rows].tolist():
        return False
    if min(itertools.chain.from_iterable(counts), default=1) < 1:
        return False
    return not (table.offsets[rows] % np.maximum(table.shapes[rows], 1)).any()


def _row(leaf: ShardedBase, source: int) -> ShardRow:
    key: object = leaf.key
    if not isinstance(key, str) or not key:
        finding = Finding("a key must be a string that is not empty", found=repr(key))
        raise InvalidShardingError("invalid key", [finding])
    try:
        key.encode()
    except UnicodeEncodeError as error:
        finding = Finding(f"a key must be text that UTF-8 can hold: {error}", found=repr(key))
        raise InvalidShardingError("invalid key", [finding]) from error
    leaf.validate_metadata_integrity()
    main = is_main_replica(leaf.replica_id)
    if isinstance(leaf, ShardedTensor):
        box, flat, dtype = (
            leaf.box,
            leaf.flat_range,
            tensor_memory.from_torch(leaf.dtype, key=key).name,
        )
    elif isinstance(leaf, ShardedObject):
        cell = (1,) * len(leaf.global_shape)
        box, flat, dtype = Box(tuple(leaf.global_offset), cell), None, OBJECT
    else:
        finding = Finding("cannot be described", key, found=type(leaf).__name__)
        raise InvalidShardingError("unknown kind of sharded leaf", [finding])
    shape = tuple(leaf.global_shape)
    return ShardRow(key, dtype, shape, box.offset, box.shape, flat, main, source)
