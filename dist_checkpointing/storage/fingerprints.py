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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from numpy.lib.stride_tricks import sliding_window_view

from dist_checkpointing.format.geometry import Box, Ints, ravel_offset, split_rows, values_of_part
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner, WriteItem
from dist_checkpointing.storage.staging import PlannedData
from dist_checkpointing.storage.streaming import DEFAULT_MEMORY_BYTES, batches, stream

Sums = tuple[int, int]
Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

NOTHING: Final[Sums] = (0, 0)
_MOST_BYTES: Final = 1 << 24
"""Of a tensor on another device are in memory at a time."""
_WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 1024
_SLAB_WORDS: Final = 1 << 16
"""What is summed at a time, such that it stays in the cache."""
_SLAB_BLOCKS: Final = 128
"""Of a long run are summed at a time: fewer would be more calls, more would leave the cache."""
_WIDE: Final = 32
_ALIKE: Final = 16
"""Rows of so many words that begin alike are taken together if there are so many of each kind."""
_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def sums_of_tensor(
    values: torch.Tensor, box: Box, flat_range: tuple[int, int] | None, global_shape: Ints
) -> Sums:
    """The sums of a part of a tensor, which may be on any device; see ``sums_of_part``."""
    values = values.detach()
    if values.is_cpu:
        return sums_of_part(tensor_memory.as_numpy(values), box, flat_range, global_shape)
    return _sums_of_blocks(values, box, flat_range, global_shape, _MOST_BYTES)


def _sums_of_blocks(
    values: torch.Tensor,
    box: Box,
    flat_range: tuple[int, int] | None,
    global_shape: Ints,
    most_bytes: int,
) -> Sums:
    """The same of a tensor on another device, of which so many bytes are here at a time."""
    total = NOTHING
    for block in split_rows(Box.whole(tuple(values.shape)), most_bytes // values.itemsize):
        part = tensor_memory.as_numpy(values[block.slices()].cpu())
        if flat_range is None:
            sums = sums_of_part(part, block.moved(box.offset), None, global_shape)
        else:
            begin = flat_range[0] + block.offset[0]
            sums = sums_of_part(part, box, (begin, begin + part.size), global_shape)
        total = added((total, sums))
    return total


def sums_of_shard(shard: ShardedTensor) -> Sums:
    """The sums of what a shard holds, as a part of its global tensor."""
    assert shard.data is not None
    values = shard.data[(None,) * shard.prepend_axis_num] if shard.prepend_axis_num else shard.data
    return sums_of_tensor(values, shard.box, shard.flat_range, tuple(shard.global_shape))


def fingerprints_by_reading(
    index: Index,
    keys: Iterable[str],
    read: Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]],
    report: Callable[[int], None] = lambda _: None,
    most_bytes: int = DEFAULT_MEMORY_BYTES // 2,
) -> dict[str, str]:
    """The fingerprints of stored tensors, computed from their values."""
    total = dict.fromkeys(keys, NOTHING)

    def add(key: str, box: Box, values: torch.Tensor) -> None:
        own = sums_of_tensor(values, box, None, index[key].global_shape)
        total[key] = added((total[key], own))
        report(values.nbytes)

    regions = [(key, Box.whole(index[key].global_shape)) for key in total]
    stream(batches(index, regions, most_bytes), read, add)
    return {
        key: fingerprint_of(sums, index[key].dtype.name, index[key].global_shape)
        for key, sums in total.items()
    }


def added(parts: Iterable[Sums]) -> Sums:
    """The sums of what all parts make up together."""
    first = second = 0
    for one, other in parts:
        first, second = first + one, second + other
    return first & _MASK, second & _MASK


def fingerprint_of(sums: Sums, dtype: str, global_shape: Sequence[int]) -> str:
    """The fingerprint of a tensor with these sums: 32 hex digits."""
    text = f"{dtype} {','.join(map(str, global_shape))}"
    kind = xxhash.xxh3_128_intdigest(text.encode())
    return f"{(sums[0] + (kind >> 64)) & _MASK:016x}{(sums[1] + kind) & _MASK:016x}"


def sums_of_part(
    values: Array, box: Box, flat_range: tuple[int, int] | None, global_shape: Ints
) -> Sums:
    """The sums of a part of a tensor, whose values have the shape of the box or are a range."""
    parts = values_of_part(box, flat_range, values)
    return added(_sums_of_box(own, run, global_shape) for run, own in parts)


def _sums_of_box(values: Array, box: Box, global_shape: Ints) -> Sums:
    if not values.size:
        return NOTHING
    if not values.flags.c_contiguous:
        blocks = split_rows(Box.whole(values.shape), _SLAB_WORDS)
        if len(blocks) > 1:
            return added(
                _sums_of_box(values[block.slices()], block.moved(box.offset), global_shape)
                for block in blocks
            )
        values = np.ascontiguousarray(values)
    itemsize = values.dtype.itemsize
    data = values.reshape(-1).view(np.uint8)
    start = ravel_offset(box.offset, global_shape) * itemsize
    axis, run = len(box.shape), itemsize
    while axis:
        axis -= 1
        run *= box.shape[axis]
        if box.shape[axis] != global_shape[axis]:
            break
    leading = box.shape[:axis]
    num_rows = math.prod(leading)
    if num_rows == 1:
        return _sums_of_run(data, start)
    rows = data.reshape(num_rows, run)
    steps = [math.prod(global_shape[number + 1 :]) * itemsize for number in range(axis)]
    most = max(1, _SLAB_WORDS * _WORD_BYTES // run)
    total = NOTHING
    for first in range(0, num_rows, most):
        part = rows[first : first + most]
        places = np.unravel_index(np.arange(first, first + len(part)), leading)
        starts = np.full(len(part), start, dtype=np.int64)
        for place, step in zip(places, steps, strict=True):
            starts += place * step
        own = _sums_of_run(part[0], int(starts[0])) if most == 1 else _sums_of_rows(part, starts)
        total = added((total, own))
    return total


def _sums_of_run(data: npt.NDArray[np.uint8], start: int) -> Sums:
    """The sums of bytes that follow each other in the tensor, from byte ``start`` on."""
    first, shift = divmod(start, _WORD_BYTES)
    count = -(-(shift + data.size) // _WORD_BYTES)
    is_aligned = not shift and not data.size % _WORD_BYTES and not data.ctypes.data % _WORD_BYTES

    def words(begin: int, size: int) -> Int64s:
        if is_aligned:
            return data.view("<i8")[begin : begin + size]
        return _padded(data, begin * _WORD_BYTES - shift, size)

    block, phase = divmod(first, _BLOCK_WORDS)
    if phase + count <= _BLOCK_WORDS:
        return _sums_in_block(words(0, count), phase, block)
    head = min(-phase % _BLOCK_WORDS, count)
    tail = (count - head) % _BLOCK_WORDS
    total = NOTHING
    for begin, size in ((0, head), (count - tail, tail)):
        if size:
            block, phase = divmod(first + begin, _BLOCK_WORDS)
            total = added((total, _sums_in_block(words(begin, size), phase, block)))
    values = np.empty((2, (count - head - tail) // _BLOCK_WORDS), dtype=np.int64)
    scratch = np.empty((min(values.shape[1], _SLAB_BLOCKS), _BLOCK_WORDS), dtype=np.int64)
    for number in range(0, values.shape[1], _SLAB_BLOCKS):
        slab = values[:, number : number + _SLAB_BLOCKS]
        begin, size = head + number * _BLOCK_WORDS, slab.shape[1] * _BLOCK_WORDS
        rows = words(begin, size).reshape(-1, _BLOCK_WORDS)
        swapped = scratch[: len(rows)]
        np.copyto(swapped, rows.view(">i8"))
        for which, given in enumerate((rows, swapped)):
            np.einsum("ij,j->i", given, _word_multipliers(which)[:_BLOCK_WORDS], out=slab[which])
    numbers = (first + head) // _BLOCK_WORDS + np.arange(values.shape[1])
    sums = [_dot(row, _block_multipliers(numbers, which)) for which, row in enumerate(values)]
    return added((total, (sums[0], sums[1])))


def _sums_in_block(words: Int64s, phase: int, block: int) -> Sums:
    """The sums of words that follow each other in one block; small tensors are no more."""
    stop = phase + len(words)
    factors = _factors_of_block(block)
    first = int(np.dot(words, _word_multipliers(0)[phase:stop])) * factors[0]
    second = int(np.dot(words.byteswap(), _word_multipliers(1)[phase:stop])) * factors[1]
    return first & _MASK, second & _MASK


def _padded(data: npt.NDArray[np.uint8], begin: int, num_words: int) -> Int64s:
    """Words of the data from byte ``begin`` on, with zeros where there is no data."""
    words = np.zeros(num_words, dtype="<i8")
    low, high = max(begin, 0), min(begin + words.nbytes, data.size)
    words.view(np.uint8)[low - begin : high - begin] = data[low:high]
    return words


def _sums_of_rows(rows: npt.NDArray[np.uint8], starts: Int64s) -> Sums:
    """The sums of rows of bytes, each of which begins at a byte of the tensor."""
    shifts = starts % _WORD_BYTES
    total = NOTHING
    for shift in np.unique(shifts).tolist():
        chosen = shifts == shift
        own = rows if chosen.all() else rows[chosen]
        if shift or own.shape[1] % _WORD_BYTES or own.ctypes.data % _WORD_BYTES:
            width = -(-(shift + own.shape[1]) // _WORD_BYTES)
            words = np.zeros((len(own), width), dtype="<i8")
            words.view(np.uint8)[:, shift : shift + own.shape[1]] = own
        else:
            words = own.view("<i8")
        firsts = starts[chosen] // _WORD_BYTES
        scratch = np.empty(len(words) * min(words.shape[1], _BLOCK_WORDS), dtype=np.int64)
        for column in range(0, words.shape[1], _BLOCK_WORDS):
            part = words[:, column : column + _BLOCK_WORDS]
            total = added((total, _sums_of_words(part, firsts + column, scratch)))
    return total


def _sums_of_words(words: Int64s, starts: Int64s, scratch: Int64s) -> Sums:
    """The sums of rows of at most 1024 words, each of which begins at a word of the tensor."""
    swapped = scratch[: words.size].reshape(words.shape)
    np.copyto(swapped, words.view(">i8"))
    phases, blocks = starts % _BLOCK_WORDS, starts // _BLOCK_WORDS
    is_one_phase = bool((phases == phases[0]).all())
    first_block = int(blocks.min())
    span = int(blocks.max()) + 2 - first_block
    sums = []
    for number, own in enumerate((words, swapped)):
        if span <= len(starts):
            table = _block_multipliers(np.arange(first_block, first_block + span), number)
            factors, following = table[blocks - first_block], table[blocks - first_block + 1]
        else:
            factors = _block_multipliers(blocks, number)
            following = _block_multipliers(blocks + 1, number)
        if is_one_phase:
            sums.append(_in_phase(own, int(phases[0]), factors, following, number))
        else:
            sums.append(_out_of_phase(own, phases, factors, following, number))
    return sums[0], sums[1]


def _in_phase(words: Int64s, phase: int, factors: Int64s, following: Int64s, number: int) -> int:
    """A sum of rows that all begin at the same word of their blocks, ``phase``.

    The factors are the multipliers of the blocks, and of the blocks that follow them.
    """
    table = _word_multipliers(number)
    inside = min(words.shape[1], _BLOCK_WORDS - phase)
    values = np.einsum("ij,j->i", words[:, :inside], table[phase : phase + inside])
    total = _dot(values, factors)
    if inside < words.shape[1]:
        values = np.einsum("ij,j->i", words[:, inside:], table[: words.shape[1] - inside])
        total += _dot(values, following)
    return total & _MASK


def _out_of_phase(
    words: Int64s, phases: Int64s, factors: Int64s, following: Int64s, number: int
) -> int:
    """A sum of rows that begin at any words of their blocks; see ``_in_phase``."""
    width = words.shape[1]
    several = np.unique(phases) if width >= _WIDE else phases
    if len(several) * _ALIKE <= len(phases):
        total = 0
        for phase in several.tolist():
            rows = np.flatnonzero(phases == phase)
            total += _in_phase(words[rows], phase, factors[rows], following[rows], number)
        return total & _MASK
    multipliers = sliding_window_view(_word_multipliers(number), width)[phases]
    total = _dot(np.einsum("ij,ij->i", words, multipliers), factors)
    over = np.flatnonzero(phases + width > _BLOCK_WORDS)
    if len(over):
        is_next = np.arange(width) >= _BLOCK_WORDS - phases[over, None]
        values = np.einsum("ij,ij->i", words[over], np.where(is_next, multipliers[over], 0))
        total += _dot(values, following[over] - factors[over])
    return total & _MASK


def _dot(values: Int64s, factors: Int64s) -> int:
    return int((values * factors).sum())


@cache
def _word_multipliers(number: int) -> Int64s:
    """``g`` of both sums, twice one after the other, so that any 1024 of a row are one slice."""
    table = _odd_numbers(np.arange(_BLOCK_WORDS, dtype=np.uint64), 2 * number)
    return np.concatenate([table, table])


@lru_cache(maxsize=_BLOCK_WORDS)
def _factors_of_block(block: int) -> Sums:
    """``h`` of a block, for both sums."""
    first, second = (int(_block_multipliers(np.array([block]), n)[0]) for n in range(2))
    return first, second


def _block_multipliers(blocks: Int64s, number: int) -> Int64s:
    """``h`` of some blocks."""
    return _odd_numbers(blocks.astype(np.uint64), 2 * number + 1)


def _odd_numbers(counters: npt.NDArray[np.uint64], stream: int) -> Int64s:
    """Output ``4 * counter + stream`` of SplitMix64 with seed 0, made odd (Steele et al., 2014)."""
    state = (counters * np.uint64(4) + np.uint64(stream + 1)) * np.uint64(_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)


_ROW = np.dtype([("row", "<i4"), ("sums", "<u8", (2,))])


class SummingPlanner(PlannedData):
    """Answers like another planner, and sums what it gives.

    Args:
        planner: Answers for the data.
        plan: Plan whose rows are written.
    """

    def __init__(self, planner: SavePlanner, plan: SavePlan) -> None:
        super().__init__(plan)
        self._planner, table = planner, plan.table
        self._sums = np.zeros((len(table), 2), dtype=np.uint64)
        self._is_summed = [False] * len(table)
        columns = (table.ndim, table.global_shapes, table.offsets, table.shapes, table.flat)
        self._boxes = list(zip(*(column.tolist() for column in columns), strict=True))
        self._is_object = table.is_object

    def packed(self) -> bytes:
        """The sums of each tensor, and its row in the index."""
        index, table = self._plan.index, self._plan.table
        assert index is not None
        rows = index.rows_of(table.names)[table.keys]
        known = np.flatnonzero(rows >= 0)
        tensors, places = np.unique(rows[known], return_inverse=True)
        packed = np.zeros(len(tensors), dtype=_ROW)
        packed["row"] = tensors
        for number in range(2):
            np.add.at(packed["sums"][:, number], places, self._sums[known, number])
        return packed.tobytes()

    def row_data(self) -> Callable[[int], Any]:
        give = self._planner.data_of(self._plan)
        return lambda row: self._summed(row, give(row))

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        given: object = self._summed(self._row_of[item], self._planner.get_data(item))
        return given

    @property
    def makes_data(self) -> bool:
        return self._planner.makes_data

    def _summed(self, row: int, given: Any) -> Any:
        # Of a base a writer asks twice. What is made once more may be something else.
        if self._is_object[row] or (self._is_summed[row] and not self.makes_data):
            return given
        ndim, global_shape, offset, shape, flat = self._boxes[row]
        box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
        flat_range = None if flat[0] < 0 else (flat[0], flat[1])
        # A whole leaf is given as it is, without the axes that exist only globally.
        values = given.reshape(box.shape if flat_range is None else (-1,))
        self._sums[row] = sums_of_tensor(values, box, flat_range, tuple(global_shape[:ndim]))
        self._is_summed[row] = True
        return given


def with_fingerprints(index: Index, packed: Iterable[bytes]) -> Index:
    """The index with the fingerprints of all tensors, of what each rank has packed."""
    sums = np.zeros((len(index), 2), dtype=np.uint64)
    for data in packed:
        rows = np.frombuffer(data, dtype=_ROW)
        sums[rows["row"]] += rows["sums"]  # a rank names a tensor once
    columns = zip(
        index.keys_column, sums.tolist(), index.dtype_column, index.global_shape_column, strict=True
    )
    fingerprints = {
        key: fingerprint_of((first, second), dtype, shape)
        for key, (first, second), dtype, shape in columns
    }
    return replace(index, fingerprints=fingerprints)
