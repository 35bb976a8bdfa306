"""Stored tensors cut into boxes to be read one after the other, along what is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.format.geometry import Box, ChunkGrid, split_rows
from dist_checkpointing.format.index import Index, StoredTensor

Values = TypeVar("Values")
DEFAULT_MEMORY_BYTES = 256 * 2**20
MOST_BOXES = 4096


def blocks(stored: StoredTensor, region: Box, most_bytes: int) -> Iterator[Box]:
    """``region`` cut into boxes of at most ``most_bytes`` each.

    A stored chunk is in only one box, unless it is larger than that.
    """
    most_elements = max(1, most_bytes // stored.dtype.itemsize)
    if region.num_elements == 0:
        return
    if stored.pieces is not None or region.num_elements <= most_elements:
        yield from split_rows(region, most_elements)
        return
    grid = stored.grid
    block = [*map(min, grid.chunk_shape, grid.global_shape)]
    if math.prod(block) <= most_elements:
        # As many whole chunks as fit, the last axis first.
        for axis in reversed(range(len(block))):
            fitting = min(grid.counts[axis], most_elements // math.prod(block))
            block[axis] *= fitting
            if fitting < grid.counts[axis]:
                break
    for _, part in ChunkGrid(grid.global_shape, tuple(block)).intersecting(region):
        yield from split_rows(part, most_elements)


def batches(
    index: Index, regions: Iterable[tuple[str, Box]], most_bytes: int
) -> Iterator[list[tuple[str, Box]]]:
    """Regions of tensors cut into blocks, with small blocks in batches to be read at once."""
    sized = (
        ((key, block), block.num_elements * index[key].dtype.itemsize)
        for key, region in regions
        for block in blocks(index[key], region, most_bytes)
    )
    return in_batches(sized, most_bytes, MOST_BOXES)


def stream(
    some: Iterable[Sequence[tuple[str, Box]]],
    read: Callable[[Sequence[tuple[str, Box]]], Iterable[Values]],
    use: Callable[[str, Box, Values], None],
) -> None:
    """Read batches one after the other, and call ``use`` with the values of each box."""

    def read_one(batch: Sequence[tuple[str, Box]]) -> None:
        # A function of its own, so that its values are freed before the next batch is read.
        for (key, box), values in zip(batch, read(batch), strict=True):
            use(key, box, values)

    for batch in some:
        read_one(batch)
