"""Shards cut up as columns: the same parts as when each is cut by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing import ShardedObject, ShardedTensor
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor
from dist_checkpointing.format.geometry import Ints, largest_divisor_block, split_rows
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import RowBlockLayout, WholeShardLayout
from dist_checkpointing.planning.chunking import index_of
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe

Part = tuple[Box, tuple[int, int] | None]


@st.composite
def shards(draw: st.DrawFn, key: str) -> list[ShardedTensor]:
    """A tensor along a grid, cut anyhow, or in flattened ranges."""
    shape: Ints = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    dtype = draw(st.sampled_from([torch.int8, torch.float32]))
    boxes = [Box.whole(shape)]
    for axis, extent in enumerate(shape):
        cuts = st.integers(1, max(extent, 1))
        step = draw(cuts)
        edges = draw(
            st.sampled_from(
                [
                    [*range(0, extent, step), extent],
                    sorted({0, extent, *(draw(st.sets(cuts)) if extent else ())}),
                ]
            )
        )
        boxes = [
            Box(
                (*box.offset[:axis], begin, *box.offset[axis + 1 :]),
                (*box.shape[:axis], end - begin, *box.shape[axis + 1 :]),
            )
            for box in boxes
            for begin, end in itertools.pairwise(edges)
        ]
    parts: list[Part] = [(box, None) for box in boxes]
    if draw(st.booleans()):
        cuts = st.integers(0, math.prod(shape))
        edges = sorted([0, *draw(st.lists(cuts, max_size=3)), math.prod(shape)])
        parts = [(Box.whole(shape), (a, b)) for a, b in itertools.pairwise(edges)]
    return [
        ShardedTensor(
            key,
            None,
            dtype,
            box.shape,
            shape,
            box.offset,
            None,
            flattened_range=None if flat is None else slice(*flat),
        )
        for box, flat in parts
    ]


@st.composite
def catalogs(draw: st.DrawFn) -> ShardTable:
    ranks: list[list[ShardedTensor | ShardedObject]] = [[], [], []]
    for key in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        for shard in draw(shards(key)):
            draw(st.sampled_from(ranks)).append(shard)
    if draw(st.booleans()):
        ranks[1].append(ShardedObject("object", None, (2,), (1,)))
    return concatenate([describe(leaves, rank) for rank, leaves in enumerate(ranks)])


# --- what each shard becomes by itself --------------------------------------------------------


def parts_of(layout: RowBlockLayout, tensor: StoredTensor, part: Part) -> Iterator[Part]:
    box, flat = part
    most = max(1, layout.max_chunk_bytes // tensor.dtype.itemsize)
    if tensor.chunk_shape is not None:
        yield from ((common, None) for _, common in tensor.grid.intersecting(box))
    elif flat is None:
        yield from ((own, None) for own in split_rows(box, most))
    else:
        for start in range(flat[0], flat[1], most):
            yield box, (start, min(start + most, flat[1]))


def stored(layout: RowBlockLayout, key: str, rows: ShardTable) -> StoredTensor:
    """The layout of one tensor of these rows, all with elements."""
    shape, dtype = rows.global_shape(0), tensor_memory.from_name(rows.dtype(0))
    boxes = [rows.box(row) for row in range(len(rows))]
    chunk = tuple(map(max, zip(*(box.shape for box in boxes), strict=True)))
    is_grid = (rows.flat[:, 0] < 0).all() and all(
        all(o % c == 0 and n == min(c, g - o) for o, n, c, g in axes)
        for axes in (zip(box.offset, box.shape, chunk, shape, strict=True) for box in boxes)
    )
    if is_grid:
        divided = divide(shape, chunk, dtype.itemsize, layout.max_chunk_bytes)
        if divided is not None:
            return StoredTensor(key, dtype, shape, divided)
    pieces = [
        part
        for row in range(len(rows))
        for part in parts_of(
            layout,
            StoredTensor(key, dtype, shape, None),
            (boxes[row], rows.flat_range(row)),
        )
    ]
    pieces.sort(key=lambda part: (part[0].offset, part[0].shape, part[1] or (-1, -1)))
    return StoredTensor(key, dtype, shape, None, Pieces.of(len(shape), pieces))


def divide(shape: Ints, chunk: Ints, itemsize: int, most_bytes: int) -> Ints | None:
    if itemsize * math.prod(chunk) <= most_bytes:
        return chunk
    for axis, extent in enumerate(chunk):
        rows = max(1, most_bytes // max(itemsize * math.prod(chunk[axis + 1 :]), 1))
        if extent == shape[axis]:
            block = -(-extent // -(-extent // rows)) if rows < extent else extent
        else:
            block = largest_divisor_block(extent, rows)
        chunk = (*chunk[:axis], block, *chunk[axis + 1 :])
        num_bytes = itemsize * math.prod(chunk)
        if num_bytes <= most_bytes:
            return chunk if num_bytes >= most_bytes // 4 else None
    return None


def seen(index: Index) -> dict[str, object]:
    return {
        key: (
            t.dtype.name,
            t.global_shape,
            t.chunk_shape,
            None if t.pieces is None else [*t.pieces],
        )
        for key, t in index.items()
    }


@given(catalogs(), st.integers(1, 200))
def test_tables_are_laid_out_and_cut_as_each_shard_is(catalog: ShardTable, most: int) -> None:
    layout = RowBlockLayout(most)
    written = catalog.take(catalog.num_elements > 0)
    index = index_of(layout, catalog, written)
    assert [*index] == sorted(index)
    for key in index:
        own = written.take(np.array(written.key_column, dtype=object) == key)
        if len(own):
            assert seen(index)[key] == seen(Index.of([stored(layout, key, own)]))[key]
        else:
            assert 0 in index[key].global_shape
    table, origins = layout.cut(written, index)
    found: dict[int, list[Part]] = {}
    for row, origin in enumerate(origins.tolist()):
        assert table.key(row) == written.key(origin)
        assert table.sources[row] == written.sources[origin]
        found.setdefault(origin, []).append((table.box(row), table.flat_range(row)))
    for row in range(len(written)):
        part = (written.box(row), written.flat_range(row))
        if written.is_object[row]:
            assert found[row] == [part]
        else:
            assert found[row] == [*parts_of(layout, index[written.key(row)], part)]


@given(catalogs(), st.integers(1, 4))
def test_whole_shards_share_a_divisor_or_an_axis(catalog: ShardTable, most: int) -> None:
    layout = WholeShardLayout(most)
    written = catalog.take((catalog.num_elements > 0) & ~catalog.is_object)
    index = layout.index(written)
    for key in index:
        own = written.take(np.array(written.key_column, dtype=object) == key)
        shape = own.global_shape(0)
        boxes = [own.box(row) for row in range(len(own))]
        for axis, full in enumerate(shape):
            pairs = [(box.offset[axis], box.shape[axis]) for box in boxes]
            largest = max(extent for _, extent in pairs)
            divisor = math.gcd(*({o for o, _ in pairs} | {o + e for o, e in pairs}) - {full})
            expected = divisor if divisor * most >= largest else full
            if all(o % largest == 0 and e == min(largest, full - o) for o, e in pairs):
                expected = largest
            chunk = index[key].chunk_shape
            assert chunk is not None
            assert chunk[axis] == expected
    assert layout.cut(written, index)[0] is written


def test_a_table_with_fewer_axes_than_the_index() -> None:
    tables = [
        describe([ShardedTensor(key, None, torch.int8, shape, shape, (0,) * len(shape), None)], 0)
        for key, shape in (("cube", (4, 4, 4)), ("row", (9,)), ("one", ()))
    ]
    layout = RowBlockLayout(4)
    catalog = concatenate(tables)
    index = index_of(layout, catalog, catalog)
    for table, count in zip(tables, (16, 3, 1), strict=True):
        assert len(layout.cut(table, index)[0]) == count
        cut = layout.cut(replace(table, ranks=table.ranks + 7), index)[0]
        assert (cut.ranks == 7).all()
