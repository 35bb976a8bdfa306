"""Which ranks hold copies of the same part of a global tensor, and which parts overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dist_checkpointing.format.geometry import Box, boxes_of_part
from dist_checkpointing.format.pieces import changes
from dist_checkpointing.planning.shard_table import Bools, Int32s, Int64s, ShardTable, concatenate

_MOST_CROSSINGS: Final = 4096
"""Boxes of one part that are compared, each by itself."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A box that two parts have in common that are cut differently; one is of a main replica."""

    part: int
    main: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """The distinct parts that ranks hold: those with the same key, dtype, box and flattened range.

    A *unit* is what is compared: a part, or (numbered behind the parts) a crossing of two parts.
    All of it is the same on all ranks, but for ``own``. With ``D`` distinct rows of all ranks it
    takes ``O(D)`` memory, whatever the number of replicas.

    Attributes:
        parts: One row a part, sorted by key, with the lowest rank that holds it.
        rows: Rows of the catalog, part by part.
        begins: ``[parts + 1]``, where the rows of each part begin.
        catalog: The shards of all ranks.
        own: ``[rows of this rank]``, the part that each is.
        crossings: What parts that are cut differently have in common, see ``with_crossings``.
        num_apart: Number of parts of replicas that are not made up of few of these.
    """

    parts: ShardTable
    rows: Int64s
    begins: Int64s
    catalog: ShardTable
    own: Int64s
    crossings: Sequence[Crossing] = ()
    num_apart: int = 0

    @property
    def has_copies(self) -> Bools:
        """``[parts]``, whether several ranks hold a part, or one of them twice."""
        sizes = np.ones(len(self.rows), dtype=np.int64)
        if self.catalog.holders is not None:
            held = np.array([len(ranks) for ranks in self.catalog.holders], dtype=np.int64)
            sizes = held[self.catalog.ranks[self.rows]]
        return np.add.reduceat(sizes, self.begins[:-1]) > 1 if len(self.parts) else sizes > 1

    def holders(self, part: int) -> Int32s:
        """All ranks that hold a part, ascending."""
        return self.catalog.ranks_of(self.rows[self.begins[part] : self.begins[part + 1]])

    def speakers(self) -> list[int]:
        """The rank that tells the digest of each unit."""
        first: list[int] = self.parts.ranks.tolist()
        return first + [first[crossing.main] for crossing in self.crossings]

    def compared(self, unit: int) -> list[int]:
        """The ranks that compare a unit: those of the main replica first, if it is a crossing."""
        if unit < len(self.parts):
            ranks: list[int] = self.holders(unit).tolist()
            return ranks
        crossing = self.crossings[unit - len(self.parts)]
        return [*dict.fromkeys(self.parts.ranks[[crossing.main, crossing.part]].tolist())]

    def place(self, unit: int) -> tuple[int, Box, tuple[int, int] | None]:
        """Row of ``parts`` with key and dtype of a unit, its box and its flattened range."""
        if unit < len(self.parts):
            return unit, self.parts.box(unit), self.parts.flat_range(unit)
        crossing = self.crossings[unit - len(self.parts)]
        return crossing.part, crossing.box, None


def copies_of(catalog: ShardTable, own: ShardTable) -> Copies:
    """Find the copies in what all ranks hold, sorted by key."""
    marked = [
        replace(
            table,
            ranks=np.full(len(table), rank, np.int32),
            sources=np.arange(len(table), dtype=np.int32),
        )
        for rank, table in enumerate((catalog, own))
    ]
    both = concatenate([replace(table, holders=None) for table in marked])
    columns = [both.keys, both.dtypes, *both.offsets.T, *both.shapes.T, *both.flat.T]
    order = np.lexsort([both.ranks, *columns[::-1]])
    both = both.take(order)
    is_new = changes(columns, order)
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


def with_crossings(copies: Copies) -> Copies:
    """The copies, and what parts have in common with main replicas that are cut differently."""
    parts = copies.parts
    if not len(parts):
        return copies
    is_main = np.logical_or.reduceat(copies.catalog.main[copies.rows], copies.begins[:-1])
    crossings: list[Crossing] = []
    num_apart = 0
    apart = np.flatnonzero(~is_main & (parts.num_elements > 0))
    for key in np.unique(parts.keys[apart]).tolist():
        first, last = (int(np.searchsorted(parts.keys, key, side)) for side in ("left", "right"))
        rows = np.arange(first, last)
        mains = [
            (row, box)
            for row in rows[is_main[rows]].tolist()
            for box in boxes_of_part(parts.box(row), parts.flat_range(row))
        ]
        if not mains:
            num_apart += int(((apart >= first) & (apart < last)).sum())
            continue
        dtypes = parts.dtypes[[row for row, _ in mains]]
        starts, stops = (
            np.array(ends, dtype=np.int64).reshape(len(mains), -1)
            for ends in ([box.offset for _, box in mains], [box.stop for _, box in mains])
        )
        for part in apart[(apart >= first) & (apart < last)].tolist():
            own = []
            for box in boxes_of_part(parts.box(part), parts.flat_range(part)):
                meets = ((starts < box.stop) & (stops > box.offset)).all(axis=1)
                for number in np.flatnonzero(meets & (dtypes == parts.dtypes[part])).tolist():
                    main, of_main = mains[number]
                    common = of_main.intersect(box)
                    if common is not None:
                        own.append(Crossing(part, main, common))
            num_common = sum(crossing.box.num_elements for crossing in own)
            if len(own) <= _MOST_CROSSINGS and num_common == parts.num_elements[part]:
                crossings += own
            else:
                num_apart += 1
    return replace(copies, crossings=crossings, num_apart=num_apart)


def _first_ranks(catalog: ShardTable) -> Int32s:
    """The lowest rank that holds each row."""
    if catalog.holders is None:
        return catalog.ranks
    return np.array([held[0] for held in catalog.holders], dtype=np.int32)[catalog.ranks]
