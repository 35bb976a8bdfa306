from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.checkpoint.slicing import parse_slices, positions, select
from dist_checkpointing.format import Box


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:4,:8", (slice(0, 4), slice(None, 8))),
        (" [ -1 , ... ] ", (-1, ...)),
        ("::2", (slice(None, None, 2),)),
        ("1:-1:3,5", (slice(1, -1, 3), 5)),
        ("...", (...,)),
        ("7", (7,)),
        (":", (slice(None, None),)),
    ],
)
def test_text(text: str, expected: Any) -> None:
    assert parse_slices(text) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "1:2:3:4", "1,,2", "1.5", "1:b", "....", "True", "[[1]]"]
)
def test_text_that_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .* in the slice") as raised:
        parse_slices(text)
    assert "0:4,:8" in str(raised.value)


places = st.none() | st.integers(-12, 12)
steps = st.none() | st.integers(1, 5)


@given(
    st.lists(st.integers(0, 9), max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.tuples(*[st.builds(slice, places, places, steps) for _ in shape]),
        )
    )
)
def test_boxes_and_positions_are_those_of_numpy(case: tuple[tuple[int, ...], Any]) -> None:
    shape, slices = case
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    selected = select(shape, slices, "k")
    parts = [full[box.slices()] for box in selected.boxes]
    whole = np.concatenate(parts, axis=selected.axis) if shape else full
    assert np.array_equal(whole[selected.within], full[slices])
    assert selected.shape == full[slices].shape
    taken = positions(shape, slices, "k")
    assert tuple(map(len, taken)) == full[slices].shape  # type: ignore[arg-type]
    assert all(Box.whole(shape).contains(box) for box in selected.boxes)


def test_rows_far_apart_are_read_one_by_one() -> None:
    selected = select((64, 10_000), (slice(2, None, 16),), "k")
    assert [box.offset for box in selected.boxes] == [(2, 0), (18, 0), (34, 0), (50, 0)]
    assert {box.shape for box in selected.boxes} == {(1, 10_000)}
    near = select((64, 10), (slice(2, None, 16),), "k")
    assert [(box.offset, box.shape) for box in near.boxes] == [((2, 0), (49, 10))]
