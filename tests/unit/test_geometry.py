"""Index arithmetic against numpy: an array of running numbers answers every question slowly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing.format.geometry import (
    Box,
    ChunkGrid,
    Ints,
    Window,
    boxes_of_part,
    largest_divisor_block,
    ravel_offset,
    split_flat_range,
    split_rows,
)
from tiers import examples

# The longest axis is 6 and there are up to 4: at most 1296 elements to enumerate.
shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints, *, least: int = 0) -> Box:
    offset, extents = [], []
    for extent in shape:
        start = draw(st.integers(0, extent - min(least, extent)))
        offset.append(start)
        extents.append(draw(st.integers(min(least, extent - start), extent - start)))
    return Box(tuple(offset), tuple(extents))


def numbers(shape: Ints) -> npt.NDArray[np.int64]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def elements(box: Box, shape: Ints) -> list[int]:
    """Flat numbers of the box's elements in an array of ``shape``, in C order."""
    values: list[int] = numbers(shape)[box.slices()].ravel().tolist()
    return values


def is_run(values: list[int]) -> bool:
    return values == list(range(values[0], values[0] + len(values)))


@examples(300)
@given(st.data())
def test_intersect_and_contains(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    own, other = set(elements(a, shape)), set(elements(b, shape))
    common = a.intersect(b)
    assert b.intersect(a) == common
    if common is None:
        assert not own & other
    else:
        assert set(elements(common, shape)) == own & other != set()
        assert a.contains(common)
        assert b.contains(common)
    if other:
        assert a.contains(b) == (other <= own)
    assert a.contains(a)


@examples(300)
@given(st.data())
def test_box_facts(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes_in(shape))
    whole = Box.whole(shape)
    assert len(elements(whole, shape)) == whole.num_elements == math.prod(shape)
    assert box.num_elements == len(elements(box, shape))
    assert whole.contains(box)
    origin = data.draw(boxes_in(shape)).offset
    moved = box.relative_to(origin)
    assert moved.shape == box.shape
    assert tuple(m + o for m, o in zip(moved.offset, origin, strict=True)) == box.offset
    assert box.stop == tuple(o + s for o, s in zip(box.offset, box.shape, strict=True))


def test_a_box_of_no_axes_is_one_element() -> None:
    point = Box((), ())
    assert point.num_elements == 1
    assert point.intersect(point) == point
    assert point.contains(point)
    assert point.slices() == ()
    assert Box.whole(()) == point


def test_touching_boxes_have_nothing_in_common() -> None:
    assert Box((0, 0), (2, 2)).intersect(Box((2, 0), (2, 2))) is None
    assert Box((0, 0), (2, 2)).intersect(Box((1, 1), (0, 1))) is None


def test_boxes_of_different_rank_do_not_mix() -> None:
    flat, square = Box((0,), (4,)), Box((0, 0), (4, 4))
    for one, other in ((flat, square), (square, flat)):
        with pytest.raises(ValueError, match=r"zip|axes"):
            one.intersect(other)
        with pytest.raises(ValueError, match=r"zip|axes"):
            one.contains(other)


def test_boxes_are_values() -> None:
    assert {Box((0,), (1,)), Box((0,), (1,))} == {Box((0,), (1,))}
    with pytest.raises(AttributeError):
        Box((0,), (1,)).offset = (1,)  # type: ignore[misc]


@examples(300)
@given(st.data())
def test_ravel_offset(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    box = data.draw(boxes_in(shape, least=1))
    assert ravel_offset(box.offset, shape) == numbers(shape)[box.offset]


@examples(300)
@given(st.data())
def test_split_flat_range_covers_exactly_and_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = split_flat_range(shape, start, stop)
    runs = [elements(box, shape) for box in boxes]
    assert all(runs)
    assert all(is_run(run) for run in runs)
    assert list(itertools.chain.from_iterable(runs)) == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(len(box.offset) == len(box.shape) == len(shape) for box in boxes)


def test_split_flat_range_of_a_huge_tensor_does_not_enumerate_it() -> None:
    shape = (10_000, 10_000, 10_000)
    boxes = split_flat_range(shape, 123_456_789, 987_654_321_012)
    assert sum(box.num_elements for box in boxes) == 987_654_321_012 - 123_456_789
    assert len(boxes) == 5


def test_split_flat_range_special_cases() -> None:
    assert split_flat_range((), 0, 1) == [Box((), ())]
    assert split_flat_range((), 1, 1) == []
    assert split_flat_range((3, 0), 0, 0) == []
    assert split_flat_range((3, 4), 5, 5) == []
    assert split_flat_range((3, 4), 0, 12) == [Box((0, 0), (3, 4))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 13), (13, 13)])
def test_split_flat_range_refuses_what_is_outside(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        split_flat_range((3, 4), start, stop)


@st.composite
def grids(draw: st.DrawFn) -> ChunkGrid:
    shape = draw(shapes)
    chunk = tuple(draw(st.integers(1, 8)) for _ in shape)
    return ChunkGrid(shape, chunk)


def all_indices(grid: ChunkGrid) -> list[Ints]:
    return list(itertools.product(*map(range, grid.counts)))


@examples(300)
@given(grids())
def test_chunks_partition_the_tensor(grid: ChunkGrid) -> None:
    shape = grid.global_shape
    owner = np.full(shape, -1)
    for number, index in enumerate(all_indices(grid)):
        box = grid.box(index)
        assert Box.whole(shape).contains(box)
        assert box.num_elements > 0
        assert (owner[box.slices()] == -1).all()
        owner[box.slices()] = number
        assert grid.index_at(box.offset) == index
        assert grid.index_at(tuple(s - 1 for s in box.stop)) == index
    assert (owner != -1).all()


@examples(300)
@given(st.data())
def test_meeting_is_what_a_scan_over_all_chunks_finds(data: st.DataObject) -> None:
    grid = data.draw(grids())
    box = data.draw(boxes_in(grid.global_shape))
    scan = [(index, grid.box(index).intersect(box)) for index in all_indices(grid)]
    assert list(grid.intersecting(box)) == [(i, common) for i, common in scan if common is not None]


def test_meeting_ignores_what_sticks_out_of_the_tensor() -> None:
    grid = ChunkGrid((5,), (2,))
    assert list(grid.intersecting(Box((3,), (9,)))) == [
        ((1,), Box((3,), (1,))),
        ((2,), Box((4,), (1,))),
    ]


def test_grid_of_a_scalar_and_of_nothing() -> None:
    point = ChunkGrid((), ())
    assert point.counts == ()
    assert list(point.intersecting(Box((), ()))) == [((), Box((), ()))]
    empty = ChunkGrid((0, 4), (1, 2))
    assert empty.counts == (0, 2)
    assert list(empty.intersecting(Box((0, 0), (0, 4)))) == []


def test_meeting_of_a_small_box_in_a_huge_grid_is_quick() -> None:
    grid = ChunkGrid((10**9, 10**9), (1, 1))
    met = list(grid.intersecting(Box((10**8, 10**8), (2, 2))))
    assert [index for index, _ in met] == [
        (10**8 + i, 10**8 + j) for i, j in itertools.product(range(2), range(2))
    ]


@examples(300)
@given(st.data())
def test_contiguous_range_of_a_window(data: st.DataObject) -> None:
    shape = data.draw(solid_shapes)
    box = data.draw(boxes_in(shape, least=1))
    begin = data.draw(st.integers(0, 50))
    window = Window(begin, shape, box)
    positions = elements(box, shape)
    expected = None
    if is_run(positions):
        expected = (begin + positions[0], begin + positions[-1] + 1)
    assert window.contiguous_range() == expected
    assert window.array_size == math.prod(shape)


@examples(300)
@given(st.data())
def test_contiguous_range_of_an_empty_box_is_empty(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes_in(shape))
    if box.num_elements:
        return
    found = Window(0, shape, box).contiguous_range()
    assert found is None or found[0] == found[1]


@examples(300)
@given(st.data())
def test_parts_of_a_flat_range_are_runs_in_its_buffer(data: st.DataObject) -> None:
    """The use that windows are made for: a flattened shard seen as boxes of the whole tensor."""
    shape = data.draw(solid_shapes)
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    filled = 0
    for box in split_flat_range(shape, start, stop):
        run = Window(-start, shape, box).contiguous_range()
        assert run == (filled, filled + box.num_elements)
        filled += box.num_elements
    assert filled == stop - start


@examples(300)
@given(st.data())
def test_split_rows_partitions_into_runs(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    outer = tuple(extent + data.draw(st.integers(0, 2)) for extent in shape)
    box = Box(tuple(o - s for o, s in zip(outer, shape, strict=True)), shape)
    most = data.draw(st.integers(0, 40))
    blocks = split_rows(box, most)
    covered = [elements(block, outer) for block in blocks]
    assert list(itertools.chain.from_iterable(covered)) == elements(box, outer)
    if box.num_elements:
        assert max(map(len, covered)) <= max(most, 1)
        assert min(map(len, covered)) > 0
    for block in blocks:
        inside = block.relative_to(box.offset)
        assert inside.num_elements == 0 or is_run(elements(inside, shape))


def test_split_rows_leaves_what_fits() -> None:
    for box in (Box((), ()), Box((3,), (0,)), Box((1, 1), (2, 3))):
        assert split_rows(box, 6) == [box]
    assert split_rows(Box((), ()), 0) == [Box((), ())]


def test_split_rows_makes_no_more_blocks_than_needed() -> None:
    blocks = split_rows(Box((4, 0), (10, 5)), 15)
    assert blocks == [Box((4 + i, 0), (min(3, 10 - i), 5)) for i in range(0, 10, 3)]


@examples(300)
@given(st.integers(1, 2000), st.integers(0, 2500))
def test_largest_divisor_block(extent: int, most: int) -> None:
    divisors = [n for n in range(1, extent + 1) if extent % n == 0 and n <= max(most, 1)]
    assert largest_divisor_block(extent, most) == max(divisors)


def test_largest_divisor_block_of_nothing_is_still_a_chunk_extent() -> None:
    assert largest_divisor_block(0, 5) >= 1
    assert largest_divisor_block(0, 0) >= 1


def test_largest_divisor_block_of_a_large_prime() -> None:
    # A flat buffer of some billion parameters may well have a prime length.
    assert largest_divisor_block(49_999_991, 8 * 2**20) == 1


def test_a_part_is_its_box_or_the_runs_of_its_flat_range() -> None:
    box = Box((2, 1), (3, 4))
    assert boxes_of_part(box, None) == [box]
    inside = numbers((6, 6))[box.slices()].reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(13), 2):
        found = [n for own in boxes_of_part(box, (start, stop)) for n in elements(own, (6, 6))]
        assert found == inside[start:stop].tolist()
