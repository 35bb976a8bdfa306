"""Reads from tensors without a chunk grid: which pieces meet what is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dist_checkpointing.format.geometry import Pieces, changes
from dist_checkpointing.planning.segments import (
    Overlaps,
    Segments,
    concatenate_overlaps,
    counted,
    segments_of,
)
from dist_checkpointing.planning.shard_table import Bools, Int64s

_FEW = 64
"""With fewer pieces of a tensor than this it does not pay to look for an order in them."""
_MOST_PAIRS = 1 << 20
"""Pairs of a wanted part and a piece that are looked at together; each takes about 400 bytes."""


class WantedParts:
    """Parts of tensors of one number of axes, and their segments.

    ``highs`` are the first elements behind what is wanted of each segment; the boxes are those of
    all parts.
    """

    def __init__(
        self,
        segments: Segments,
        highs: Int64s,
        offsets: Int64s,
        shapes: Int64s,
        flat: Int64s,
    ) -> None:
        self.segments: Segments = segments
        self.highs: Int64s = highs
        self.rows: Int64s
        self.first: Int64s
        self.rows, self.first = np.unique(segments.parts, return_index=True)
        self.counts: Int64s = np.diff(np.r_[self.first, len(segments)])
        # What is wanted of a flattened part may be much smaller than its box.
        self.begin: Int64s = np.minimum.reduceat(segments.offsets, self.first, axis=0)
        self.end: Int64s = np.maximum.reduceat(highs, self.first, axis=0)
        self.offsets, self.shapes = offsets[self.rows], shapes[self.rows]
        self.flat: Int64s = flat[self.rows]


def with_pieces(wanted: WantedParts, tensors: Sequence[Pieces]) -> Overlaps:
    """What parts have in common with the pieces of their tensors; every box is named once."""
    found = [_meeting(wanted, *block) for block in _blocks(wanted, tensors)]
    overlaps = concatenate_overlaps(found)
    # In the order of the segments, and for each of them in the order of the pieces.
    order = np.argsort(overlaps.stored.parts, kind="stable")
    overlaps = overlaps.take(order)
    return overlaps.take(_firsts(overlaps))


def _blocks(
    wanted: WantedParts, tensors: Sequence[Pieces]
) -> Iterator[tuple[Int64s, list[Pieces], Int64s, Int64s]]:
    """Parts with the range of pieces that may meet each, so many that they fit into memory."""
    of_tensor: dict[int, list[int]] = {}
    for part, pieces in enumerate(tensors):
        of_tensor.setdefault(id(pieces), []).append(part)
    low = np.zeros(len(tensors), dtype=np.int64)
    high = np.fromiter(map(len, tensors), dtype=np.int64, count=len(tensors))
    for alike in of_tensor.values():
        pieces = tensors[alike[0]]
        if len(pieces) > _FEW and pieces.offsets.shape[1]:
            low[alike], high[alike] = _narrowed(wanted, np.array(alike), pieces)
    high = np.maximum(low, high)
    counts = high - low
    blocks = (np.cumsum(counts) // _MOST_PAIRS).tolist()
    begin = 0
    for end in range(1, len(tensors) + 1):
        if end == len(tensors) or blocks[end] != blocks[begin]:
            parts = np.arange(begin, end)
            yield parts, list(tensors[begin:end]), low[begin:end], high[begin:end]
            begin = end


def _narrowed(wanted: WantedParts, parts: Int64s, pieces: Pieces) -> tuple[Int64s, Int64s]:
    """First and last piece that may meet each part, if the pieces are in some order."""
    begin, end = wanted.begin[parts], wanted.end[parts]
    starts = pieces.flat[:, 0]
    one_box = bool(
        (pieces.offsets == pieces.offsets[0]).all() and (pieces.shapes == pieces.shapes[0]).all()
    )
    if one_box and bool((starts >= 0).all()):
        if _is_ascending(starts) and _is_ascending(pieces.flat[:, 1]):
            box = [np.broadcast_to(c[0], begin.shape) for c in (pieces.offsets, pieces.shapes)]
            first, last = _flat_bounds(wanted, parts, begin, end, *box)
            low = np.searchsorted(pieces.flat[:, 1], first, side="right")
            return low, np.searchsorted(starts, last, side="right")
    else:
        offsets = pieces.offsets[:, 0]
        stops = offsets + pieces.shapes[:, 0]
        if _is_ascending(offsets) and _is_ascending(stops):
            low = np.searchsorted(stops, begin[:, 0], side="right")
            return low, np.searchsorted(offsets, end[:, 0], side="left")
    return np.zeros(len(parts), dtype=np.int64), np.full(len(parts), len(pieces), dtype=np.int64)


def _is_ascending(column: Int64s) -> bool:
    return bool((column[1:] >= column[:-1]).all())


def _flat_bounds(
    wanted: WantedParts, parts: Int64s, begin: Int64s, end: Int64s, offsets: Int64s, shapes: Int64s
) -> tuple[Int64s, Int64s]:
    """First and last element, in the flattening of a box, that a part may want of it.

    A row is the number of a part, what it wants (``begin`` .. ``end``), and the box.
    """
    first, last = np.zeros(len(parts), dtype=np.int64), np.zeros(len(parts), dtype=np.int64)
    low = np.maximum(begin - offsets, 0)
    high = np.minimum(end - offsets, shapes) - 1
    for axis in range(shapes.shape[1]):
        first = first * shapes[:, axis] + low[:, axis]
        last = last * shapes[:, axis] + high[:, axis]
    flat = wanted.flat[parts]
    same = (flat[:, 0] >= 0) & (wanted.offsets[parts] == offsets).all(axis=1)
    same &= (wanted.shapes[parts] == shapes).all(axis=1)
    return np.where(same, flat[:, 0], first), np.where(same, flat[:, 1] - 1, last)


def _meeting(
    wanted: WantedParts, parts: Int64s, tensors: Sequence[Pieces], low: Int64s, high: Int64s
) -> Overlaps:
    """What some parts have in common with their pieces."""
    pairs, within = counted(high - low)
    numbers, pairs = low[pairs] + within, parts[pairs]
    ranges = list(zip(tensors, low.tolist(), high.tolist(), strict=True))
    offsets, shapes = (
        np.concatenate([getattr(t, name)[a:b] for t, a, b in ranges])
        for name in ("offsets", "shapes")
    )
    flat = np.concatenate([t.flat[a:b] for t, a, b in ranges])
    if not offsets.shape[1]:  # scalars
        offsets, shapes = np.zeros_like(flat[:, :1]), np.ones_like(flat[:, :1])
    begin, end = wanted.begin[pairs], wanted.end[pairs]
    meets: Bools = ((offsets < end) & (offsets + shapes > begin)).all(axis=1)
    first, last = _flat_bounds(wanted, pairs, begin, end, offsets, shapes)
    meets &= (flat[:, 0] < 0) | ((flat[:, 0] <= last) & (flat[:, 1] > first))
    numbers, pairs = numbers[meets], pairs[meets]
    offsets = offsets[meets]
    stored = segments_of(offsets, shapes[meets], flat[meets])
    # Every segment of a piece with every segment of the part.
    part = pairs[stored.parts]
    rows, within = counted(wanted.counts[part])
    own = wanted.first[part[rows]] + within
    stored = stored.take(rows)
    begin = np.maximum(wanted.segments.offsets[own], stored.offsets)
    lengths = np.minimum(wanted.highs[own], stored.offsets + stored.shapes) - begin
    kept = (lengths > 0).all(axis=1)
    own, pair = own[kept], stored.parts[kept]
    stored = stored.take(kept)
    return Overlaps(
        wanted.segments.take(own),
        Segments(own, stored.starts, stored.shapes, stored.offsets),
        offsets[pair],
        numbers[pair],
        begin[kept],
        lengths[kept],
    )


def _firsts(overlaps: Overlaps) -> Bools:
    """Which rows are not named before: a piece listed twice must not make up for a lost one."""
    columns = [overlaps.stored.parts, *overlaps.offsets.T, *overlaps.lengths.T]
    mixed = np.zeros(len(overlaps), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    kept = np.ones(len(overlaps), dtype=np.bool_)
    if len(np.unique(mixed)) == len(mixed):
        return kept
    order = np.lexsort(columns)
    kept[order[~changes(columns, order)]] = False
    return kept
