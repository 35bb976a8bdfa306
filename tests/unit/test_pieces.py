"""Pieces: those of all tensors in one set of arrays, in memory and in the index file."""

import json

from hypothesis import given, strategies as st

from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from tilings import boxes

Part = tuple[Box, tuple[int, int] | None]
FLOAT32 = dtypes.from_name("float32")


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
