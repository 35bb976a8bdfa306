"""``plan_load``: which stored boxes fill which wanted boxes, for grids, pieces and flat ranges.

Wanted tensors and stored chunks are both boxes of a global tensor that are arrays in a buffer
(``_Segments``; a flattened range is several). What two of them have in common is one read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.geometry import (
    MAX_EXTENT,
    Int64s,
    PieceColumns,
    changes,
    padded,
    padded_rows,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning.load_plan import ReadTable, WantedTable
from dist_checkpointing.planning.shard_table import Bools, Columns, counted, positions_of

_MOST_PAIRS = 1 << 20
"""Pairs of a wanted segment and a piece that are looked at together; each takes some 400 bytes."""


def _strides_of(shapes: Int64s) -> Int64s:
    """Elements from one to the next along each axis, in C order."""
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return strides


@dataclass(frozen=True, slots=True, eq=False)
class _Segments(Columns):
    """Boxes of global tensors, each of which is one C-order array in the buffer of a part.

    A plain part is one segment. A flattened range is as many as ``split_flat_range`` says. Parts
    ascend; an array begins at element ``starts`` of the buffer.
    """

    parts: Int64s
    starts: Int64s
    shapes: Int64s
    offsets: Int64s


def _segments_of(offsets: Int64s, shapes: Int64s, flat: Int64s) -> _Segments:
    """The segments of parts, in order: boxes with at least one axis, and ranges of them, or -1."""
    parts, is_flat = np.arange(len(offsets)), flat[:, 0] >= 0
    whole = _Segments(parts, np.zeros_like(parts), shapes, offsets)
    if not is_flat.any():
        return whole
    segments = []
    active = np.flatnonzero(is_flat & (flat[:, 0] < flat[:, 1]))
    position = flat[active, 0]
    # The same steps as in ``split_flat_range``, one for every range at a time.
    while len(active):
        extents, stop, rows = shapes[active], flat[active, 1], np.arange(len(active))
        strides = _strides_of(extents)
        fits = (position[:, None] % strides == 0) & (position[:, None] + strides <= stop[:, None])
        axis = fits.argmax(axis=1)
        stride, index = strides[rows, axis], position[:, None] // strides % extents
        extent = np.minimum((stop - position) // stride, extents[rows, axis] - index[rows, axis])
        box = np.where(np.arange(extents.shape[1]) > axis[:, None], extents, 1)
        box[rows, axis] = extent
        starts = position - flat[active, 0]
        segments.append(_Segments(active, starts, box, offsets[active] + index))
        position = position + extent * stride
        more = position < stop
        active, position = active[more], position[more]
    joined = whole.take(np.flatnonzero(~is_flat)).joined(*segments)
    return joined.take(np.lexsort((joined.starts, joined.parts)))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks(_Segments):
    """Stored arrays that may meet wanted segments; ``parts`` are the rows of these.

    ``pieces`` are positions in the tensor's ``Pieces``, and -1 on a chunk grid.
    """

    pieces: Int64s
    chunk_offsets: Int64s


def plan_load(
    index: Index, wanted: WantedTable | Iterable[ShardedTensor]
) -> tuple[ReadTable, list[Finding]]:
    """The reads that fill every wanted tensor, and what nothing stored fills.

    A pure function: nothing is opened, and the topology need not exist. All tensors are planned
    together, in time that grows with the reads and with the pieces of the wanted tensors.

    Args:
        index: what is stored, the wanted tensors included.
        wanted: parts of them, with or without memory.

    Returns:
        The reads, in the order of the tensors, and what the checkpoint does not hold.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> index = Checkpoint.open("ckpt").index
        >>> half = ShardedTensor.from_rank_offsets("w", torch.empty(2), (0, 1, 2))
        >>> reads, findings = plan_load(index, [half])
        >>> len(reads)
        1
    """
    if not isinstance(wanted, WantedTable):
        wanted = WantedTable.of(wanted)
    global_shapes, chunk_shapes = index.shapes_of(wanted.keys)
    stored_ndim = np.fromiter(map(len, global_shapes), dtype=np.int32, count=len(wanted))
    differs = np.flatnonzero(stored_ndim != wanted.ndim).tolist()
    if differs:
        problem = "the number of axes differs"
        return ReadTable.of(()), [
            Finding(problem, wanted.keys[row], int(wanted.ndim[row]), int(stored_ndim[row]))
            for row in differs
        ]
    whole = padded_rows(global_shapes, 1)
    segments = _segments_of(wanted.offsets, wanted.shapes, wanted.flat)
    # A wanted tensor may stick out of a smaller stored one (allow_shape_mismatch).
    ends = np.minimum(segments.offsets + segments.shapes, whole[segments.parts])
    some = (ends > segments.offsets).all(axis=1)
    segments, ends = segments.take(some), ends[some]
    shapes: list[Any] = [*chunk_shapes]
    divided = [row for row, shape in enumerate(shapes) if shape is None]
    for row in divided:
        shapes[row] = global_shapes[row]
    chunks = np.maximum(padded_rows(shapes, 1), 1)[segments.parts]
    rows = np.arange(len(ends))
    if not divided:
        stored = _in_grid(rows, segments.offsets, ends, chunks)
        return _table(wanted, segments, ends, stored), []
    is_divided = np.isin(segments.parts, divided)
    on, rows = rows[~is_divided], rows[is_divided]
    stored = _in_grid(on, segments.offsets[on], ends[on], chunks[on])
    stored = stored.joined(*_in_pieces(index, wanted, segments, ends, whole, rows))
    stored = _once(segments, ends, stored.take(np.argsort(stored.parts, kind="stable")))
    table = _table(wanted, segments, ends, stored)
    counts = np.zeros((2, len(wanted)), dtype=np.int64)
    np.add.at(counts[0], segments.parts, (ends - segments.offsets).prod(axis=1))
    np.add.at(counts[1], segments.parts[stored.parts], table.num_elements)
    return table, [
        _uncovered(wanted, row, *counts[:, row].tolist())
        for row in np.flatnonzero(counts[0] != counts[1]).tolist()
    ]


def _in_grid(rows_of: Int64s, begin: Int64s, ends: Int64s, chunk: Int64s) -> _Chunks:
    """The chunks of grids that meet some segments, none of them empty."""
    first = begin // chunk
    counts = (ends - 1) // chunk - first + 1
    rows, within = counted(counts.prod(axis=1))
    if len(rows) > len(begin):  # most of what is wanted is wanted as it is stored
        first = first[rows] + within[:, None] // _strides_of(counts)[rows] % counts[rows]
        chunk, rows_of = chunk[rows], rows_of[rows]
    # Chunks are stored at full size, also where they stick out of the tensor.
    offsets, starts = first * chunk, np.zeros(len(rows), dtype=np.int64)
    return _Chunks(rows_of, starts, chunk, offsets, starts - 1, offsets)


def _in_pieces(
    index: Index,
    wanted: WantedTable,
    segments: _Segments,
    ends: Int64s,
    whole: Int64s,
    rows: Int64s,
) -> Iterator[_Chunks]:
    """The pieces that meet some segments: first by their positions in the flattened tensor."""
    parts = segments.parts[rows]
    names, tensors = _numbered([wanted.keys[part] for part in parts.tolist()])
    whole = whole[parts]
    is_all = names == tuple(index.pieces)
    pieces = PieceColumns.of(index.pieces if is_all else {key: index.pieces[key] for key in names})
    width = whole.shape[1]
    # A part of an index keeps the width that the whole one had.
    offsets = padded(pieces.offsets[:, :width], width, 0)
    shapes = padded(pieces.shapes[:, :width], width, 1)
    flat, counts = pieces.flat, np.diff(pieces.starts)
    tensor = np.repeat(np.arange(len(counts)), counts)
    full = np.ones((len(counts), width), dtype=np.int64)
    full[tensors] = whole
    bounds = [
        *_bounds(offsets, shapes, flat, full, tensor),
        positions_of(segments.offsets[rows], whole),
        positions_of(ends[rows] - 1, whole),
    ]
    most = max(int(column.max(initial=0)) for column in bounds) + 1
    if most * len(names) > MAX_EXTENT:
        ranks = np.unique(np.concatenate(bounds), return_inverse=True)[1]
        bounds, most = np.split(ranks, np.cumsum([*map(len, bounds)])[:-1]), len(ranks)
    # Positions in all tensors, one behind the other.
    for column, of in zip(bounds, (tensor, tensor, tensors, tensors), strict=True):
        np.add(column, most * of, out=column)
    begin, end, first, last = bounds
    order = None if _ascends(begin) else np.argsort(begin, kind="stable")
    begin, highest = (begin, end) if order is None else (begin[order], end[order])
    # Of pieces in order, those that end before have an end before the highest so far.
    highest = highest if _ascends(highest) else np.maximum.accumulate(highest)
    low = np.searchsorted(highest, first)
    counts = np.maximum(np.searchsorted(begin, last, side="right") - low, 0)
    # Each block has about as many pairs as fit into memory.
    blocks = np.flatnonzero(np.diff(np.cumsum(counts) // _MOST_PAIRS)) + 1
    for some in np.split(np.arange(len(rows)), blocks):
        pair, step = counted(counts[some])
        segment, piece = some[pair], low[some][pair] + step
        if order is not None:
            piece = order[piece]
            ranked = np.lexsort((piece, segment))
            segment, piece = segment[ranked], piece[ranked]
        row = rows[segment]
        meets = (end[piece] >= first[segment]) & (offsets[piece] < ends[row]).all(axis=1)
        meets &= (offsets[piece] + shapes[piece] > segments.offsets[row]).all(axis=1)
        row, piece = row[meets], piece[meets]
        cut = _segments_of(offsets[piece], shapes[piece], flat[piece])
        row, piece = row[cut.parts], piece[cut.parts]
        number = piece - pieces.starts[tensor[piece]]
        yield _Chunks(row, cut.starts, cut.shapes, cut.offsets, number, offsets[piece])


def _bounds(
    offsets: Int64s, shapes: Int64s, flat: Int64s, full: Int64s, tensor: Int64s
) -> tuple[Int64s, Int64s]:
    """First and last position of pieces in the C order of their tensors, whose shapes are full."""
    begin, end = flat[:, 0].copy(), flat[:, 1] - 1
    # Most flattened pieces are ranges of the whole tensor.
    differs = begin < 0
    for axis in range(full.shape[1]):
        differs |= shapes[:, axis] != full[:, axis][tensor]
    other = np.flatnonzero(differs)
    offsets, shapes, full = offsets[other], shapes[other], full[tensor[other]]
    is_flat, extents = begin[other, None] >= 0, np.maximum(shapes, 1)
    strides = _strides_of(extents)
    for column, box in ((begin, np.zeros_like(shapes)), (end, shapes - 1)):
        inside = np.where(is_flat, column[other, None] // strides % extents, box)
        column[other] = positions_of(offsets + inside, full)
    return begin, end


def _ascends(column: Int64s) -> bool:
    return bool((column[1:] >= column[:-1]).all())


def _numbered(keys: Sequence[str]) -> tuple[tuple[str, ...], Int64s]:
    """The distinct keys, and the position of each among them."""
    if len({*keys}) == len(keys):
        return tuple(keys), np.arange(len(keys))
    position = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    numbers = np.fromiter(map(position.__getitem__, keys), dtype=np.int64, count=len(keys))
    return tuple(position), numbers


def _common(segments: _Segments, ends: Int64s, stored: _Chunks) -> tuple[_Segments, Int64s, Int64s]:
    """The segment of each stored array, and the box that they have in common."""
    # Of segments that have one array each, in order, none need be copied.
    if len(stored.parts) != len(ends) or (np.diff(stored.parts) != 1).any():
        segments, ends = segments.take(stored.parts), ends[stored.parts]
    begin = np.maximum(segments.offsets, stored.offsets)
    return segments, begin, np.minimum(ends, stored.offsets + stored.shapes) - begin


def _once(segments: _Segments, ends: Int64s, stored: _Chunks) -> _Chunks:
    """What meets, each box once: a piece listed twice must not make up for a lost one."""
    _, begin, lengths = _common(segments, ends, stored)
    meets = (lengths > 0).all(axis=1)
    stored, begin, lengths = stored.take(meets), begin[meets], lengths[meets]
    columns = [stored.parts, *begin.T, *lengths.T]
    order = np.lexsort(columns[::-1])
    is_first: Bools = np.empty(len(order), dtype=np.bool_)
    is_first[order] = changes(columns, order)
    return stored.take(is_first)


def _table(wanted: WantedTable, segments: _Segments, ends: Int64s, stored: _Chunks) -> ReadTable:
    names, numbers = _numbered(wanted.keys)
    filled, begin, lengths = _common(segments, ends, stored)
    rows = filled.parts
    return ReadTable(
        names=names,
        keys=numbers[rows].astype(np.int32),
        is_object=np.zeros(len(rows), dtype=np.bool_),
        ndim=wanted.ndim[rows],
        window_ndim=wanted.ndim[rows],
        sources=wanted.sources[rows],
        dest_offsets=wanted.offsets[rows],
        dest_starts=filled.starts,
        dest_shapes=filled.shapes,
        dest_boxes=begin - filled.offsets,
        pieces=stored.pieces,
        chunk_offsets=stored.chunk_offsets,
        storage_starts=stored.starts,
        storage_shapes=stored.shapes,
        storage_boxes=begin - stored.offsets,
        lengths=lengths,
    )


def _uncovered(wanted: WantedTable, row: int, needed: int, filled: int) -> Finding:
    box = wanted.tensors[row].box
    return Finding(
        "the checkpoint does not cover the wanted part exactly once",
        wanted.keys[row],
        expected=f"{needed} elements in {box.offset} .. {box.stop}",
        found=f"{filled} elements",
    )
