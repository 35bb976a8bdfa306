"""Fingerprints: sums of a tensor that do not depend on its cuts; summed while writing, or by
reading.

A tensor is its elements in C order, as little-endian bytes, cut into words of 8 bytes; the last
word is padded with zeros. Word ``j`` counts ``word * g(j % 1024) * h(j // 1024)`` modulo 2**64. The
second sum has other multipliers, and the bytes of each word in reverse order: a multiplier cannot
move a high bit downwards. A part of a tensor is the tensor with zeros everywhere else, so the sums
of the parts of any cut add up. See docs/design/009-fingerprints.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from dist_checkpointing.format.checksums import Uint64s
from dist_checkpointing.format.geometry import (
    Box,
    FlatRange,
    Int64s,
    Ints,
    changes,
    ravel_offset,
    split_rows,
    unravel_range,
    values_of_part,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner, WriteItem
from dist_checkpointing.storage.staging import PlannedData
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES, batches, stream

Sums = tuple[int, int]
Bytes = npt.NDArray[np.uint8]

_MOST_BYTES: Final = 1 << 24
"""Of a tensor on another device are in memory at a time."""
_WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 1024
_BLOCK_BYTES: Final = _BLOCK_WORDS * _WORD_BYTES
_SLAB_WORDS: Final = 1 << 16
"""What is summed at a time, such that it stays in the cache."""
_ROW_BYTES: Final = 32
"""A shorter row counts as so many, because of what is computed for each row."""
_SLAB_BLOCKS: Final = 128
"""Of a long run are summed at a time: fewer would be more calls, more would leave the cache."""
_WIDE: Final = 32
_ALIKE: Final = 16
"""Rows of so many words that begin alike are taken together if there are so many of each kind."""
_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def sums_of_tensor(
    values: torch.Tensor, box: Box, flat_range: FlatRange, global_shape: Ints
) -> Sums:
    """The sums of a part of a tensor: of a box of it, or of a range of the flattened box.

    The values may be on any device, and without the axes that exist only globally.
    """
    values = values.detach().reshape(box.shape if flat_range is None else (-1,))
    return added(
        sums
        for run, own in values_of_part(box, flat_range, values)
        for block, offset in _blocks(own, run.offset)
        for sums in _sums_of_box(block, offset, global_shape)
    )


def _blocks(values: torch.Tensor, offset: Ints) -> Iterator[tuple[torch.Tensor, Ints]]:
    """Values in the memory of the CPU, in blocks of which a copy is small, and their offsets."""
    if values.is_cpu and values.is_contiguous():
        yield values, offset
        return
    most = _SLAB_WORDS if values.is_cpu else _MOST_BYTES // values.itemsize
    for block in split_rows(Box.whole(tuple(values.shape)), most):
        yield values[block.slices()].cpu(), block.moved(offset).offset


def sums_of_shard(shard: ShardedTensor) -> Sums:
    """The sums of what a shard holds, as a part of its global tensor."""
    assert shard.data is not None
    return sums_of_tensor(shard.data, shard.box, shard.flat_range, tuple(shard.global_shape))


def fingerprints_by_reading(
    index: Index,
    keys: Iterable[str],
    read: Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]],
    report: Callable[[int], None] = lambda _: None,
    most_bytes: int = DEFAULT_MEMORY_BYTES // 2,
) -> dict[str, str]:
    """The fingerprints of stored tensors, computed from their values."""
    parts: dict[str, list[Sums]] = {key: [] for key in keys}

    def add(key: str, box: Box, values: torch.Tensor) -> None:
        parts[key].append(sums_of_tensor(values, box, None, index[key].global_shape))
        report(values.nbytes)

    regions = [(key, Box.whole(index[key].global_shape)) for key in parts]
    stream(batches(index, regions, most_bytes), read, add)
    return {
        key: fingerprint_of(added(sums), index[key].dtype.name, index[key].global_shape)
        for key, sums in parts.items()
    }


def added(parts: Iterable[Sequence[int]]) -> Sums:
    """The sums of what all parts make up together."""
    first = second = 0
    for one, other in parts:
        first, second = first + one, second + other
    return first & _MASK, second & _MASK


def fingerprint_of(sums: Sequence[int], dtype: str, global_shape: Sequence[int]) -> str:
    """The fingerprint of a tensor with these sums: 32 hex digits."""
    text = f"{dtype} {','.join(map(str, global_shape))}"
    kind = xxhash.xxh3_128_intdigest(text.encode())
    return f"{(sums[0] + (kind >> 64)) & _MASK:016x}{(sums[1] + kind) & _MASK:016x}"


def _sums_of_box(values: torch.Tensor, offset: Ints, global_shape: Ints) -> Iterator[Sequence[int]]:
    """The sums of the values of a box that begins at an offset of the tensor, in parts."""
    array = tensor_memory.as_numpy(values)
    if not array.size:
        return
    axis = len(array.shape)
    while axis and array.shape[axis := axis - 1] == global_shape[axis]:
        pass
    leading = array.shape[:axis]
    start = ravel_offset(offset, global_shape) * array.itemsize
    data = array.ravel().view(np.uint8)
    num_rows = math.prod(leading)
    if num_rows == 1:
        yield from _sums_of_run(data, start)
        return
    rows = data.reshape(num_rows, -1)
    pitch = math.prod(global_shape[axis:]) * array.itemsize
    most = max(1, _SLAB_WORDS * _WORD_BYTES // max(rows.shape[1], _ROW_BYTES))
    for first in range(0, num_rows, most):
        slab = rows[first : first + most]
        indices = unravel_range(first, first + len(slab), leading)
        starts = start + pitch * np.ravel_multi_index(indices, global_shape[:axis])
        yield from (
            _sums_of_run(slab[0], int(starts[0])) if most == 1 else _sums_of_rows(slab, starts)
        )


def _sums_of_run(data: Bytes, start: int) -> Iterator[Sequence[int]]:
    """The sums of bytes that follow each other in the tensor, from byte ``start`` on."""
    head = min(-start % _BLOCK_BYTES, data.size)
    tail = data.size - (data.size - head) % _BLOCK_BYTES
    for begin, end in ((0, head), (tail, data.size)):
        if begin < end:
            yield _sums_in_block(data[begin:end], start + begin)
    if head == tail:
        return
    blocks = data[head:tail].view("<i8").reshape(-1, _BLOCK_WORDS)
    values = np.empty((2, len(blocks)), dtype=np.int64)
    scratch = np.empty((min(len(blocks), _SLAB_BLOCKS), _BLOCK_WORDS), dtype=np.int64)
    for first in range(0, len(blocks), _SLAB_BLOCKS):
        slab = slice(first, first + _SLAB_BLOCKS)
        words = blocks[slab]
        swapped = scratch[: len(words)]
        np.copyto(swapped, words.view(">i8"))
        for which, own in enumerate((words, swapped)):
            np.einsum("ij,j->i", own, _G[which, :_BLOCK_WORDS], out=values[which, slab])
    numbers = (start + head) // _BLOCK_BYTES + np.arange(len(blocks))
    yield (values * _multipliers(numbers, 1)).sum(axis=1).tolist()


def _sums_in_block(data: Bytes, start: int) -> Sums:
    """The sums of bytes that follow each other in one block; small tensors are no more."""
    word, shift = divmod(start, _WORD_BYTES)
    if shift or data.size % _WORD_BYTES:
        words = _words(data[None], np.array([shift]))[0]
    else:
        words = data.view("<i8")
    block, phase = divmod(word, _BLOCK_WORDS)
    used = slice(phase, phase + len(words))
    first, second = _factors_of_block(block)
    swapped = words.byteswap()
    return int(np.dot(words, _G[0, used])) * first, int(np.dot(swapped, _G[1, used])) * second


def _words(rows: Bytes, shifts: Int64s) -> Int64s:
    """Rows of bytes as words, with zeros before each row, as many as its shift, and behind it."""
    several = np.flatnonzero(np.bincount(shifts)).tolist()
    size = rows.shape[1]
    if several == [0] and not size % _WORD_BYTES:
        return rows.view("<i8")
    words = np.zeros((len(rows), -(-(several[-1] + size) // _WORD_BYTES)), dtype="<i8")
    for shift in several:
        chosen = shifts == shift if len(several) > 1 else slice(None)
        words.view(np.uint8)[chosen, shift : shift + size] = rows[chosen]
    return words


def _sums_of_rows(rows: Bytes, starts: Int64s) -> Iterator[Sequence[int]]:
    """The sums of rows of bytes, each of which begins at a byte of the tensor, ascending."""
    words = _words(rows, starts % _WORD_BYTES)
    firsts = starts // _WORD_BYTES
    for column in range(0, words.shape[1], _BLOCK_WORDS):
        part = words[:, column : column + _BLOCK_WORDS]
        blocks, phases = np.divmod(firsts + column, _BLOCK_WORDS)
        values = _values_of_rows((part, part.byteswap()), phases)
        # Rows of one block share its multiplier.
        is_new = np.flatnonzero(changes([blocks]))
        numbers = blocks[is_new]
        factors = _multipliers(np.stack([numbers, numbers + 1]), 1)
        sums = np.add.reduceat(values, is_new, axis=2) * factors
        yield sums.sum(axis=(1, 2)).tolist()


def _values_of_rows(words: tuple[Int64s, Int64s], phases: Int64s) -> Int64s:
    """What rows count before the multipliers of blocks, for both sums: ``[2, 2, rows]``.

    First in the blocks where they begin, at the words ``phases``, then in the blocks that follow.
    """
    count, width = words[0].shape
    values = np.zeros((2, 2, count), dtype=np.int64)
    several = phases[:1]
    if (phases != several).any():
        several = np.unique(phases) if width >= _WIDE else phases
    if len(several) == 1 or len(several) * _ALIKE <= count:
        for phase in several.tolist():
            alike = slice(None) if len(several) == 1 else np.flatnonzero(phases == phase)
            inside = _BLOCK_WORDS - phase
            for which, own in enumerate(words):
                rows, table = own[alike], _G[which, phase : phase + width]
                values[which, 0, alike] = np.einsum("ij,j->i", rows[:, :inside], table[:inside])
                if width > inside:
                    values[which, 1, alike] = np.einsum("ij,j->i", rows[:, inside:], table[inside:])
        return values
    over = np.flatnonzero(phases + width > _BLOCK_WORDS)
    is_next = np.arange(width) >= _BLOCK_WORDS - phases[over, None]
    for which, own in enumerate(words):
        table = sliding_window_view(_G[which], width)[phases]
        values[which, 0] = np.einsum("ij,ij->i", own, table)
        if len(over):
            beyond = np.where(is_next, table[over], 0)
            values[which, 1, over] = np.einsum("ij,ij->i", own[over], beyond)
    values[:, 0] -= values[:, 1]
    return values


@lru_cache(maxsize=_BLOCK_WORDS)
def _factors_of_block(block: int) -> list[int]:
    """``h`` of a block, for both sums."""
    factors: list[int] = _multipliers(np.array(block), 1).tolist()
    return factors


def _multipliers(counters: Int64s, kind: int) -> Int64s:
    """``g`` (kind 0) or ``h`` (1) of some numbers, for both sums along a new first axis.

    They are the outputs ``4 * counter + kind`` and ``+ 2`` of SplitMix64 with seed 0 (Steele et
    al., 2014), made odd.
    """
    first = counters.astype(np.uint64) * np.uint64(4) + np.uint64(kind + 1)
    state = np.stack([first, first + np.uint64(2)]) * np.uint64(_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_G: Final = np.tile(_multipliers(np.arange(_BLOCK_WORDS), 0), 2)
"""``g`` twice one after the other, so that any 1024 of a row are one slice."""

SUMS_ROW: Final = np.dtype([("number", "<i4"), ("sums", "<u8", (2,))])
"""What ranks send of their sums: a number that all of them know, and the sums that belong to it."""


def totals(count: int, packed: Iterable[bytes]) -> Uint64s:
    """``[count, 2]``, the sums of each number, of the rows that all ranks have packed."""
    sums = np.zeros((count, 2), dtype=np.uint64)
    for data in packed:
        rows = np.frombuffer(data, dtype=SUMS_ROW)
        np.add.at(sums, rows["number"], rows["sums"])
    return sums


class SummingPlanner(PlannedData):
    """Answers like another planner, and sums what it gives for the rows of a plan."""

    def __init__(self, planner: SavePlanner, plan: SavePlan) -> None:
        super().__init__(plan, ())
        self._planner, table = planner, self._table
        self._sums = np.zeros((len(table), 2), dtype=np.uint64)
        self._is_object, self._is_summed = table.is_object, [False] * len(table)

    def packed(self) -> bytes:
        """The sums of each tensor, with its row in the index."""
        index, table = self._index, self._table
        assert index is not None
        numbers = index.rows_of(table.names)[table.keys]
        known = np.flatnonzero(numbers >= 0)
        sums = np.zeros((len(index), 2), dtype=np.uint64)
        np.add.at(sums, numbers[known], self._sums[known])
        packed = np.zeros(np.count_nonzero(sums.any(axis=1)), dtype=SUMS_ROW)
        packed["number"] = np.flatnonzero(sums.any(axis=1))
        packed["sums"] = sums[packed["number"]]
        return packed.tobytes()

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        if plan.table is not self._table:
            return SavePlanner.data_of(self, plan)
        give = self._planner.data_of(plan)
        return lambda row: self._summed(row, give(row))

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        return self._summed(self._row_of[item], self._planner.get_data(item))

    @property
    def makes_data(self) -> bool:
        return self._planner.makes_data

    def _summed(self, row: int, given: Any) -> object:
        # Of a base a writer asks twice. What is made once more may be something else.
        if self._is_object[row] or (self._is_summed[row] and not self.makes_data):
            return given
        box, flat_range = self._table.box(row), self._table.flat_range(row)
        self._sums[row] = sums_of_tensor(given, box, flat_range, self._table.global_shape(row))
        self._is_summed[row] = True
        return given


def with_fingerprints(index: Index, packed: Iterable[bytes]) -> Index:
    """The index with the fingerprints of all tensors, of what each rank has packed."""
    columns = (totals(len(index), packed).tolist(), index.dtype_column, index.global_shape_column)
    fingerprints = map(fingerprint_of, *columns)
    return replace(index, fingerprints=dict(zip(index.keys_column, fingerprints, strict=True)))
