"""``plan_load`` is a pure function: it plans for checkpoints and ranks that do not exist."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, Window
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning import (
    LoadPlan,
    MetadataIndex,
    ReadItem,
    ReadTable,
    plan_load,
    resharding,
)
from tilings import boxes

Ints = tuple[int, ...]
Array = npt.NDArray[np.int64]
Part = tuple[Box, tuple[int, int] | None]
INT64 = tensor_memory.from_name("int64")


def shard_of(tensor: StoredTensor, box: Box, flat: tuple[int, int] | None = None) -> ShardedTensor:
    """What wants a box of a tensor, or some of its elements; it may stick out."""
    shape = tuple(map(max, tensor.global_shape, box.stop))
    return ShardedTensor.of_box(replace(tensor, global_shape=shape), box, flat)


def numbered(shape: Ints) -> Array:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def parts(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Part]:
    """``box`` cut into boxes at random, some of those into flattened ranges."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
    if axes and depth and draw(st.booleans()):
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.shape[axis] - 1))
        first = Box(box.offset, (*box.shape[:axis], at, *box.shape[axis + 1 :]))
        offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        rest = Box(offset, (*box.shape[:axis], box.shape[axis] - at, *box.shape[axis + 1 :]))
        return [*draw(parts(first, depth - 1)), *draw(parts(rest, depth - 1))]
    if not box.num_elements:
        return []
    if draw(st.booleans()):
        return [(box, None)]
    edges = sorted({0, box.num_elements, *draw(st.lists(st.integers(0, box.num_elements)))})
    return [(box, (a, b)) for a, b in itertools.pairwise(edges)]


SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def stored_tensors(draw: st.DrawFn) -> StoredTensor:
    shape: Ints = draw(SHAPES)
    if draw(st.booleans()):
        chunk = tuple(draw(st.integers(1, extent)) for extent in shape)
        return StoredTensor("w", INT64, shape, chunk)
    pieces = Pieces.of(len(shape), draw(parts(Box.whole(shape))))
    return StoredTensor("w", INT64, shape, None, pieces)


def buffer_of(tensor: StoredTensor, chunk: MetadataIndex) -> Array:
    """The elements of a stored chunk as they lie on the disk, the values being their places."""
    full = numbered(tensor.global_shape)
    if tensor.pieces is not None:
        assert chunk.index is not None
        box, flat = tensor.pieces[chunk.index]
        assert box.offset == chunk.offset
        return full[box.slices()].reshape(-1)[slice(*flat) if flat else slice(None)]
    assert tensor.chunk_shape is not None
    assert chunk.offset is not None
    stored = np.full(tensor.chunk_shape, -1, dtype=np.int64)
    ends = zip(chunk.offset, tensor.chunk_shape, strict=True)
    inside = full[tuple(slice(o, o + n) for o, n in ends)]
    stored[tuple(slice(0, n) for n in inside.shape)] = inside
    return stored.reshape(-1)


def view(buffer: Array, window: Window) -> Array:
    array = buffer[window.start : window.start + math.prod(window.shape)]
    where: tuple[Any, ...] = (*window.box.slices(), ...)
    part: Array = array.reshape(window.shape)[where]
    return part


def carried_out(index: Index, shard: ShardedTensor, items: Sequence[ReadItem]) -> Array:
    """What ends up in the wanted shard's memory; -9 where nothing was read."""
    size = shard.box.num_elements
    if shard.flat_range is not None:
        size = shard.flat_range[1] - shard.flat_range[0]
    memory = np.full(size, -9, dtype=np.int64)
    for item in items:
        assert item.lengths == item.storage.box.shape
        assert item.dest_index.fqn == item.storage_index.fqn == shard.key
        assert item.dest_index.offset == shard.box.offset
        target = view(memory, item.dest)
        assert (target == -9).all(), "read twice"
        target[...] = view(buffer_of(index[shard.key], item.storage_index), item.storage)
    return memory


def elements(shard: ShardedTensor, values: Array) -> Array:
    """What belongs into the wanted shard's memory of a whole tensor; -9 outside of the tensor."""
    inside = shard.box.intersect(Box.whole(values.shape))
    own = np.full(shard.box.shape, -9, dtype=np.int64)
    if inside is not None:
        own[inside.relative_to(shard.box.offset).slices()] = values[inside.slices()]
    return own.reshape(-1)[slice(*shard.flat_range) if shard.flat_range else slice(None)]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Index, dict[str, Array]]:
    """Tensors of which pieces may be lost or there twice, and the elements that are stored."""
    tensors, stored = [], {}
    for number in range(draw(st.integers(1, 4))):
        tensor = replace(draw(stored_tensors()), key=f"w{number}")
        shape = tensor.global_shape
        stored[tensor.key] = numbered(shape)
        if tensor.pieces is not None:
            cut = [*tensor.pieces]
            lost = draw(st.sets(st.sampled_from(cut), max_size=2))
            kept = [part for part in cut if part not in lost]
            twice = draw(st.lists(st.sampled_from(kept), max_size=2)) if kept else []
            pieces = Pieces.of(len(shape), draw(st.permutations([*kept, *twice])))
            tensor = replace(tensor, pieces=pieces)
            stored[tensor.key] = np.full(shape, -9, dtype=np.int64)
            for box, flat in kept:
                own = numbered(shape)[box.slices()].reshape(-1)
                part = stored[tensor.key][box.slices()].reshape(-1)
                where = slice(*flat) if flat else slice(None)
                part[where] = own[where]
                stored[tensor.key][box.slices()] = part.reshape(box.shape)
        tensors.append(tensor)
    return Index.of(tensors), stored


@st.composite
def wanted_shards(draw: st.DrawFn, index: Index) -> list[ShardedTensor]:
    """Shards of any tensors, some of them out of bounds, some as stored, some flattened."""
    shards = []
    for _ in range(draw(st.integers(0, 6))):
        tensor = index[draw(st.sampled_from(sorted(index)))]
        shape = tensor.global_shape
        box = draw(boxes(tuple(extent + 2 for extent in shape)))
        if tensor.pieces and draw(st.booleans()):
            box = tensor.pieces[draw(st.integers(0, len(tensor.pieces) - 1))][0]
        elif tensor.pieces is None and draw(st.booleans()):
            index_of_chunk = tuple(draw(st.integers(0, n - 1)) for n in tensor.grid.counts)
            box = replace(tensor.grid.box(index_of_chunk))
        flat = None
        if draw(st.booleans()):
            edges = st.integers(0, box.num_elements)
            start, stop = sorted((draw(edges), draw(edges)))
            flat = (start, stop)
        shards.append(shard_of(tensor, box, flat))
    return shards


@settings(deadline=None)
@given(data=st.data())
def test_any_parts_from_any_chunks(data: st.DataObject) -> None:
    """The reads fill the wanted parts with the right elements, read not one element more, and what
    is wanted and not stored is found.
    """
    index, stored = data.draw(checkpoints())
    shards = data.draw(wanted_shards(index))
    most = data.draw(st.sampled_from([1, 7, 1 << 20]))  # few pieces at a time, or many
    with mock.patch.object(resharding, "_MOST_PAIRS", most):
        table, findings = plan_load(index, shards)
    items = table.items()
    expected = []
    for number, shard in enumerate(shards):
        own = [item for item in items if item.dest_index.index == number]
        memory = carried_out(index, shard, own)
        assert memory.tolist() == elements(shard, stored[shard.key]).tolist()
        needed = elements(shard, numbered(index[shard.key].global_shape))
        counts = [int((array != -9).sum()) for array in (needed, memory)]
        if counts[0] != counts[1]:
            place = f"{counts[0]} elements in {shard.box.offset} .. {shard.box.stop}"
            expected.append((shard.key, place, f"{counts[1]} elements"))
    assert [(f.key, f.expected, f.found) for f in findings] == expected
    assert ReadTable.of(items).items() == items


@settings(deadline=None)
@given(st.data())
def test_items_to_a_table_and_back(data: st.DataObject) -> None:
    """The columns made of items are those that ``plan_load`` makes."""
    index, _ = data.draw(checkpoints())
    table, _ = plan_load(index, data.draw(wanted_shards(index)))
    again = ReadTable.of(table.items())
    assert replace(again, given=None).items() == table.items()
    rows = data.draw(st.permutations(range(len(table))))
    for one in (table, again):
        assert one.take(rows).items() == tuple(table.items()[row] for row in rows)
        assert table.followed_by(one).items() == (*table.items(), *table.items())


def test_other_axes_than_stored_are_found() -> None:
    index = Index.of([StoredTensor("w", INT64, (4,), (3,))])
    other = StoredTensor("w", INT64, (4, 1), (4, 1))
    table, (finding,) = plan_load(index, [shard_of(other, Box((0, 0), (4, 1)))])
    assert (len(table), finding.key, finding.expected, finding.found) == (0, "w", 2, 1)


def grid_shards(index: Index, counts: Ints) -> Iterator[ShardedTensor]:
    """A regular grid of shards of a tensor, one a rank."""
    shape = index["w"].global_shape
    extents = tuple(n // c for n, c in zip(shape, counts, strict=True))
    for cell in np.ndindex(*counts):
        offset = tuple(i * e for i, e in zip(cell, extents, strict=True))
        yield shard_of(index["w"], Box(offset, extents))


@pytest.mark.parametrize(("stored", "wanted"), [((64, 1), (1, 1024)), ((96, 1), (64, 1))])
def test_thousands_of_ranks_that_do_not_exist(stored: Ints, wanted: Ints) -> None:
    """Bytes planned are bytes needed, for ranks all over a world of 4096."""
    shape = (24576, 16384)
    chunk = tuple(n // c for n, c in zip(shape, stored, strict=True))
    index = Index.of([StoredTensor("w", tensor_memory.from_name("bfloat16"), shape, chunk)])
    planned = needed = 0
    for shard in list(grid_shards(index, wanted))[::16]:
        items, findings = plan_load(index, [shard])
        assert not findings
        planned += LoadPlan(items).table.num_elements.sum()
        needed += shard.box.num_elements
    assert planned == needed


def test_a_whole_tensor_larger_than_any_memory() -> None:
    """A petabyte, planned in no time: only the chunks that are met are ever looked at."""
    shape = (2**25, 2**24)
    index = Index.of([StoredTensor("w", tensor_memory.from_name("float16"), shape, (2**10, 2**10))])
    corner = Box((2**25 - 5, 2**24 - 7), (5, 7))
    items, findings = plan_load(index, [shard_of(index["w"], corner)])
    assert not findings
    (item,) = items.items()
    assert item.storage_index.offset == (2**25 - 2**10, 2**24 - 2**10)
    assert item.storage_offsets == (2**10 - 5, 2**10 - 7)
