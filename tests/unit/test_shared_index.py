"""An index that ranks share: each unpacks what it asks for, and that is as it was."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, Pieces, StoredTensor
from dist_checkpointing.planning import table_exchange as module
from dist_checkpointing.planning.shard_table import column_end, pack_column, unpack_column
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


@dataclass(frozen=True, eq=False)
class KnowsMore(Index):
    """An index of a format that keeps something else in it."""

    files: tuple[str, ...] = ()


def test_an_index_that_knows_more_is_shared_whole() -> None:
    plain = Index.of([StoredTensor("w", DTYPES[0], (4,), (2,))], {"o": (1,)})
    index = KnowsMore(**plain.__getstate__(), files=("a",))
    assert SharedIndex.of(index, 8).index({"other"}) is index
    assert [*SharedIndex.of(index, 8).keys()] == ["w"]
    assert SharedIndex.of(plain, 1).index({"other"}) is plain


def test_a_rank_unpacks_the_blocks_of_its_keys_only() -> None:
    pieces = Pieces(
        np.zeros((1000, 1), dtype=np.int64),
        np.full((1000, 1), 4000, dtype=np.int64),
        np.stack([np.arange(1000) * 4, np.arange(1000) * 4 + 4], axis=1),
    )
    keys = [f"layer{i:03}.weight" for i in range(600)]
    index = Index.of([StoredTensor(key, DTYPES[0], (4000,), None, pieces) for key in keys])
    shared = SharedIndex.of(index, 2)
    # Half a million pieces of which each is 4 further than the last.
    assert len(pickle.dumps(shared)) < 2 * 600_000
    unpacked = []
    real = module._Block

    def block(data: bytes) -> object:
        unpacked.append(data)
        return real(data)

    with patch.object(module, "_Block", block):
        assert [*shared.index({keys[3], keys[5], "none"})] == [keys[3], keys[5]]
    assert unpacked == [shared.blocks[0]] or unpacked == [shared.blocks[0], shared.blocks[-1]]


@pytest.mark.parametrize("rows", [[], [0], [5, 5, 5], [-1, 2**62, 0, -(2**61)], [*range(300)]])
def test_a_column_comes_back(rows: list[int]) -> None:
    packed = pack_column(np.array(rows, dtype=np.int64))
    assert unpack_column(b"xx" + packed, 2, len(rows)).tolist() == rows
    assert column_end(b"xx" + packed, 2, len(rows)) == 2 + len(packed)
