"""Tensors cut at random, and the rule by which shards are shared out."""

import itertools
import math
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Any

import torch
from hypothesis import strategies as st

from dist_checkpointing import ShardedTensor
from dist_checkpointing.format import Box

Ints = tuple[int, ...]
Part = tuple[Box, tuple[int, int] | None]
"""A box of a tensor, or a range of its flattening."""


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
