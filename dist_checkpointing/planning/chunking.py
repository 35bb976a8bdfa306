"""How each tensor is cut up on disk, and the rows of a plan cut along it: chunk grid, row blocks,
pieces.

Every function that cuts returns the parts as a table, and for each of them the row that it was cut
from. The parts of a row follow each other in C order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from dist_checkpointing.format.geometry import (
    Ints,
    PieceColumns,
    Pieces,
    boxes_of_part,
    largest_divisor_block,
    padded_rows,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.shard_table import (
    Bools,
    Int64s,
    ShardTable,
    concatenate,
    counted,
    shared_shapes,
)

CutRows = tuple[ShardTable, Int64s]
Parts = tuple[Sequence[Ints | None], Mapping[str, Pieces]]
"""Chunk shape of each tensor, None where it is stored as pieces; and the pieces."""


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
    is_box = table.flat[:, 0] < 0
    rows = np.flatnonzero(~is_box)
    cut = [boxes_of_part(table.box(row), table.flat_range(row)) for row in rows.tolist()]
    origins = np.repeat(rows, np.array([*map(len, cut)], dtype=np.int64))
    boxes, width = [*itertools.chain.from_iterable(cut)], table.max_ndim
    parts = replace(
        table.take(origins),
        offsets=padded_rows([box.offset for box in boxes], 0, width),
        shapes=padded_rows([box.shape for box in boxes], 1, width),
        flat=np.full((len(boxes), 2), -1, dtype=np.int64),
    )
    return concatenate_cuts([(table.take(is_box), np.flatnonzero(is_box)), (parts, origins)])


def cut_rows(table: ShardTable, most: Int64s) -> CutRows:
    """Boxes cut as ``geometry.split_rows`` cuts one: every part is one run of its box."""
    inner = np.cumprod(table.shapes[:, ::-1], axis=1)[:, ::-1] // table.shapes
    blocks = np.clip(most[:, None] // inner, 1, table.shapes)
    # A grid that begins where the box does.
    parts, origins = cut_along_grid(replace(table, offsets=np.zeros_like(table.offsets)), blocks)
    return replace(parts, offsets=parts.offsets + table.offsets[origins]), origins


def concatenate_cuts(parts: list[CutRows]) -> CutRows:
    """Cuts of one table together, those of one row in their order."""
    tables, origins = zip(*parts, strict=True)
    return tables[0].joined(*tables[1:]), np.concatenate(origins)


_MOST_CHUNKS: Final = 64
"""Chunks of the base in a new one: more would make files and tables larger and larger."""


def nested_grids(index: Index, base: Index) -> dict[str, Ints]:
    """The chunk shapes of a base that make up larger ones of a new checkpoint, by key."""
    found = {}
    columns = index.dtype_column, index.global_shape_column, index.chunk_shape_column
    for key, dtype, shape, own in zip(index.keys_column, *columns, strict=True):
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


def along_grids(
    table: ShardTable, index: Index, grids: Mapping[str, Ints]
) -> tuple[ShardTable, Index]:
    """A plan of whole chunks, cut along other grids that ``nested_grids`` has found."""
    rows = zip(index.keys_column, index.chunk_shape_column, strict=True)
    index = replace(index, chunk_shape_column=[grids.get(key, own) for key, own in rows])
    table, _ = RowBlockLayout(max_chunk_bytes=1 << 62).cut(table, index)
    return table, index


MAX_CHUNK_BYTES = 32 * 2**20
_MIN_CHUNK_BYTES = 2**20


@lru_cache(maxsize=1 << 10)
def _divided(most_bytes: int, shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
    """The largest chunks of at most so many bytes that divide others; None if these are tiny."""
    for axis, extent in enumerate(chunk):
        row_bytes = itemsize * math.prod(chunk[axis + 1 :])
        rows = max(1, most_bytes // max(row_bytes, 1))
        if extent == shape[axis]:  # one shard along this axis: the last chunk may be smaller
            block = -(-extent // -(-extent // rows)) if rows < extent else extent
        else:
            block = largest_divisor_block(extent, rows)
        chunk = (*chunk[:axis], block, *chunk[axis + 1 :])
        num_bytes = itemsize * math.prod(chunk)
        if num_bytes <= most_bytes:
            return chunk if num_bytes >= min(_MIN_CHUNK_BYTES, most_bytes // 4) else None
    return None


@dataclass(frozen=True, slots=True)
class RowBlockLayout:
    """Chunks are row blocks of shards, so that no two ranks share one and tools can read parts.

    The leading extent of a regular shard is divided by the smallest number that gives chunks of at
    most ``max_chunk_bytes``. Shards without a grid, flattened ones, and those that only tiny chunks
    would divide are stored as pieces: the same row blocks, each on its own.

    Attributes:
        max_chunk_bytes: Upper limit for a chunk or piece, in bytes.
        keeps_ranges: Whether a range of a flattened shard is stored as a 1-D piece; else as the
            boxes that it consists of.
    """

    max_chunk_bytes: int = MAX_CHUNK_BYTES
    keeps_ranges: bool = True

    def parts(self, written: ShardTable) -> Parts:
        """How each tensor is stored, in a sorted table of the shards that will be written."""
        groups, starts = written.groups, written.starts
        chunks: list[Ints | None] = [*shared_shapes(groups.chunk_shapes, written.ndim[starts])]
        has_grid, itemsizes = groups.is_grid.copy(), written.itemsizes[starts]
        is_large = itemsizes * groups.chunk_shapes.prod(axis=1) > self.max_chunk_bytes
        # A tensor without elements has no chunk to divide.
        is_large &= has_grid & groups.global_shapes.all(axis=1)
        for group in is_large.nonzero()[0].tolist():
            shape, chunk = written.global_shape(starts[group]), chunks[group] or ()
            chunks[group] = _divided(self.max_chunk_bytes, shape, chunk, int(itemsizes[group]))
            has_grid[group] = chunks[group] is not None
        chunks = [chunk if grid else None for chunk, grid in zip(chunks, has_grid, strict=True)]
        rows = groups.is_counted & ~has_grid[groups.of_row]
        if not rows.any():
            return chunks, {}
        table = written.take(rows)
        no_grid = np.zeros(len(table), dtype=np.bool_)
        table = self._cut(table, no_grid, np.ones_like(table.shapes))[0].sorted_by_box()
        firsts, ends = table.take(table.starts), np.append(table.starts, len(table))
        columns = (table.offsets, table.shapes, table.flat)
        return chunks, PieceColumns(firsts.key_column, ends, firsts.ndim.astype(np.int64), *columns)

    def cut(self, written: ShardTable, index: Index) -> CutRows:
        """The chunks and pieces that shards consist of, and the row that each comes from."""
        number = index.rows_of(written.names)[written.keys]
        has_grid = np.concatenate([index.has_grid, [False]])[number]
        chunks = np.ones_like(written.shapes)
        axes = min(chunks.shape[1], index.chunk_shapes.shape[1])
        chunks[has_grid, :axes] = index.chunk_shapes[number[has_grid], :axes]
        return self._cut(written, has_grid, chunks)

    def _cut(self, table: ShardTable, has_grid: Bools, chunks: Int64s) -> CutRows:
        """Parts of a table; what is one chunk or piece just as it is comes first."""
        if not self.keeps_ranges and (table.flat[:, 0] >= 0).any():
            table, own = cut_into_boxes(table)
            parts, origins = self._cut(table, has_grid[own], chunks[own])
            return parts, own[origins]
        # A small shard at the edge may still span chunks, if larger neighbours had to be divided.
        is_small = table.num_bytes <= self.max_chunk_bytes
        uncut = is_small & ~(has_grid & (table.shapes > chunks).any(axis=1))
        rows = np.arange(len(table))
        if uncut.all():
            return table, rows
        most = np.maximum(1, self.max_chunk_bytes // np.maximum(table.itemsizes, 1))
        is_flat = table.flat[:, 0] >= 0
        cuts = [(table.take(uncut), rows[uncut])]
        for mask, cut, limits in (
            (~uncut & has_grid, cut_along_grid, chunks),
            (~uncut & ~has_grid & is_flat, cut_ranges, most),
            (~uncut & ~has_grid & ~is_flat, cut_rows, most),
        ):
            parts, origins = cut(table.take(mask), limits[mask])
            cuts.append((parts, rows[mask][origins]))
        return concatenate_cuts(cuts)


@dataclass(frozen=True, slots=True)
class WholeShardLayout:
    """Every tensor has a chunk grid, and a regular shard is exactly one chunk (Megatron's zarr).

    An uneven cut gets the largest chunk that divides all its shards, if that makes at most
    ``max_chunks_per_shard`` of them; else the whole axis is one chunk that several ranks write
    into. A flattened range goes to its place in the chunk of its shard.

    Attributes:
        max_chunks_per_shard: Most chunks that a shard is divided into along one axis.
    """

    max_chunks_per_shard: int = 64

    def parts(self, written: ShardTable) -> Parts:
        """How each tensor is stored, in a sorted table of the shards that will be written."""
        groups, starts = written.groups, written.starts
        whole, largest = groups.global_shapes, groups.chunk_shapes
        if len(starts):
            # The end of the tensor is no cut.
            ends = written.offsets + written.shapes
            extents = written.global_shapes
            cuts = np.gcd(written.offsets * (written.offsets != extents), ends * (ends != extents))
            counted = groups.is_counted[:, None]
            is_regular = np.logical_and.reduceat(groups.fits | ~counted, starts, axis=0)
            divisor = np.gcd.reduceat(np.where(counted, cuts, 0), starts, axis=0)
            few = divisor * self.max_chunks_per_shard >= largest
            largest = np.where(is_regular, largest, np.where(few, divisor, whole))
        return shared_shapes(largest, written.ndim[starts]), {}

    def cut(self, written: ShardTable, index: Index) -> CutRows:
        """The shards themselves: the writer of this format puts them where they belong."""
        del index
        return written, np.arange(len(written))


Layout = RowBlockLayout | WholeShardLayout


def whole_items(layout: Layout) -> Layout:
    """The layout for a storage that asks for this one, but with every item as one chunk."""
    if not isinstance(layout, RowBlockLayout):
        return layout
    return replace(layout, max_chunk_bytes=1 << 62, keeps_ranges=True)


def index_of(layout: Layout, announced: ShardTable, written: ShardTable) -> Index:
    """What a checkpoint will hold, from the shards of all ranks and those that are written."""
    firsts, tensors, grids = announced.starts, written, dict[str, Ints]()
    is_object = announced.is_object[firsts]
    if is_object.any():
        tensors, objects = written.take(~written.is_object), announced.take(firsts[is_object])
        grids = dict(zip(objects.key_column, objects.global_shape_column, strict=True))
    # What has no elements is in the index, but nobody writes it.
    is_empty = (announced.global_shapes[firsts] == 0).any(axis=1) & ~is_object
    if is_empty.any():
        tensors = concatenate([tensors, announced.take(firsts[is_empty])])
    first = tensors.take(tensors.is_start)
    chunks, pieces = layout.parts(tensors)
    shapes = first.global_shape_column
    return Index(first.key_column, first.dtype_column, shapes, chunks, pieces, grids)
