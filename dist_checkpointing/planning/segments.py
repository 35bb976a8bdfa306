"""Parts of tensors as boxes that are arrays in a buffer, for many parts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from dist_checkpointing.format.geometry import Int64s, padded


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Boxes of global tensors, each of which is one C-order array in the buffer of a part.

    A plain part is one segment. A flattened range is as many as ``split_flat_range`` says. Parts
    ascend; an array begins at element ``starts`` of the buffer.
    """

    parts: Int64s
    starts: Int64s
    shapes: Int64s
    offsets: Int64s

    def __len__(self) -> int:
        return len(self.parts)

    def take(self, rows: Any) -> Segments:
        return Segments(*(getattr(self, f.name)[rows] for f in fields(self)))

    def as_wide(self, width: int) -> Segments:
        shapes, offsets = padded(self.shapes, width, 1), padded(self.offsets, width, 0)
        return replace(self, shapes=shapes, offsets=offsets)


def segments_of(offsets: Int64s, shapes: Int64s, flat: Int64s) -> Segments:
    """The segments of parts, in order: boxes with at least one axis, and ranges of them, or -1."""
    parts = np.arange(len(offsets))
    is_flat = flat[:, 0] >= 0
    if not is_flat.any():
        return Segments(parts, np.zeros(len(parts), dtype=np.int64), shapes, offsets)
    plain = np.flatnonzero(~is_flat)
    found = [Segments(plain, np.zeros(len(plain), dtype=np.int64), shapes[plain], offsets[plain])]
    active = np.flatnonzero(is_flat & (flat[:, 0] < flat[:, 1]))
    position = flat[active, 0]
    # The same steps as in ``split_flat_range``, one for every range at a time.
    while len(active):
        extents, stop = shapes[active], flat[active, 1]
        strides = np.ones_like(extents)
        strides[:, :-1] = np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1]
        fits = (position[:, None] % strides == 0) & (position[:, None] + strides <= stop[:, None])
        axis = fits.argmax(axis=1)
        rows = np.arange(len(active))
        stride = strides[rows, axis]
        place = position[:, None] // strides % extents
        extent = np.minimum((stop - position) // stride, extents[rows, axis] - place[rows, axis])
        inner = np.arange(extents.shape[1]) > axis[:, None]
        box = np.where(inner, extents, 1)
        box[rows, axis] = extent
        starts = position - flat[active, 0]
        found.append(Segments(active, starts, box, offsets[active] + place))
        position = position + extent * stride
        more = position < stop
        active, position = active[more], position[more]
    segments = _concatenated(found)
    return segments.take(np.lexsort((segments.starts, segments.parts)))


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """Boxes that a wanted part and a stored chunk have in common, as columns.

    Attributes:
        wanted: Segments of the wanted parts, one a row.
        stored: Segments of the stored chunks, one a row; their ``parts`` say nothing.
        chunk_offsets: ``[rows, axes]``, offset of the stored chunk or piece.
        pieces: Row of the piece in the tensor's ``Pieces``; -1 on a chunk grid.
        offsets: ``[rows, axes]``, first element of the box in the global tensor.
        lengths: ``[rows, axes]``, shape of the box.
    """

    wanted: Segments
    stored: Segments
    chunk_offsets: Int64s
    pieces: Int64s
    offsets: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return len(self.pieces)

    def take(self, rows: Any) -> Overlaps:
        return Overlaps(
            self.wanted.take(rows),
            self.stored.take(rows),
            self.chunk_offsets[rows],
            self.pieces[rows],
            self.offsets[rows],
            self.lengths[rows],
        )

    def as_wide(self, width: int) -> Overlaps:
        return Overlaps(
            self.wanted.as_wide(width),
            self.stored.as_wide(width),
            padded(self.chunk_offsets, width, 0),
            self.pieces,
            padded(self.offsets, width, 0),
            padded(self.lengths, width, 1),
        )


def concatenate_overlaps(overlaps: Sequence[Overlaps]) -> Overlaps:
    if len(overlaps) == 1:
        return overlaps[0]
    names = ("chunk_offsets", "pieces", "offsets", "lengths")
    return Overlaps(
        _concatenated([o.wanted for o in overlaps]),
        _concatenated([o.stored for o in overlaps]),
        *(np.concatenate([getattr(o, name) for o in overlaps]) for name in names),
    )


def _concatenated(segments: Sequence[Segments]) -> Segments:
    names = (f.name for f in fields(Segments))
    return Segments(*(np.concatenate([getattr(s, name) for s in segments]) for name in names))


def in_grid(wanted: Segments, highs: Int64s, chunks: Int64s) -> Overlaps:
    """What segments, none of them empty, have in common with the chunks of a grid.

    ``highs`` are the first elements behind what is wanted; they and the shapes of the chunks are
    ``[segments, axes]``.
    """
    first = wanted.offsets // chunks
    counts = (highs - 1) // chunks - first + 1
    if (counts == 1).all():  # most of what is wanted is wanted as it is stored
        offsets = first * chunks
        starts = np.zeros(len(wanted), dtype=np.int64)
        stored = Segments(wanted.parts, starts, chunks, offsets)
        lengths = highs - wanted.offsets
        return Overlaps(wanted, stored, offsets, starts - 1, wanted.offsets, lengths)
    rows, within = counted(counts.prod(axis=1))
    strides = np.ones_like(counts)
    strides[:, :-1] = np.cumprod(counts[:, :0:-1], axis=1)[:, ::-1]
    chunk = chunks[rows]
    # Chunks are stored at full size, also where they stick out of the tensor.
    offsets = (first[rows] + within[:, None] // strides[rows] % counts[rows]) * chunk
    begin = np.maximum(offsets, wanted.offsets[rows])
    starts = np.zeros(len(rows), dtype=np.int64)
    return Overlaps(
        wanted.take(rows),
        Segments(rows, starts, chunk, offsets),
        offsets,
        np.full(len(rows), -1, dtype=np.int64),
        begin,
        np.minimum(offsets + chunk, highs[rows]) - begin,
    )


def counted(counts: Int64s) -> tuple[Int64s, Int64s]:
    """For each of several groups its number so many times, and the position in the group."""
    groups = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return groups, np.arange(len(groups)) - begins[groups]
