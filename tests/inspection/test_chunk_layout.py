from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_checkpointing.format import element_types
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Pieces, StoredTensor
from dist_checkpointing.tools.cli.chunk_drawing import draw
from dist_checkpointing.tools.inspect.chunk_layout import chunk_layout

FLOAT = element_types.from_name("float32")


def grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> StoredTensor:
    return StoredTensor("k", FLOAT, shape, chunk)


def pieces(shape: tuple[int, ...], *parts: tuple[Box, tuple[int, int] | None]) -> StoredTensor:
    return StoredTensor("k", FLOAT, shape, None, Pieces.of(len(shape), parts))


def owners(stored: StoredTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Number of the chunk of every element, by filling a plain array."""
    found = np.full(stored.global_shape, -1)
    if stored.pieces is None:
        for number, index in enumerate(np.ndindex(*stored.grid.counts)):
            found[stored.grid.box(index).slices()] = number
        return found
    for number, (box, flat) in enumerate(stored.pieces):
        part = found[box.slices()].copy().reshape(-1)
        part[slice(*flat) if flat else slice(None)] = number
        found[box.slices()] = part.reshape(box.shape)
    return found


def check(stored: StoredTensor) -> None:
    plane = chunk_layout(stored)
    wanted = owners(stored)
    place: list[int | slice] = [0] * wanted.ndim
    for axis in plane.axes:
        place[axis] = slice(None)
    wanted = wanted[tuple(place)].reshape(
        [*(stored.global_shape[axis] for axis in plane.axes), 1, 1][:2]
    )
    for row in range(len(plane.row_cuts) - 1):
        for column in range(len(plane.column_cuts) - 1):
            part = wanted[
                plane.row_cuts[row] : plane.row_cuts[row + 1],
                plane.column_cuts[column] : plane.column_cuts[column + 1],
            ]
            number = plane.owner(row, column)
            assert (part == (-1 if number is None else number)).all()
    assert plane.row_cuts[-1] == wanted.shape[0]
    assert plane.column_cuts[-1] == wanted.shape[1]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4))
def test_grids(extents: list[tuple[int, int]]) -> None:
    check(grid(tuple(n for n, _ in extents), tuple(c for _, c in extents)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_flattened_ranges(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    box = Box.whole(tuple(shape))
    ranges = itertools.pairwise(cuts)
    check(pieces(tuple(shape), *((box, one) for one in ranges)))


def test_uneven_pieces_and_a_gap() -> None:
    check(
        pieces(
            (7, 5),
            (Box((0, 0), (2, 5)), None),
            (Box((2, 0), (5, 3)), None),
            (Box((2, 3), (4, 2)), None),
        )
    )


def drawn(stored: StoredTensor, width: int = 80, marked: tuple[int, ...] = ()) -> str:
    return "\n".join(draw(chunk_layout(stored), width, marked))


def test_a_drawing_of_a_grid() -> None:
    assert drawn(grid((64, 48), (32, 24)), marked=(2,)) == (
        "        0:24  24:48\n"
        "      ┌──────┬──────┐\n"
        " 0:32 │  0   │  1   │\n"
        "      ├──────┼──────┤\n"
        "32:64 │  *2  │  3   │\n"
        "      └──────┴──────┘"
    )


def test_a_drawing_of_flattened_ranges() -> None:
    box = Box((0, 0), (6, 10))
    assert drawn(pieces((6, 10), (box, (0, 25)), (box, (25, 60)))) == (
        "      0:5    5:10\n"
        "    ┌─────────────┐\n"
        "0:2 │  0          │\n"
        "    │      ┌──────┤\n"
        "2:3 │      │  1   │\n"
        "    ├──────┘      │\n"
        "3:6 │  1          │\n"
        "    └─────────────┘"
    )


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_drawing_fits_and_shows_both_ends(width: int) -> None:
    text = drawn(grid((1 << 22, 1 << 22), (7, 5)), width)  # nothing of that size is made
    lines = text.split("\n")
    assert max(map(len, lines)) <= width
    assert len(lines) < 40
    assert " 0:7 │" in text
    assert f":{1 << 22} │" in text
    assert "⋮" in text


def test_a_scalar() -> None:
    assert "0" in drawn(grid((), ()))
