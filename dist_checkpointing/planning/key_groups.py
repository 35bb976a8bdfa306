"""Which tensors of a catalog are cut along a chunk grid: found for all keys at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable


@dataclass(frozen=True, eq=False)
class KeyGroups:
    """The rows of a table sorted by key, seen as one group a key.

    Attributes:
        table: Sorted by key.
        counted: The rows that make up the tensors; the others only announce their key.
    """

    table: ShardTable
    counted: Bools

    @cached_property
    def starts(self) -> Int64s:
        """First row of each group."""
        keys = self.table.keys
        return np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]][: len(keys)])

    @cached_property
    def of_row(self) -> Int64s:
        sizes = np.diff(np.r_[self.starts, len(self.table)])
        return np.repeat(np.arange(len(self.starts)), sizes)

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, group: int) -> Int64s:
        end = self.starts[group + 1] if group + 1 < len(self) else len(self.table)
        return np.arange(self.starts[group], end)

    def any_row(self, mask: Bools) -> Bools:
        """Per group: whether the mask holds for any row."""
        return np.bincount(self.of_row[mask], minlength=len(self)) > 0

    @cached_property
    def global_shapes(self) -> Int64s:
        """``[groups, axes]``."""
        return self.table.global_shapes[self.starts]

    @cached_property
    def chunk_shapes(self) -> Int64s:
        """``[groups, axes]``: the largest extents, which are the chunk if there is a grid."""
        shapes = np.where(self.counted[:, None], self.table.shapes, 1)
        if not len(self):
            return shapes
        return np.maximum(np.maximum.reduceat(shapes, self.starts, axis=0), 1)

    @cached_property
    def is_grid(self) -> Bools:
        """Per group: whether every counted row is exactly one chunk of the grid."""
        table, chunk = self.table, self.chunk_shapes[self.of_row]
        clipped = np.minimum(chunk, table.global_shapes - table.offsets)
        fits = (table.offsets % chunk == 0).all(axis=1) & (table.shapes == clipped).all(axis=1)
        fits &= table.flat[:, 0] < 0
        return ~self.any_row(self.counted & ~fits)

    @cached_property
    def num_chunks(self) -> Int64s:
        """Per group: chunks in the grid; 0 for a tensor without elements."""
        counts: Int64s = (-(-self.global_shapes // self.chunk_shapes)).prod(axis=1)
        return counts

    @cached_property
    def is_covered_grid(self) -> Bools:
        """Per group: whether there is a grid and every chunk of it is held exactly once."""
        held = np.bincount(self.of_row[self.counted], minlength=len(self))
        counts = -(-self.global_shapes // self.chunk_shapes)
        index = self.table.offsets // self.chunk_shapes[self.of_row]
        chunk = np.zeros(len(self.table), dtype=np.int64)
        for axis in range(self.table.max_ndim):
            chunk = chunk * counts[self.of_row, axis] + index[:, axis]
        first_chunk = np.cumsum(self.num_chunks) - self.num_chunks
        place = (chunk + first_chunk[self.of_row])[self.counted & self.is_grid[self.of_row]]
        is_ascending = bool((place[1:] > place[:-1]).all())
        unique = place if is_ascending else np.unique(place)
        owner = np.searchsorted(first_chunk + self.num_chunks, unique, side="right")
        distinct = np.bincount(owner, minlength=len(self))[: len(self)]
        result: Bools = self.is_grid & (held == self.num_chunks) & (distinct == self.num_chunks)
        return result
