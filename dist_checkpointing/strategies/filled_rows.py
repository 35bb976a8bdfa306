"""Many small stored parts that a load puts into memory, found and compared as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np

from dist_checkpointing.format.checksums import ChecksumColumns, StoredPart, checksums_at
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.pieces import padded, padded_rows
from dist_checkpointing.planning.read_table import contiguous_ranges
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.planning.wanted import WantedLeaves
from dist_checkpointing.strategies.raw_chunks import SMALL_BYTES

_BLOCK_ROWS: Final = 1024
_MOST_ELEMENTS: Final = 2.0**40
"""Of a tensor; more may not fit into a column."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledRows:
    """Stored parts that a load puts whole and as they are into runs of CPU memory, one a row."""

    table: ChecksumColumns
    addresses: Int64s
    num_bytes: Int64s

    def differing(self, report: Callable[[int], None]) -> list[tuple[StoredPart, int]]:
        """The parts whose memory does not have the checksum of the save, with the one it has."""
        differ: list[tuple[StoredPart, int]] = []
        for start in range(0, len(self.addresses), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            num_bytes = self.num_bytes[block]
            found = checksums_at(self.addresses[block], num_bytes)
            is_other = found != self.table.digests[block]
            if is_other.any():
                parts = self.table.parts(start + np.flatnonzero(is_other))
                differ += zip(parts, found[is_other].tolist(), strict=True)
            report(int(num_bytes.sum()))
        return differ


def filled_rows(
    tables: Sequence[ChecksumColumns], wanted: WantedLeaves, index: Index
) -> tuple[list[FilledRows], Bools]:
    """The small stored parts that lie in runs of the memory of leaves.

    Returns:
        Such parts; and for which tensors they are everything. The checksums cover such a tensor
        once, and its leaf gets nothing of a part that is not among the rows. The parts of the other
        tensors must be looked at one by one.
    """
    own, shards = wanted.tensors, wanted.shards
    itemsizes = index.itemsizes_of(own.keys)
    shapes, _ = index.shapes_of(own.keys)
    ndim = np.fromiter(map(len, shapes), dtype=np.int32, count=len(shapes))
    stored = padded_rows(shapes, 1)
    is_whole = _lie_as_stored(wanted, index, itemsizes) & (ndim == shards.ndim)
    is_whole &= stored.astype(np.float64).prod(axis=1) < _MOST_ELEMENTS
    leaf_of = {key: leaf for leaf, key in enumerate(own.keys)}
    if len(leaf_of) < len(own):
        times = Counter(own.keys)
        is_whole &= [times[key] == 1 for key in own.keys]
    counted = np.zeros(len(own), dtype=np.int64)
    found = []
    for table in tables:
        names = np.fromiter(map(leaf_of.get, table.names, repeat(-1)), dtype=np.int64)
        leaves = np.where(table.is_object == 0, names[table.keys], -1)
        rows = np.flatnonzero(leaves >= 0)
        leaves = leaves[rows]
        placed = _placed(table, rows, wanted, leaves)
        is_whole[leaves[placed.is_other]] = False
        np.add.at(counted, leaves, placed.counts)
        found.append((table, rows, leaves, placed))
    is_whole &= counted == stored.prod(axis=1)
    direct = []
    for table, rows, leaves, placed in found:
        kept = placed.is_direct & is_whole[leaves]
        items = itemsizes[leaves[kept]]
        addresses = own.addresses[leaves[kept]] + placed.starts[kept] * items
        # With the keys of the leaves, because those of the table take as much memory again.
        own_rows = table.renamed(rows[kept], own.keys, leaves[kept])
        direct.append(FilledRows(own_rows, addresses, placed.counts[kept] * items))
    return direct, is_whole


def _lie_as_stored(wanted: WantedLeaves, index: Index, itemsizes: Int64s) -> Bools:
    """Which tensors lie in CPU memory in C order, and in the stored dtype."""
    own, flat = wanted.tensors, wanted.shards.flat
    numbers, types = index.dtypes_of(own.keys)
    known = {dtype.torch: number for number, dtype in enumerate(types) if dtype is not None}
    is_right: Bools = numbers == [known.get(dtype, -1) for dtype in own.data_dtypes]
    counts = wanted.shards.shapes.prod(axis=1)
    counts = np.where(flat[:, 0] >= 0, flat[:, 1] - flat[:, 0], counts)
    is_right &= (own.addresses >= 0) & (own.num_bytes == counts * itemsizes)
    return is_right


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Where stored parts lie in the memory of leaves.

    Attributes:
        starts: First element in the memory of the leaf.
        counts: Elements of each part.
        is_direct: Whether the part is one run there.
        is_other: Whether it is not, though the leaf gets something of it, or is not small.
    """

    starts: Int64s
    counts: Int64s
    is_direct: Bools
    is_other: Bools


def _placed(table: ChecksumColumns, rows: Int64s, wanted: WantedLeaves, leaves: Int64s) -> _Placed:
    """Where some rows lie in the memory of their leaves."""
    shards, ndim = wanted.shards, table.ndim[rows]
    width = shards.offsets.shape[1]
    is_axis = np.arange(table.offsets.shape[1]) < ndim[:, None]
    offsets = padded(np.where(is_axis, table.offsets[rows], 0), width, 0)[:, :width]
    extents = padded(np.where(is_axis, table.shapes[rows], 1), width, 1)[:, :width]
    flat, own_flat = table.flat[rows], shards.flat[leaves]
    begin, shapes = shards.offsets[leaves], shards.shapes[leaves]
    is_flat = flat[:, 0] >= 0
    is_small = (
        (ndim == shards.ndim[leaves]) & (extents > 0).all(axis=1) & (offsets >= 0).all(axis=1)
    )
    is_small &= extents.astype(np.float64).prod(axis=1) <= SMALL_BYTES
    extents = np.where(is_small[:, None], extents, 1)
    counts = np.where(is_flat, flat[:, 1] - flat[:, 0], extents.prod(axis=1))
    is_small &= (counts > 0) & (counts <= SMALL_BYTES)
    within = offsets - begin
    is_inside = ((within >= 0) & (within + extents <= shapes)).all(axis=1)
    meets = ((within < shapes) & (within + extents > 0)).all(axis=1)
    zeros = np.zeros(len(rows), dtype=np.int64)
    starts, is_run = contiguous_ranges(zeros, shapes, within, extents)
    is_same = (within == 0).all(axis=1) & (extents == shapes).all(axis=1)
    is_same &= (flat == own_flat).all(axis=1)
    is_plain = ~is_flat & (own_flat[:, 0] < 0)
    is_direct = is_small & (is_flat & is_same | is_plain & is_inside & is_run)
    starts[is_flat] = 0
    is_other = ~is_small | meets & ~is_direct
    return _Placed(starts, np.where(is_small, counts, 0), is_direct, is_other)
