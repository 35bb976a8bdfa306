"""An index on its way to ranks, each of which unpacks only the tensors that it asks for.

Rank 0 reads the index file and sends few bytes for each tensor and piece. They are blocks of keys,
so that a rank's memory and time grow with what it wants and not with what the checkpoint holds.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dist_checkpointing.format.geometry import Int64s, Ints, PieceColumns
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.shard_table import column_end, pack_column, unpack_column

_HEAD = struct.Struct("<QQQQQ")
_KEYS_A_BLOCK = 256
_LEVEL = 1


@dataclass(frozen=True, slots=True, eq=False)
class SharedIndex:
    """An index as rank 0 sends it to all ranks: blocks of tensors sorted by key, packed.

    Or the index as a whole.
    """

    last_keys: Sequence[str]
    blocks: Sequence[bytes]
    objects: Mapping[str, Ints]
    codec: str | None
    whole: Index | None = None

    @classmethod
    def of(cls, index: Index, num_ranks: int) -> SharedIndex:
        """An index for so many ranks. One that knows more than its columns is sent as it is."""
        if num_ranks == 1 or type(index) is not Index:
            return cls((), (), {}, None, index)
        rows = sorted(range(len(index)), key=index.keys_column.__getitem__)
        parts = [rows[i : i + _KEYS_A_BLOCK] for i in range(0, len(rows), _KEYS_A_BLOCK)]
        pieces = PieceColumns.of(index.pieces)
        return cls(
            [index.keys_column[part[-1]] for part in parts],
            [_pack(index, pieces, part) for part in parts],
            index.objects,
            index.codec,
        )

    def keys(self) -> Iterator[str]:
        if self.whole is not None:
            yield from self.whole
        for block in self.blocks:
            yield from _Block(block).keys

    def index(self, keys: Collection[str] | None) -> Index:
        """The index of the tensors and objects with these keys, as far as they exist; None: all."""
        if self.whole is not None:
            return self.whole
        if keys is None:
            wanted: Sequence[int] = range(len(self.blocks))
            objects = self.objects
        else:
            places = {bisect.bisect_left(self.last_keys, key) for key in keys}
            wanted = sorted(places - {len(self.blocks)})
            objects = {key: self.objects[key] for key in keys if key in self.objects}
        parts = [_Block(self.blocks[number]).index(keys) for number in wanted]
        return replace(_joined(parts), objects=objects, codec=self.codec)


def _pack(index: Index, pieces: PieceColumns, rows: list[int]) -> bytes:
    keys = [index.keys_column[row] for row in rows]
    names = {name: i for i, name in enumerate(dict.fromkeys(index.dtype_column[r] for r in rows))}
    in_pieces = [key for key in keys if key in pieces]
    own = PieceColumns.of({key: pieces[key] for key in in_pieces})
    has_grid = index.has_grid[rows]
    columns = [
        np.array([names[index.dtype_column[row]] for row in rows], dtype=np.int64),
        np.array([len(index.global_shape_column[row]) for row in rows], dtype=np.int64),
        has_grid.astype(np.int64),
        *index.global_shapes[rows].T,
        *index.chunk_shapes[rows].T,
    ]
    counts = np.diff(own.starts)
    of_pieces = [*own.offsets.T, *own.shapes.T, *own.flat.T]
    text = json.dumps([keys, [*names]]).encode()
    width = index.global_shapes.shape[1]
    sizes = (len(rows), width, len(own.flat), own.offsets.shape[1], len(text))
    packed = [*map(pack_column, [*columns, counts, *of_pieces])]
    return zlib.compress(b"".join([_HEAD.pack(*sizes), text, *packed]), _LEVEL)


class _Block:
    """Some tensors of an index, as ``_pack`` packs them."""

    def __init__(self, packed: bytes) -> None:
        self._data = zlib.decompress(packed)
        sizes = _HEAD.unpack_from(self._data)
        self._rows, self._width, self._pieces, self._piece_width, text_size = sizes
        self._at = _HEAD.size + text_size
        self.keys, self._dtypes = json.loads(self._data[_HEAD.size : self._at])

    def index(self, wanted: Collection[str] | None) -> Index:
        """The tensors with these keys; None: all."""
        chosen = [i for i, key in enumerate(self.keys) if wanted is None or key in wanted]
        dtypes, ndim, has_grid = (self._next(self._rows) for _ in range(3))
        shapes, chunks = (self._table(self._rows, self._width) for _ in range(2))
        in_pieces = np.flatnonzero(has_grid == 0)
        counts = self._next(len(in_pieces))
        offsets, boxes = (self._table(self._pieces, self._piece_width) for _ in range(2))
        flat = self._table(self._pieces, 2)
        is_chosen = np.zeros(self._rows, dtype=np.bool_)
        is_chosen[chosen] = True
        own = is_chosen[in_pieces]
        rows = np.repeat(own, counts)
        axes = ndim.tolist()
        return Index(
            [self.keys[i] for i in chosen],
            [self._dtypes[dtypes[i]] for i in chosen],
            [tuple(shapes[i, : axes[i]].tolist()) for i in chosen],
            [tuple(chunks[i, : axes[i]].tolist()) if has_grid[i] else None for i in chosen],
            PieceColumns(
                [self.keys[i] for i in in_pieces[own].tolist()],
                np.concatenate([[0], np.cumsum(counts[own])]),
                ndim[in_pieces][own],
                offsets[rows],
                boxes[rows],
                flat[rows],
            ),
        )

    def _next(self, rows: int) -> Int64s:
        column = unpack_column(self._data, self._at, rows)
        self._at = column_end(self._data, self._at, rows)
        return column

    def _table(self, rows: int, width: int) -> Int64s:
        table = np.empty((rows, width), dtype=np.int64)
        for axis in range(width):
            table[:, axis] = self._next(rows)
        return table


def _joined(parts: Sequence[Index]) -> Index:
    chained = itertools.chain.from_iterable
    return Index(
        [*chained(part.keys_column for part in parts)],
        [*chained(part.dtype_column for part in parts)],
        [*chained(part.global_shape_column for part in parts)],
        [*chained(part.chunk_shape_column for part in parts)],
        PieceColumns.joined([PieceColumns.of(part.pieces) for part in parts]),
    )
