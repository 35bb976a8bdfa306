"""Chunk grids of an earlier checkpoint, taken over where its chunks make up those of a plan.

A new chunk that is larger than those of the base is not there as a whole: only in their cut can a
save share them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.cutting import concatenate_cuts, cut_along_grid
from dist_checkpointing.planning.items import SavePlan

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
