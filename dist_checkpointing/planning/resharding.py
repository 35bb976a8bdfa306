"""``plan_load``: which stored boxes fill which wanted boxes, for grids, pieces and flat ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.geometry import (
    Box,
    Int64s,
    Ints,
    Pieces,
    changes,
    padded,
    padded_rows,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import Path
from dist_checkpointing.planning.load_plan import ReadTable, TensorColumns
from dist_checkpointing.planning.shard_table import Bools, Int32s, counted


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


@dataclass(frozen=True, slots=True)
class WantedShard:
    """A part of a tensor that a rank wants: a box, which may stick out, or a range of the box."""

    key: str
    box: Box
    flat_range: tuple[int, int] | None
    source: int


@dataclass(frozen=True, slots=True, eq=False)
class WantedShards:
    """Wanted shards as columns, as in ``ShardTable``."""

    keys: Sequence[str]
    ndim: Int32s
    offsets: Int64s
    shapes: Int64s
    flat: Int64s
    sources: Int32s

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: Int64s) -> WantedShards:
        return WantedShards(
            [self.keys[row] for row in rows.tolist()],
            *(getattr(self, f.name)[rows] for f in fields(self) if f.name != "keys"),
        )

    @classmethod
    def of(cls, shards: Iterable[WantedShard]) -> WantedShards:
        rows = list(shards)
        return cls.of_columns(
            [shard.key for shard in rows],
            [shard.box.offset for shard in rows],
            [shard.box.shape for shard in rows],
            [shard.flat_range for shard in rows],
            [shard.source for shard in rows],
        )

    @classmethod
    def of_columns(
        cls,
        keys: Sequence[str],
        offsets: Sequence[Ints],
        shapes: Sequence[Ints],
        flat: Sequence[tuple[int, int] | None],
        sources: Sequence[int] | Int32s,
    ) -> WantedShards:
        """The same from lists, one value a shard."""
        ndim = np.fromiter(map(len, shapes), dtype=np.int32, count=len(shapes))
        ranges = np.full((len(flat), 2), -1, dtype=np.int64)
        has_range = [row for row, own in enumerate(flat) if own]
        if has_range:
            ranges[has_range] = [own for own in flat if own]
        return cls(
            keys,
            ndim,
            padded_rows(offsets, 0),
            padded_rows(shapes, 1),
            ranges,
            np.asarray(sources, dtype=np.int32),
        )


def plan_load(
    index: Index, wanted: WantedShards | Sequence[WantedShard]
) -> tuple[ReadTable, list[Finding]]:
    """The reads that fill every wanted shard, and the shards that nothing stored fills.

    A pure function: nothing is opened, and the topology need not exist. All shards are planned
    together, in time that grows with the reads and with the pieces of the wanted tensors.

    Args:
        index: what is stored, the wanted tensors included.
        wanted: any shards of them.

    Returns:
        The reads, in the order of the shards, and what the checkpoint does not hold.

    Example:
        >>> from dist_checkpointing.format.geometry import Box
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> index = Checkpoint.open("ckpt").index
        >>> reads, findings = plan_load(index, [WantedShard("w", Box((1,), (2,)), None, 0)])
        >>> len(reads)
        1
    """
    shards = wanted if isinstance(wanted, WantedShards) else WantedShards.of(wanted)
    global_shapes, chunk_shapes = index.shapes_of(shards.keys)
    stored_ndim = np.fromiter(map(len, global_shapes), dtype=np.int32, count=len(shards))
    differs = np.flatnonzero(stored_ndim != shards.ndim)
    if len(differs):
        return ReadTable.of(()), [
            Finding(
                "the number of axes differs",
                shards.keys[row],
                expected=int(shards.ndim[row]),
                found=int(stored_ndim[row]),
            )
            for row in differs.tolist()
        ]
    whole = padded_rows(global_shapes, 1)
    on_grid = np.array([shape is not None for shape in chunk_shapes], dtype=np.bool_)
    shapes = [shape or full for shape, full in zip(chunk_shapes, global_shapes, strict=True)]
    chunks = np.maximum(padded_rows(shapes, 1), 1)
    names, numbers = _numbered(shards.keys)
    cut = segments_of(shards.offsets, shards.shapes, shards.flat)
    # A wanted shard may stick out of a smaller stored tensor (allow_shape_mismatch).
    highs = np.minimum(cut.offsets + cut.shapes, whole[cut.parts])
    some = (highs > cut.offsets).all(axis=1)
    if not some.all():
        cut, highs = cut.take(some), highs[some]
    on = on_grid[cut.parts]
    findings: list[Finding] = []
    if on.all():
        overlaps = in_grid(cut, highs, chunks[cut.parts])
    else:
        grid = cut.take(on)
        in_pieces, findings = _in_pieces(index, shards, cut.take(~on), highs[~on])
        overlaps = concatenate_overlaps([in_grid(grid, highs[on], chunks[grid.parts]), in_pieces])
        overlaps = overlaps.take(np.argsort(overlaps.wanted.parts, kind="stable"))
    return _of_overlaps(shards, names, numbers, overlaps), findings


def _numbered(keys: Sequence[str]) -> tuple[tuple[str, ...], Int32s]:
    """The distinct keys, and the position of each key among them."""
    known = dict.fromkeys(keys)
    if len(known) == len(keys):
        return tuple(keys), np.arange(len(keys), dtype=np.int32)
    position = {key: number for number, key in enumerate(known)}
    numbers = np.fromiter(map(position.__getitem__, keys), dtype=np.int32, count=len(keys))
    return tuple(known), numbers


def _of_overlaps(
    shards: WantedShards, names: tuple[str, ...], numbers: Int32s, overlaps: Overlaps
) -> ReadTable:
    wanted, stored = overlaps.wanted, overlaps.stored
    rows = wanted.parts
    return ReadTable(
        names=names,
        keys=numbers[rows],
        is_object=np.zeros(len(rows), dtype=np.bool_),
        ndim=shards.ndim[rows],
        window_ndim=shards.ndim[rows],
        sources=shards.sources[rows],
        dest_offsets=shards.offsets[rows],
        dest_starts=wanted.starts,
        dest_shapes=wanted.shapes,
        dest_boxes=overlaps.offsets - wanted.offsets,
        pieces=overlaps.pieces,
        chunk_offsets=overlaps.chunk_offsets,
        storage_starts=stored.starts,
        storage_shapes=stored.shapes,
        storage_boxes=overlaps.offsets - stored.offsets,
        lengths=overlaps.lengths,
    )


def _in_pieces(
    index: Index, shards: WantedShards, cut: Segments, highs: Int64s
) -> tuple[Overlaps, list[Finding]]:
    """What segments of shards have in common with pieces, and which shards these do not fill."""
    found = []
    ndim = shards.ndim[cut.parts]
    width = shards.offsets.shape[1]
    for axes in np.unique(ndim).tolist():
        own, kept = ndim == axes, max(1, axes)
        segments = cut.take(own)
        narrow = replace(
            segments, shapes=segments.shapes[:, :kept], offsets=segments.offsets[:, :kept]
        )
        parts = WantedParts(
            narrow,
            highs[own][:, :kept],
            shards.offsets[:, :kept],
            shards.shapes[:, :kept],
            shards.flat,
        )
        tensors = [index.pieces[shards.keys[row]] for row in parts.rows.tolist()]
        found.append(with_pieces(parts, tensors).as_wide(width))
    overlaps = concatenate_overlaps(found)
    needed = np.zeros(len(shards), dtype=np.int64)
    np.add.at(needed, cut.parts, (highs - cut.offsets).prod(axis=1))
    filled = np.zeros(len(shards), dtype=np.int64)
    np.add.at(filled, overlaps.wanted.parts, overlaps.lengths.prod(axis=1))
    return overlaps, [
        _uncovered(shards, row, int(needed[row]), int(filled[row]))
        for row in np.flatnonzero(needed != filled).tolist()
    ]


def _uncovered(shards: WantedShards, row: int, needed: int, filled: int) -> Finding:
    ndim = shards.ndim[row]
    offset = shards.offsets[row, :ndim]
    stop = offset + shards.shapes[row, :ndim]
    return Finding(
        "the checkpoint does not cover the wanted part exactly once",
        shards.keys[row],
        expected=f"{needed} elements in {tuple(offset.tolist())} .. {tuple(stop.tolist())}",
        found=f"{filled} elements",
    )


class WantedLeaves(Mapping[Path, ShardedBase]):
    """The sharded leaves of a load by path; their columns are made once."""

    def __init__(
        self, leaves: Mapping[Path, ShardedBase], tensors: TensorColumns | None = None
    ) -> None:
        self.by_path = leaves
        self.rows: Sequence[ShardedBase] = list(leaves.values())
        if tensors is not None:
            self.tensors = tensors

    @classmethod
    def of(cls, leaves: Mapping[Path, ShardedBase]) -> WantedLeaves:
        """Some leaves, which may be such already."""
        return leaves if isinstance(leaves, cls) else cls(leaves)

    def __getitem__(self, path: Path) -> ShardedBase:
        return self.by_path[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.by_path)

    def __len__(self) -> int:
        return len(self.rows)

    def values(self) -> ValuesView[ShardedBase]:
        return self.by_path.values()

    @cached_property
    def sources(self) -> Int32s:
        """Position of each tensor among all leaves."""
        is_tensor = [isinstance(leaf, ShardedTensor) for leaf in self.rows]
        return np.flatnonzero(is_tensor).astype(np.int32)

    @cached_property
    def tensors(self) -> TensorColumns:
        """The tensors among them, as columns."""
        return TensorColumns.of(leaf for leaf in self.rows if isinstance(leaf, ShardedTensor))

    @cached_property
    def shards(self) -> WantedShards:
        """What the tensors are parts of."""
        own = self.tensors
        return WantedShards.of_columns(
            own.keys, own.offsets, own.box_shapes, own.flat_ranges, self.sources
        )
