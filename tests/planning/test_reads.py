"""``plan_load`` for checkpoints that do not exist: with parts lost, or larger than any memory.

What its reads bring from checkpoints of every format: tests/integration/test_resharding_properties.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from dist_checkpointing.format import Box, Index, Pieces, StoredTensor
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning import plan_load
from tilings import boxes, tilings

Ints = tuple[int, ...]
INT64 = tensor_memory.from_name("int64")
SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


def shard_of(tensor: StoredTensor, box: Box) -> ShardedTensor:
    """What wants a box of a tensor; it may stick out."""
    shape = tuple(map(max, tensor.global_shape, box.stop))
    return ShardedTensor.of_box(replace(tensor, global_shape=shape), box, None)


@given(st.data())
def test_what_is_wanted_and_not_stored_is_found(data: st.DataObject) -> None:
    """Of pieces some of which are lost and some there twice; no element is read twice."""
    shape: Ints = data.draw(SHAPES)
    kept = [box for box in data.draw(tilings(Box.whole(shape))) if data.draw(st.booleans())]
    twice = data.draw(st.lists(st.sampled_from(kept), max_size=2)) if kept else []
    pieces = Pieces.of(len(shape), [(box, None) for box in (*kept, *twice)])
    index = Index.of([StoredTensor("w", INT64, shape, None, pieces)])
    is_stored = np.zeros(shape, dtype=bool)
    for box in kept:
        is_stored[box.slices()] = True
    wanted = data.draw(boxes(tuple(extent + 2 for extent in shape)))
    table, findings = plan_load(index, [shard_of(index["w"], wanted)])
    reads = np.zeros(shape, dtype=np.int64)
    for item in table.items():
        offset = tuple(a + b for a, b in zip(wanted.offset, item.dest.box.offset, strict=True))
        reads[Box(offset, item.lengths).slices()] += 1
    inside = wanted.intersect(Box.whole(shape))
    expected, needed = np.zeros(shape, dtype=np.int64), 0
    if inside is not None:
        expected[inside.slices()] = is_stored[inside.slices()]
        needed = inside.num_elements
    assert (reads == expected).all()
    place = f"{needed} elements in {wanted.offset} .. {wanted.stop}"
    lost = [("w", place, f"{reads.sum()} elements")] if reads.sum() != needed else []
    assert [(f.key, f.expected, f.found) for f in findings] == lost


def test_other_axes_than_stored_are_found() -> None:
    index = Index.of([StoredTensor("w", INT64, (4,), (3,))])
    other = StoredTensor("w", INT64, (4, 1), (4, 1))
    table, (finding,) = plan_load(index, [shard_of(other, Box((0, 0), (4, 1)))])
    assert (len(table), finding.key, finding.expected, finding.found) == (0, "w", 2, 1)


def test_a_whole_tensor_larger_than_any_memory() -> None:
    """A petabyte, planned in no time: only the chunks that are met are ever looked at."""
    shape = (2**25, 2**24)
    index = Index.of([StoredTensor("w", tensor_memory.from_name("float16"), shape, (2**10, 2**10))])
    corner = Box((2**25 - 5, 2**24 - 7), (5, 7))
    items, findings = plan_load(index, [shard_of(index["w"], corner)])
    assert not findings
    (item,) = items.items()
    assert item.storage_index.offset == (2**25 - 2**10, 2**24 - 2**10)
    assert item.storage_offsets == (2**10 - 5, 2**10 - 7)
