"""How each tensor is cut up on disk: a chunk grid where the shards allow it, pieces elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, Ints, largest_divisor_block, split_rows
from dist_checkpointing.format.index import Index, Pieces, StoredTensor
from dist_checkpointing.planning.key_groups import KeyGroups
from dist_checkpointing.planning.shard_table import OBJECT, Bools, ShardTable

MAX_CHUNK_BYTES = 32 * 2**20
_MIN_CHUNK_BYTES = 2**20
_ENDLESS = 2**62

StoredPart = tuple[Box, tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class RowBlockLayout:
    """Chunks are row blocks of shards, so that no two ranks share one and tools can read parts.

    The leading extent of a regular shard is divided by the smallest number that gives chunks of at
    most ``max_chunk_bytes``. Shards without a grid, flattened ones, and those that only tiny chunks
    would divide are stored as pieces: the same row blocks, each on its own.

    Attributes:
        max_chunk_bytes: upper limit for a chunk or piece, in bytes.
    """

    max_chunk_bytes: int = MAX_CHUNK_BYTES

    def stored_tensors(self, written: ShardTable) -> Iterator[StoredTensor]:
        """The layout of every tensor in a sorted table of the shards that will be written."""
        groups = KeyGroups(written, written.num_elements > 0)
        chunks = groups.chunk_shapes.tolist()
        grid = groups.is_grid.tolist()
        firsts = written.take(groups.starts)
        columns = zip(
            firsts.key_column, firsts.dtype_column, firsts.global_shape_column, strict=True
        )
        for group, (key, dtype_name, shape) in enumerate(columns):
            ndim, dtype = len(shape), dtypes.from_name(dtype_name)
            chunk = tuple(chunks[group][:ndim])
            if grid[group] and dtype.itemsize * math.prod(chunk) > self.max_chunk_bytes:
                divided = self._divide(shape, chunk, dtype.itemsize)
            else:
                divided = chunk if grid[group] else None
            pieces = None
            if divided is None:
                rows = groups.rows(group)
                parts = self._pieces(written.take(rows[groups.counted[rows]]))
                pieces = Pieces.of(ndim, parts)
            yield StoredTensor(key, dtype, shape, divided, pieces)

    def _divide(self, shape: Ints, chunk: Ints, itemsize: int) -> Ints | None:
        for axis, extent in enumerate(chunk):
            row_bytes = itemsize * math.prod(chunk[axis + 1 :])
            rows = max(1, self.max_chunk_bytes // max(row_bytes, 1))
            if extent == shape[axis]:  # one shard along this axis: the last chunk may be smaller
                block = -(-extent // -(-extent // rows)) if rows < extent else extent
            else:
                block = largest_divisor_block(extent, rows)
            chunk = (*chunk[:axis], block, *chunk[axis + 1 :])
            num_bytes = itemsize * math.prod(chunk)
            if num_bytes <= self.max_chunk_bytes:
                return (
                    chunk if num_bytes >= min(_MIN_CHUNK_BYTES, self.max_chunk_bytes // 4) else None
                )
        return None

    def _pieces(self, rows: ShardTable) -> Iterator[StoredPart]:
        for row in range(len(rows)):
            yield from self._split(rows.box(row), rows.flat_range(row), rows.dtype(row))

    def _split(self, box: Box, flat: tuple[int, int] | None, dtype: str) -> Iterator[StoredPart]:
        most = max(1, self.max_chunk_bytes // dtypes.from_name(dtype).itemsize)
        if flat is None:
            yield from ((part, None) for part in split_rows(box, most))
        else:
            for start in range(flat[0], flat[1], most):
                yield box, (start, min(start + most, flat[1]))

    def is_uncut(self, written: ShardTable, index: Index) -> Bools:
        """Which rows are stored as one chunk or piece just as they are."""
        small = written.num_bytes <= self.max_chunk_bytes
        # A small shard at the edge may still span chunks, if larger neighbours had to be divided.
        chunks = [index.chunk_shape(key) or () for key in written.key_column]
        return small & (written.shapes <= written.padded(chunks, _ENDLESS)).all(axis=1)

    def stored_parts(
        self, tensor: StoredTensor, box: Box, flat: tuple[int, int] | None
    ) -> Iterator[StoredPart]:
        """The chunks or pieces that a written shard consists of."""
        if tensor.chunk_shape is None:
            yield from self._split(box, flat, tensor.dtype.name)
        else:
            yield from ((common, None) for _, common in tensor.grid.intersecting(box))


@dataclass(frozen=True, slots=True)
class WholeShardLayout:
    """Every tensor has a chunk grid, and a regular shard is exactly one chunk (Megatron's zarr).

    An uneven cut gets the largest chunk that divides all its shards, if that makes at most
    ``max_chunks_per_shard`` of them; else the whole axis is one chunk that several ranks write
    into. A flattened range goes to its place in the chunk of its shard.

    Attributes:
        max_chunks_per_shard: along one axis.
    """

    max_chunks_per_shard: int = 64

    def stored_tensors(self, written: ShardTable) -> Iterator[StoredTensor]:
        """The layout of every tensor in a sorted table of the shards that will be written."""
        groups = KeyGroups(written, written.num_elements > 0)
        for group, row in enumerate(groups.starts.tolist()):
            ndim, rows = int(written.ndim[row]), groups.rows(group)
            shape = written.global_shape(row)
            held = written.take(rows[groups.counted[rows]])
            chunk = tuple(
                self._chunk_extent(
                    shape[axis], held.offsets[:, axis].tolist(), held.shapes[:, axis].tolist()
                )
                for axis in range(ndim)
            )
            dtype = dtypes.from_name(written.dtype(row))
            yield StoredTensor(written.key(row), dtype, shape, chunk)

    def _chunk_extent(self, full: int, offsets: Sequence[int], extents: Sequence[int]) -> int:
        largest = max(extents, default=0)
        if largest == 0:
            return max(full, 1)
        pairs = zip(offsets, extents, strict=True)
        if all(o % largest == 0 and e == min(largest, full - o) for o, e in pairs):
            return largest
        cuts = {*offsets, *(o + e for o, e in zip(offsets, extents, strict=True))} - {full}
        divisor = math.gcd(*cuts)
        return divisor if divisor * self.max_chunks_per_shard >= largest else full

    def is_uncut(self, written: ShardTable, index: Index) -> Bools:
        """Which rows are stored just as they are: all."""
        del index
        return np.ones(len(written), dtype=np.bool_)

    def stored_parts(
        self, tensor: StoredTensor, box: Box, flat: tuple[int, int] | None
    ) -> Iterator[StoredPart]:
        """The shard itself: the writer of this format puts it where it belongs."""
        del tensor
        yield box, flat


Layout = RowBlockLayout | WholeShardLayout


def index_of(layout: Layout, announced: ShardTable, written: ShardTable) -> Index:
    """What a checkpoint will hold.

    Args:
        layout: how tensors are cut up.
        announced: shards of all ranks, sorted by key; a tensor without elements is only here.
        written: those with elements that will be written, sorted by key.
    """
    tensors = [*layout.stored_tensors(written.take(~written.is_object))]
    stored = {tensor.key for tensor in tensors}
    groups = KeyGroups(announced, np.zeros(len(announced), dtype=np.bool_))
    objects = {}
    firsts = announced.take(groups.starts)
    special = firsts.take(firsts.is_object | (firsts.global_shapes == 0).any(axis=1))
    for row in range(len(special)):
        key, shape = special.key(row), special.global_shape(row)
        if special.dtype(row) == OBJECT:
            objects[key] = shape
        elif key not in stored:
            chunk = tuple(max(extent, 1) for extent in shape)
            tensors.append(StoredTensor(key, dtypes.from_name(special.dtype(row)), shape, chunk))
    return Index.of(sorted(tensors, key=lambda tensor: tensor.key), objects)
