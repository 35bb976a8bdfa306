"""Integers of variable length and shared beginnings, against the plainest way to tell them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import (
    MOST_U64,
    Body,
    Malformed,
    encoded,
    shared_lengths,
)

NUMBERS = st.one_of(
    st.integers(0, 200), st.integers(0, MOST_U64), st.integers(0, 63).map(lambda n: 1 << n)
)


def plain(number: int) -> bytes:
    digits = []
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def shared(one: bytes, two: bytes) -> int:
    unequal = (place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return next(unequal, min(len(one), len(two)))


@given(st.lists(NUMBERS, max_size=50), st.binary(max_size=30))
def test_integers_there_and_back(numbers: list[int], after: bytes) -> None:
    data = encoded(numbers)
    assert data == b"".join(map(plain, numbers))
    body = Body(data + after)
    assert body.varints(len(numbers), MOST_U64).tolist() == [numbers]
    assert body.take(len(after)) == after
    body.finish()
    single = Body(data)
    assert [single.varint(MOST_U64) for _ in numbers] == numbers


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.data())
def test_a_column_cut_off_is_malformed(numbers: list[int], data: st.DataObject) -> None:
    whole = encoded(numbers)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(Malformed):
        Body(part).varints(len(numbers), MOST_U64)
    body = Body(part)
    with pytest.raises(Malformed):
        [body.varint(MOST_U64) for _ in numbers]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x80\x80\x00", 0),  # longer than needed
        (b"\xff" * 9 + b"\x01", MOST_U64),
        (b"\xff" * 9 + b"\x02", None),
        (b"\xff" * 10 + b"\x00", None),
        (b"\x80" * 10 + b"\x00", None),
        (b"", None),
    ],
)
def test_the_longest_integers(data: bytes, value: int | None) -> None:
    for count in (1, 3):
        column = b"\x05" * (count - 1) + data + b"\x07"
        if value is None and data:
            with pytest.raises(Malformed):
                Body(column).varints(count, MOST_U64)
            with pytest.raises(Malformed):
                Body(data).varint(MOST_U64)
        elif value is not None:
            expected = [[5] * (count - 1) + [value]]
            assert Body(column).varints(count, MOST_U64).tolist() == expected
            assert Body(data).varint(MOST_U64) == value


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(Malformed, match="above 7"):
        Body(b"\x08").varint(7)
    with pytest.raises(Malformed, match="above 7"):
        Body(b"\x01\x08").varints(2, 7)
    with pytest.raises(Malformed, match="runs over the end"):
        Body(b"\x01" * 9).varints(1 << 60, MOST_U64)
    with pytest.raises(Malformed, match="run over the end"):
        Body(b"\x01" * 9).take(1 << 60)


@given(st.lists(st.one_of(st.binary(max_size=30), st.text("ab", max_size=30).map(str.encode))))
def test_shared_beginnings(strings: list[bytes]) -> None:
    strings.sort()
    expected = [shared(*pair) for pair in pairwise(strings)]
    assert shared_lengths(strings).tolist() == [0, *expected][: len(strings)]
