"""Pieces: those of all tensors in one set of arrays, and the few that a box meets."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing.format import element_types
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.pieces import PieceColumns, Pieces, ints_from_json

Part = tuple[Box, tuple[int, int] | None]
FLOAT32 = element_types.from_name("float32")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, extent)) for extent in shape)
    return Box(
        offset, tuple(draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
    )


@st.composite
def tables(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Part]:
    """Pieces in any order, some twice, some overlapping: an index may be damaged."""
    parts: list[Part] = []
    for box in draw(st.lists(boxes(shape), min_size=1, max_size=3)):
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, box.num_elements))
            flat = (start, draw(st.integers(start, box.num_elements)))
            parts.append((box, draw(st.sampled_from([None, flat]))))
    return draw(st.permutations(parts))


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def held(shape: tuple[int, ...], part: Part) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which elements of the tensor a piece holds."""
    box, flat = part
    inside = np.zeros(box.num_elements, dtype=np.bool_)
    inside[slice(*flat) if flat is not None else slice(None)] = True
    mask = np.zeros(shape, dtype=np.bool_)
    mask[box.slices()] = inside.reshape(box.shape)
    return mask


@given(st.data())
def test_every_piece_that_holds_an_element_of_a_box_is_found(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    parts = data.draw(tables(shape))
    pieces, box = Pieces.of(len(shape), parts), data.draw(boxes(shape))
    found = pieces.meeting(box).tolist()
    assert found == sorted(set(found))
    assert {row for row, part in enumerate(parts) if held(shape, part)[box.slices()].any()} <= {
        *found
    }
    for row in found:
        own, flat = parts[row]
        common = own.intersect(box)
        assert common is not None
        if flat is not None:  # no more than those that meet the run of the wanted elements
            wanted = np.zeros(shape, dtype=np.bool_)
            wanted[common.slices()] = True
            places = np.flatnonzero(wanted[own.slices()].reshape(-1))
            assert max(flat[0], places[0]) < min(flat[1], places[-1] + 1)


def test_a_few_of_a_hundred_thousand_ranges_are_found_by_their_place() -> None:
    count, rows = 100_000, 400_000
    starts = np.arange(count) * (rows * 8 // count)
    flat = np.stack([starts, starts + rows * 8 // count], axis=1)
    boxes = np.tile([rows, 8], (count, 1))
    pieces = Pieces(np.zeros_like(boxes), boxes, flat)
    # Two rows, from the middle of one piece to the middle of another.
    assert pieces.meeting(Box((14, 0), (2, 8))).tolist() == [3, *range(4, 4)]
    assert pieces.meeting(Box((15, 0), (2, 8))).tolist() == [3, 4]
    assert pieces.meeting(Box((rows - 1, 7), (1, 1))).tolist() == [count - 1]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=5), st.data())
def test_pieces_of_many_tensors_are_those_of_each(
    axes: dict[str, int], data: st.DataObject
) -> None:
    tensors = {key: data.draw(tables((4,) * ndim)) for key, ndim in axes.items()}
    columns = PieceColumns.of({key: Pieces.of(axes[key], parts) for key, parts in tensors.items()})
    assert PieceColumns.of(columns) is columns
    assert [*columns] == [*tensors]
    for found in (columns, pickle.loads(pickle.dumps(columns))):
        assert {key: [*found[key]] for key in found} == tensors


def test_what_is_remembered_does_not_travel() -> None:
    pieces = Pieces.of(1, [(Box((0,), (4,)), (0, 2)), (Box((0,), (4,)), (2, 4))])
    index = Index.of([StoredTensor("w", FLOAT32, (4,), None, pieces)])
    before = len(pickle.dumps(index))
    assert index["w"].pieces is not None
    assert index["w"].pieces.meeting(Box((3,), (1,))).tolist() == [1]
    assert "w" in index
    assert len(pickle.dumps(index)) == before


@given(st.data())
def test_the_index_file_is_plain_json_of_its_columns(data: st.DataObject) -> None:
    """Byte for byte what ``json`` writes of lists, which is what older versions wrote."""
    shape = data.draw(SHAPES)
    keys = data.draw(st.lists(st.text(max_size=4), unique=True, max_size=4))
    tensors = [
        StoredTensor(key, FLOAT32, shape, None, Pieces.of(len(shape), data.draw(tables(shape))))
        if data.draw(st.booleans())
        else StoredTensor(key, FLOAT32, shape, shape)
        for key in keys
    ]
    index = Index.of(tensors, {"object": (2,)})
    content = {
        "format": "dist_checkpointing.index",
        "format_minor": 0,
        "keys": keys,
        "dtypes": ["float32"] * len(keys),
        "global_shapes": [list(shape)] * len(keys),
        "chunk_shapes": [t.chunk_shape if t.chunk_shape is None else [*shape] for t in tensors],
        "pieces": {
            t.key: {
                "offsets": [[*box.offset] for box, _ in t.pieces],
                "shapes": [[*box.shape] for box, _ in t.pieces],
                "flat": [[*(flat or (-1, -1))] for _, flat in t.pieces],
            }
            for t in tensors
            if t.pieces is not None
        },
        "objects": {"object": [2]},
        "codec": None,
    }
    body = json.dumps(content, separators=(",", ":")).encode()
    written = index.to_json()
    assert b"{" + written[written.index(b",") + 1 :] == body
    found = Index.from_json(written)
    assert {key: [*found.pieces[key]] for key in found.pieces} == {
        t.key: [*t.pieces] for t in tensors if t.pieces is not None
    }
    assert found.rows_of([*keys, "\0"]).tolist() == [*range(len(keys)), -1]


def test_chunk_shapes_as_an_array() -> None:
    pieces = Pieces.of(1, [(Box((0,), (4,)), None)])
    index = Index.of(
        [
            StoredTensor("a", FLOAT32, (), ()),
            StoredTensor("b", FLOAT32, (4, 6), (2, 3)),
            StoredTensor("c", FLOAT32, (4,), None, pieces),
        ]
    )
    assert index.chunk_shapes.tolist() == [[1, 1], [2, 3], [1, 1]]
    assert index.has_grid.tolist() == [True, True, False]


@pytest.mark.parametrize("spoilt", [[True], [1.0], [-1], [2**62], [1] * 65, "12", (1,)])
def test_what_is_no_extent_is_refused(spoilt: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        ints_from_json(spoilt)
    with pytest.raises(ValueError, match="expected"):
        Pieces.from_lists([spoilt], [[1]], [[-1, -1]])
