"""An index that ranks share: each unpacks what it asks for, and that is as it was."""

import pickle
from typing import Any
from unittest.mock import patch

from hypothesis import given, strategies as st

from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from dist_checkpointing.planning import table_exchange as module
from dist_checkpointing.planning.table_exchange import SharedIndex

DTYPES = [dtypes.from_name(name) for name in ("float32", "int8", "bfloat16")]


@st.composite
def tensors(draw: st.DrawFn, key: str) -> StoredTensor:
    shape = tuple(draw(st.lists(st.integers(0, 2**61), max_size=4)))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        return StoredTensor(key, dtype, shape, tuple(max(1, extent // 2) for extent in shape))
    boxes = st.builds(
        lambda at: (Box(tuple(n // at for n in shape), tuple(n - n // at for n in shape)), None),
        st.integers(1, 5),
    )
    flat = st.integers(0, 2**61).map(lambda stop: (Box.whole(shape), (stop // 2, stop)))
    rows = draw(st.lists(boxes | flat, min_size=1, max_size=4))
    return StoredTensor(key, dtype, shape, None, Pieces.of(len(shape), rows))


@st.composite
def indices(draw: st.DrawFn) -> Index:
    keys = draw(st.lists(st.text(max_size=3), unique=True, max_size=9))
    objects = draw(st.dictionaries(st.text(max_size=2), st.tuples(st.integers(1, 9)), max_size=3))
    index = Index.of([draw(tensors(key)) for key in keys], objects)
    return Index(**{**index.__getstate__(), "codec": draw(st.sampled_from([None, "zstd"]))})


def seen(index: Index) -> dict[str, Any]:
    return {
        t.key: (t.dtype, t.global_shape, t.chunk_shape, None if t.pieces is None else [*t.pieces])
        for t in index.values()
    }


@given(indices(), st.sets(st.text(max_size=3)), st.data())
def test_what_is_asked_for_is_as_it_was(index: Index, asked: set[str], data: st.DataObject) -> None:
    if len(index):
        asked |= data.draw(st.sets(st.sampled_from(sorted(index))))
    with patch.object(module, "_KEYS_A_BLOCK", 2):
        shared: SharedIndex = pickle.loads(pickle.dumps(SharedIndex.of(index, 2)))
    assert shared.whole is None
    assert sorted(shared.keys()) == sorted(index)
    everything = shared.index(None)
    assert seen(everything) == seen(index)
    assert everything.objects == index.objects
    part = shared.index(asked)
    assert seen(part) == {key: value for key, value in seen(index).items() if key in asked}
    assert part.objects == {key: grid for key, grid in index.objects.items() if key in asked}
    assert part.codec == everything.codec == index.codec
