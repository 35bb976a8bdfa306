"""Shards cut into what is stored, along a grid, in rows or in ranges: all rows of a table at once.

Every function that cuts returns the parts as a table, and for each of them the row that it was cut
from. The parts of a row follow each other in C order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from dist_checkpointing.format.geometry import Ints, split_flat_range
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.items import SavePlan
from dist_checkpointing.planning.segments import counted
from dist_checkpointing.planning.shard_table import Int64s, ShardTable

CutRows = tuple[ShardTable, Int64s]


def cut_along_grid(table: ShardTable, chunks: Int64s) -> CutRows:
    """Boxes cut along the chunks that they meet: ``[rows, axes]``, at least 1."""
    first = table.offsets // chunks
    counts = (table.offsets + table.shapes - 1) // chunks - first + 1
    totals = np.where(table.shapes.all(axis=1), counts.prod(axis=1), 0)
    origins, place = counted(totals)
    parts = table.take(origins)
    begins, ends = parts.offsets.copy(), parts.offsets + parts.shapes
    for axis in reversed(range(table.max_ndim)):
        place, step = np.divmod(place, counts[origins, axis])
        extent = chunks[origins, axis]
        begin = (first[origins, axis] + step) * extent
        begins[:, axis] = np.maximum(begin, begins[:, axis])
        ends[:, axis] = np.minimum(begin + extent, ends[:, axis])
    return replace(parts, offsets=begins, shapes=ends - begins), origins


def cut_ranges(table: ShardTable, most: Int64s) -> CutRows:
    """Flattened ranges cut into ranges of at most so many elements."""
    start, stop = table.flat.T
    origins, place = counted(-(-(stop - start) // most))
    begins = start[origins] + place * most[origins]
    ends = np.minimum(begins + most[origins], stop[origins])
    return replace(table.take(origins), flat=np.stack([begins, ends], axis=1)), origins


def cut_into_boxes(table: ShardTable) -> CutRows:
    """Flattened ranges as the boxes that they consist of, behind the rows that are boxes."""
    is_flat = table.flat[:, 0] >= 0
    rows = np.flatnonzero(is_flat)
    cut = [
        split_flat_range(table.box(row).shape, *table.flat[row].tolist()) for row in rows.tolist()
    ]
    origins = np.repeat(rows, np.array([len(boxes) for boxes in cut], dtype=np.int64))
    parts = table.take(origins)
    offsets, shapes = parts.offsets.copy(), parts.shapes.copy()
    for part, box in enumerate(itertools.chain.from_iterable(cut)):
        ndim = len(box.shape)
        offsets[part, :ndim] += np.array(box.offset, dtype=np.int64)
        shapes[part, :ndim] = box.shape
    boxes = replace(parts, offsets=offsets, shapes=shapes, flat=np.full_like(parts.flat, -1))
    return concatenate_cuts([(table.take(~is_flat), np.flatnonzero(~is_flat)), (boxes, origins)])


def cut_rows(table: ShardTable, most: Int64s) -> CutRows:
    """Boxes cut as ``geometry.split_rows`` cuts one: every part is one run of its box."""
    origins = np.arange(len(table))
    offsets, shapes = table.offsets, table.shapes
    while True:
        sizes = shapes.prod(axis=1)
        is_large = sizes > most[origins]
        if not is_large.any():
            parts = replace(table.take(origins), offsets=offsets, shapes=shapes)
            return parts, origins
        axis = (shapes > 1).argmax(axis=1)[:, None]
        extent = np.take_along_axis(shapes, axis, 1)[:, 0]
        row_elements = sizes // np.maximum(extent, 1)
        step = np.maximum(1, most[origins] // np.maximum(row_elements, 1))
        step = np.where(is_large, step, np.maximum(extent, 1))
        rows, place = counted(np.where(is_large, -(-extent // step), 1))
        begin, axis = place * step[rows], axis[rows]
        offsets, shapes, origins = offsets[rows], shapes[rows], origins[rows]
        moved = np.take_along_axis(offsets, axis, 1) + begin[:, None]
        np.put_along_axis(offsets, axis, moved, 1)
        kept = np.where(is_large[rows], np.minimum(step[rows], extent[rows] - begin), extent[rows])
        np.put_along_axis(shapes, axis, kept[:, None], 1)


def concatenate_cuts(parts: list[CutRows]) -> CutRows:
    """Cuts of one table together, those of one row in their order."""
    table, origins = parts[0]
    for other, rows in parts[1:]:
        if len(rows):
            table, origins = table.followed_by(other), np.concatenate([origins, rows])
    return table, origins


_MOST_CHUNKS: Final = 64
"""Chunks of the base in a new one: more would make files and tables larger and larger."""


def nested_grids(index: Index, base: Index) -> dict[str, Ints]:
    """The chunk shapes of a base that make up larger ones of a new checkpoint, by key."""
    columns = (
        index.keys_column,
        index.dtype_column,
        index.global_shape_column,
        index.chunk_shape_column,
    )
    found = {}
    for key, dtype, shape, own in zip(*columns, strict=True):
        theirs = base.chunk_shape(key)
        if own is None or theirs is None or tuple(own) == tuple(theirs):
            continue
        is_same = base[key].dtype.name == dtype and len(theirs) == len(own)
        if is_same and _makes_up(tuple(theirs), tuple(own), tuple(shape)):
            found[key] = tuple(theirs)
    return found


def _makes_up(part: Ints, whole: Ints, shape: Ints) -> bool:
    """Whether chunks consist of smaller ones; one that spans an axis may end with the tensor."""
    axes = zip(part, whole, shape, strict=True)
    nests = all(p <= w and (w % p == 0 or w >= extent) for p, w, extent in axes)
    return nests and math.prod(whole) <= _MOST_CHUNKS * math.prod(part)


def along_grids(plan: SavePlan, grids: Mapping[str, Ints]) -> SavePlan:
    """A plan of whole chunks, cut along other grids that ``nested_grids`` has found."""
    table, index = plan.table, plan.index
    assert index is not None
    rows = zip(index.keys_column, index.chunk_shape_column, strict=True)
    index = replace(index, chunk_shape_column=[grids.get(key, own) for key, own in rows])
    is_cut = np.array([name in grids for name in table.names], dtype=np.bool_)[table.keys]
    is_cut &= ~table.is_object
    if is_cut.any():
        own = table.take(np.flatnonzero(is_cut))
        chunks = index.chunk_shapes[index.rows_of(table.names)[own.keys], : table.max_ndim]
        kept = (table.take(np.flatnonzero(~is_cut)), np.flatnonzero(~is_cut))
        table, _ = concatenate_cuts([kept, cut_along_grid(own, chunks)])
    return replace(plan, table=table, index=index)
