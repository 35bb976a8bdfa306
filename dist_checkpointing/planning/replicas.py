"""Which ranks hold copies of the same part of a global tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dist_checkpointing.planning.shard_table import Int32s, Int64s, ShardTable, concatenate


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The distinct parts that ranks hold: those with the same key, dtype, box and flattened range.

    It is the same on all ranks, but for ``own``. With ``D`` distinct rows of all ranks it takes
    ``O(D)`` memory, whatever the number of replicas.

    Attributes:
        parts: One row a part, sorted by key, with the lowest rank that holds it.
        rows: Rows of the catalog, part by part.
        begins: ``[parts + 1]``, where the rows of each part begin.
        catalog: The shards of all ranks.
        own: ``[rows of this rank]``, the part that each is.
    """

    parts: ShardTable
    rows: Int64s
    begins: Int64s
    catalog: ShardTable
    own: Int64s

    def holders(self, part: int) -> Int32s:
        """All ranks that hold a part, ascending."""
        return self.catalog.ranks_of(self.rows[self.begins[part] : self.begins[part + 1]])


def copies_of(catalog: ShardTable, own: ShardTable) -> Copies:
    """Find the copies.

    Args:
        catalog: The shards of all ranks, sorted by key.
        own: Those of this rank.
    """
    marked = [
        replace(table, ranks=np.full(len(table), rank, np.int32), sources=_numbers(table))
        for rank, table in enumerate((catalog, own))
    ]
    both = concatenate([replace(table, holders=None) for table in marked])
    columns = [both.keys, both.dtypes, *both.offsets.T, *both.shapes.T, *both.flat.T]
    order = np.lexsort([both.ranks, *columns[::-1]])
    both = both.take(order)
    is_new = np.ones(len(both), dtype=np.bool_)
    is_new[1:] = False
    for column in (both.keys, both.dtypes, *both.offsets.T, *both.shapes.T, *both.flat.T):
        is_new[1:] |= column[1:] != column[:-1]
    number = np.cumsum(is_new) - 1
    is_own = both.ranks == 1
    own_parts = np.empty(len(own), dtype=np.int64)
    own_parts[both.sources[is_own]] = number[is_own]
    rows = both.sources[~is_own].astype(np.int64)
    begins = np.searchsorted(number[~is_own], np.arange(int(is_new.sum()) + 1))
    parts = both.take(is_new)
    if len(parts):
        first = _first_ranks(catalog)[rows]
        parts = replace(parts, ranks=np.minimum.reduceat(first, begins[:-1]))
    return Copies(parts, rows, begins, catalog, own_parts)


def _numbers(table: ShardTable) -> Int32s:
    return np.arange(len(table), dtype=np.int32)


def _first_ranks(catalog: ShardTable) -> Int32s:
    """The lowest rank that holds each row."""
    if catalog.holders is None:
        return catalog.ranks
    return np.array([held[0] for held in catalog.holders], dtype=np.int32)[catalog.ranks]
