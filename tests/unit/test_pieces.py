"""Pieces: those of all tensors in one set of arrays, in memory and in the index file."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, PieceColumns, Pieces, ints_from_json
from dist_checkpointing.format.index import Index, StoredTensor

Part = tuple[Box, tuple[int, int] | None]
FLOAT32 = dtypes.from_name("float32")


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
    assert found.rows_of([*keys, "absent"]).tolist() == [*range(len(keys)), -1]


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
