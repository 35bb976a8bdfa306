"""Resharding, which happens only here: the parts of stored chunks that fill wanted shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.geometry import Box, Ints, padded_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.piece_reads import WantedParts, with_pieces
from dist_checkpointing.planning.read_table import ReadTable
from dist_checkpointing.planning.segments import (
    Overlaps,
    Segments,
    concatenate_overlaps,
    in_grid,
    segments_of,
)
from dist_checkpointing.planning.shard_table import Int32s, Int64s


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
