"""A save planned shard by shard: what planners and layouts must agree with."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from dist_checkpointing import ShardedObject, ShardedTensor
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning import RowBlockLayout

Ints = tuple[int, ...]
Part = tuple[Box, tuple[int, int] | None]
"""A box of a tensor, or a range of its flattening."""
_DTYPES = {row.torch: row for row in DTYPES}


@st.composite
def cut_tensors(draw: st.DrawFn, key: str) -> list[ShardedTensor]:
    """A tensor along a grid, cut anyhow, or in flattened ranges."""
    shape: Ints = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    dtype = draw(st.sampled_from([torch.int8, torch.float32]))
    edges_of_axes = []
    for extent in shape:
        cuts = st.integers(1, max(extent, 1))
        anyhow = {0, extent, *(draw(st.sets(cuts)) if extent else ())}
        grid = {*range(0, extent, draw(cuts)), extent}
        edges_of_axes.append(sorted(draw(st.sampled_from([grid, anyhow]))))
    axes = [[*itertools.pairwise(edges)] for edges in edges_of_axes]
    parts: list[Part] = [
        (Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)), None)
        for cell in itertools.product(*axes)
    ]
    if draw(st.booleans()):
        cuts = st.integers(0, math.prod(shape))
        edges = sorted([0, *draw(st.lists(cuts, max_size=3)), math.prod(shape)])
        parts = [(Box.whole(shape), ends) for ends in itertools.pairwise(edges)]
    if not parts:
        parts = [(Box.whole(shape), None)]
    return [
        ShardedTensor(
            key,
            None,
            dtype,
            box.shape,
            shape,
            box.offset,
            None,
            flattened_range=None if flat is None else slice(*flat),
        )
        for box, flat in parts
    ]


def parts_of(layout: RowBlockLayout, tensor: StoredTensor, part: Part) -> Iterator[Part]:
    """The chunks or pieces that a shard is written as, in C order."""
    box, flat = part
    most = max(1, layout.max_chunk_bytes // tensor.dtype.itemsize)
    if tensor.chunk_shape is not None:
        yield from ((common, None) for _, common in tensor.grid.intersecting(box))
    elif flat is not None:
        for start in range(flat[0], flat[1], most):
            yield box, (start, min(start + most, flat[1]))
    elif box.num_elements <= most:
        yield part
    else:
        axis = next(axis for axis, extent in enumerate(box.shape) if extent > 1)
        step = max(1, most // (box.num_elements // box.shape[axis]))
        for begin in range(0, box.shape[axis], step):
            extent = min(step, box.shape[axis] - begin)
            offset = (*box.offset[:axis], box.offset[axis] + begin, *box.offset[axis + 1 :])
            rows = Box(offset, (*box.shape[:axis], extent, *box.shape[axis + 1 :]))
            yield from parts_of(layout, tensor, (rows, None))


def stored(layout: RowBlockLayout, leaf: ShardedTensor, parts: Sequence[Part]) -> StoredTensor:
    """How the tensor of a leaf is laid out; its parts are all that have elements."""
    key, dtype, shape = leaf.key, _DTYPES[leaf.dtype], leaf.global_shape
    if not parts:
        return StoredTensor(key, dtype, shape, tuple(max(1, extent) for extent in shape))
    boxes = [box for box, _ in parts]
    chunk: Ints | None = tuple(map(max, zip(*(box.shape for box in boxes), strict=True)))
    assert chunk is not None
    is_grid = all(flat is None for _, flat in parts) and all(
        o % c == 0 and n == min(c, g - o)
        for box in boxes
        for o, n, c, g in zip(box.offset, box.shape, chunk, shape, strict=True)
    )
    chunk = _divided(shape, chunk, dtype.itemsize, layout.max_chunk_bytes) if is_grid else None
    tensor = StoredTensor(key, dtype, shape, chunk)
    if chunk is not None:
        return tensor
    pieces = sorted((p for part in parts for p in parts_of(layout, tensor, part)), key=_order)
    return replace(tensor, pieces=Pieces.of(len(shape), pieces))


def _order(part: Part) -> Any:
    return part[0].offset, part[0].shape, part[1] or (-1, -1)


def _size(part: Part) -> int:
    start, stop = part[1] or (0, part[0].num_elements)
    return stop - start


def _divided(shape: Ints, chunk: Ints, itemsize: int, most_bytes: int) -> Ints | None:
    """A chunk of at most so many bytes that makes up a larger one; None if it would be tiny."""
    if itemsize * math.prod(chunk) <= most_bytes:
        return chunk
    for axis, extent in enumerate(chunk):
        rows = max(1, most_bytes // max(itemsize * math.prod(chunk[axis + 1 :]), 1))
        if extent == shape[axis]:
            block = -(-extent // -(-extent // rows)) if rows < extent else extent
        else:
            block = next(n for n in range(min(rows, extent), 0, -1) if extent % n == 0)
        chunk = (*chunk[:axis], block, *chunk[axis + 1 :])
        if itemsize * math.prod(chunk) <= most_bytes:
            return chunk if itemsize * math.prod(chunk) >= most_bytes // 4 else None
    return None


def shared_out(
    shard_to_ranks: Mapping[Any, Sequence[int]],
    shard_to_size: Mapping[Any, int],
    num_ranks: int,
    cross: AbstractSet[Any] = frozenset(),
) -> dict[Any, int]:
    """One of its ranks for each shard: the rule, word by word."""
    loads = [0] * num_ranks
    result = {}
    shards = sorted(
        shard_to_ranks, key=lambda s: (s in cross, len(shard_to_ranks[s]), -shard_to_size[s], s)
    )
    for shard in shards:
        rank = min(shard_to_ranks[shard], key=lambda r: (loads[r], r))
        loads[rank] += shard_to_size[shard]
        result[shard] = rank
    return result


def planned_by_leaf(
    ranks: Sequence[Sequence[Any]],
    layout: RowBlockLayout,
    candidates: Callable[[Sequence[int], int], Sequence[int]],
) -> tuple[list[set[tuple[Any, ...]]], Index]:
    """What each rank writes, as (key, box, range), and what the checkpoint then holds.

    ``candidates`` says who of the holders of a shard, and of the rank of its main replica, may
    write it.
    """
    writes: list[set[tuple[Any, ...]]] = [set() for _ in ranks]
    tensors: dict[str, ShardedTensor] = {}
    grids: dict[str, Ints] = {}
    holders: dict[tuple[str, Part], list[int]] = {}
    main: dict[tuple[str, Part], int] = {}
    for rank, leaf in ((rank, leaf) for rank, leaves in enumerate(ranks) for leaf in leaves):
        if isinstance(leaf, ShardedObject):
            grids[leaf.key] = leaf.global_shape
            cell = Box(leaf.global_offset, (1,) * len(leaf.global_shape))
            writes[rank] |= {(leaf.key, cell, None)} if leaf.replica_id == 0 else set()
            continue
        tensors[leaf.key] = leaf
        shard = leaf.key, (leaf.box, leaf.flat_range)
        if _size(shard[1]):
            holders.setdefault(shard, []).append(rank)
            main |= {shard: rank} if leaf.replica_id == 0 else {}
    index = Index.of(
        (stored(layout, tensors[key], [part for of, part in holders if of == key]))
        for key in sorted(tensors)
    )
    units = [
        (key, piece, candidates(holders[key, part], main[key, part]))
        for key, part in sorted(holders, key=lambda shard: (shard[0], _order(shard[1])))
        for piece in parts_of(layout, index[key], part)
    ]
    who = {number: may_write for number, (_, _, may_write) in enumerate(units)}
    sizes = {n: _size(part) * index[key].dtype.itemsize for n, (key, part, _) in enumerate(units)}
    for number, rank in shared_out(who, sizes, len(ranks)).items():
        key, (box, flat), _ = units[number]
        writes[rank].add((key, box, flat))
    return writes, replace(index, objects=grids)


def seen(index: Index) -> Any:
    """What an index says, in values that can be compared."""
    tensors = {
        t.key: (t.dtype, t.global_shape, t.chunk_shape, None if t.pieces is None else [*t.pieces])
        for t in index.values()
    }
    return tensors, dict(index.objects)
