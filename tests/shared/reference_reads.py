"""Resharding item by item: what ``plan_load`` must agree with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_checkpointing.errors import Finding
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, Window
from dist_checkpointing.format.geometry import split_flat_range
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning import LoadItemType, MetadataIndex, ReadItem


@dataclass(frozen=True, slots=True)
class _Segment:
    """A box of the global tensor that is one C-order array in a buffer, from element ``start``."""

    start: int
    shape: tuple[int, ...]
    box: Box

    def window(self, common: Box) -> Window:
        return Window(self.start, self.shape, common.relative_to(self.box.offset))


def _segments(box: Box, flat: tuple[int, int] | None) -> list[_Segment]:
    if flat is None:
        return [_Segment(0, box.shape, box)]
    segments, start = [], 0
    for part in split_flat_range(box.shape, *flat):
        offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        segments.append(_Segment(start, part.shape, Box(offset, part.shape)))
        start += part.num_elements
    return segments


def _grid_chunks(tensor: StoredTensor, box: Box) -> Iterator[tuple[MetadataIndex, _Segment]]:
    grid = tensor.grid
    for chunk, _ in grid.intersecting(box):
        own = grid.box(chunk)
        # Chunks are stored at full size, also where they stick out of the tensor.
        yield MetadataIndex(tensor.key, own.offset), _Segment(0, grid.chunk_shape, own)


def _pieces(key: str, pieces: Pieces, box: Box) -> Iterator[tuple[MetadataIndex, _Segment]]:
    start, stop = np.array(box.offset), np.array(box.stop)
    meets = ((pieces.offsets < stop) & (pieces.offsets + pieces.shapes > start)).all(axis=1)
    for row in np.flatnonzero(meets).tolist():
        own = Box(tuple(pieces.offsets[row].tolist()), tuple(pieces.shapes[row].tolist()))
        first, last = pieces.flat[row].tolist()
        index = MetadataIndex(key, own.offset, row)
        for segment in _segments(own, None if first < 0 else (first, last)):
            yield index, segment


def planned_by_item(
    index: Index, wanted: Sequence[ShardedTensor]
) -> tuple[list[ReadItem], list[Finding]]:
    """The reads that fill every wanted shard, and the shards that nothing stored fills."""
    items: list[ReadItem] = []
    findings: list[Finding] = []
    for source_leaf, shard in enumerate(wanted):
        tensor = index[shard.key]
        dest_index = MetadataIndex(shard.key, shard.box.offset, source_leaf)
        whole = Box.whole(tensor.global_shape)
        needed = found = 0
        seen: set[tuple[int, Box]] = set()
        for dest in _segments(shard.box, shard.flat_range):
            # A wanted shard may stick out of a smaller stored tensor (allow_shape_mismatch).
            inside = dest.box.intersect(whole)
            if inside is None:
                continue
            needed += inside.num_elements
            if tensor.pieces is None:
                stored = _grid_chunks(tensor, inside)
            else:
                stored = _pieces(shard.key, tensor.pieces, inside)
            for storage_index, source in stored:
                common = source.box.intersect(inside)
                if common is None:
                    continue
                if (dest.start, common) in seen:
                    continue  # a piece that is listed twice must not make up for a lost one
                seen.add((dest.start, common))
                found += common.num_elements
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index,
                        dest.window(common),
                        storage_index,
                        source.window(common),
                    )
                )
        if found != needed:
            findings.append(
                Finding(
                    "the checkpoint does not cover the wanted part exactly once",
                    shard.key,
                    expected=f"{needed} elements in {shard.box.offset} .. {shard.box.stop}",
                    found=f"{found} elements",
                )
            )
    return items, findings
