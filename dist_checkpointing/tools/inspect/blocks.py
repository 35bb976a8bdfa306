"""Tensors cut into blocks that fit into memory, along the chunks in which they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from dist_checkpointing.format.byte_sizes import in_batches
from dist_checkpointing.format.geometry import Box, ChunkGrid, Ints, split_rows
from dist_checkpointing.format.index import Index, StoredTensor

MOST_BOXES: Final = 4096


def blocks(stored: StoredTensor, region: Box, most_bytes: int) -> Iterator[Box]:
    """``region`` cut into boxes of at most ``most_bytes`` each.

    No stored chunk is in two of them unless it is larger than that.
    """
    most_elements = max(1, most_bytes // stored.dtype.itemsize)
    if region.num_elements == 0:
        return
    if stored.pieces is not None or region.num_elements <= most_elements:
        yield from split_rows(region, most_elements)
        return
    grid = stored.grid
    chunk = tuple(map(min, grid.chunk_shape, grid.global_shape))
    block = chunk if math.prod(chunk) > most_elements else _grown(chunk, grid, most_elements)
    for _, part in ChunkGrid(grid.global_shape, block).meeting(region):
        yield from split_rows(part, most_elements)


def _grown(chunk: Ints, grid: ChunkGrid, most_elements: int) -> Ints:
    """As many whole chunks as fit, the last axis first."""
    block = list(chunk)
    for axis in reversed(range(len(block))):
        fitting = min(grid.counts[axis], most_elements // math.prod(block))
        block[axis] *= fitting
        if fitting < grid.counts[axis]:
            break
    return tuple(block)


def batches(
    index: Index, regions: Iterable[tuple[str, Box]], most_bytes: int
) -> Iterator[list[tuple[str, Box]]]:
    """Regions of tensors cut into blocks, and small blocks put together to be read at once.

    Args:
        index: what is stored.
        regions: keys, and boxes in elements of the global tensors.
        most_bytes: of all blocks of a batch together.
    """

    def rows() -> Iterator[tuple[tuple[str, Box], int]]:
        for key, region in regions:
            stored = index[key]
            for block in blocks(stored, region, most_bytes):
                yield (key, block), block.num_elements * stored.dtype.itemsize

    return in_batches(rows(), most_bytes, MOST_BOXES)
