"""Index arithmetic against numpy: an array of running numbers answers every question slowly."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.format import Box
from dist_checkpointing.format.geometry import Ints, split_flat_range, split_rows
from tiers import examples

# The longest axis is 6 and there are up to 4: at most 1296 elements to enumerate.
shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)


def numbers(shape: Ints) -> npt.NDArray[np.int64]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def elements(box: Box, shape: Ints) -> list[int]:
    """Flat numbers of the box's elements in an array of ``shape``, in C order."""
    values: list[int] = numbers(shape)[box.slices()].ravel().tolist()
    return values


def is_run(values: list[int]) -> bool:
    return values == list(range(values[0], values[0] + len(values)))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 13), (13, 13)])
def test_split_flat_range_refuses_what_is_outside(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        split_flat_range((3, 4), start, stop)


@examples(150)
@given(st.data())
def test_split_rows_partitions_into_runs(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    before = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    outer = tuple(extent + start + 1 for extent, start in zip(shape, before, strict=True))
    box = Box(before, shape)
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
