from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from dist_checkpointing.storage.streaming import batches, blocks
from tilings import boxes

FLOAT = dtypes.from_name("float32")


@st.composite
def stored(draw: st.DrawFn) -> StoredTensor:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    in_pieces: bool = draw(st.booleans())
    if shape and in_pieces:
        pieces = Pieces.of(len(shape), [(Box.whole(shape), None)])
        return StoredTensor("k", FLOAT, shape, None, pieces)
    chunk = tuple(draw(st.integers(1, max(1, extent))) for extent in shape)
    return StoredTensor("k", FLOAT, shape, chunk)


@given(st.data(), stored(), st.integers(1, 400))
def test_blocks_tile_it_and_are_small(data: Any, tensor: StoredTensor, most_bytes: int) -> None:
    wanted = data.draw(boxes(tensor.global_shape))
    seen = np.zeros(tensor.global_shape, dtype=int)
    found = list(blocks(tensor, wanted, most_bytes))
    for box in found:
        assert box.num_elements * 4 <= max(most_bytes, 4)
        seen[box.slices()] += 1
    expected = np.zeros_like(seen)
    expected[wanted.slices()] = 1
    assert np.array_equal(seen, expected)
    if tensor.pieces is None:
        fitting = (
            np.prod(np.minimum(tensor.grid.chunk_shape, tensor.global_shape)) * 4 <= most_bytes
        )
        chunks = [index for box in found for index, _ in tensor.grid.intersecting(box)]
        if fitting and wanted == Box.whole(tensor.global_shape):
            assert len(set(chunks)) == len(chunks)  # no chunk is read twice


def test_small_tensors_are_read_together() -> None:
    index = Index.of([StoredTensor(f"k{i}", FLOAT, (10,), (10,)) for i in range(10)])
    regions = [(key, Box.whole((10,))) for key in index]
    found = list(batches(index, regions, 120))
    assert [len(batch) for batch in found] == [3, 3, 3, 1]
    assert [pair for batch in found for pair in batch] == regions
    assert [len(batch) for batch in batches(index, regions, 1)] == [1] * 100
