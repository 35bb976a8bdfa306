"""Coverage: every element of every global tensor is written exactly once, or the save is refused.

The oracle counts elements one by one; the library must find whatever that finds, and nothing else.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

from dist_checkpointing import ShardedTensor
from dist_checkpointing.errors import Finding
from dist_checkpointing.format import Box, Pieces
from dist_checkpointing.planning.coverage import find_coverage_problems, miscounted_parts
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe
from tiers import examples
from tilings import boxes, tilings

Ints = tuple[int, ...]
Part = tuple[Box, tuple[int, int] | None]


def shard(
    key: str, shape: Ints, box: Box, flat: tuple[int, int] | None = None, replica_id: int = 0
) -> ShardedTensor:
    return ShardedTensor(
        key,
        None,
        torch.float32,
        box.shape,
        shape,
        box.offset,
        None,
        replica_id,
        flattened_range=None if flat is None else slice(*flat),
    )


def problems(ranks: Sequence[Sequence[Any]]) -> list[Finding]:
    """What is found for the leaves of these ranks."""
    catalog = concatenate([describe(leaves, rank) for rank, leaves in enumerate(ranks)])
    return find_coverage_problems(catalog, written(catalog))


def written(catalog: ShardTable) -> ShardTable:
    return catalog.take(catalog.main & (catalog.num_elements > 0))


def counted(shape: Ints, parts: Sequence[Part]) -> Any:
    """How often each element is held, counted one by one."""
    counts = np.zeros(shape, dtype=np.int64)
    for box, flat in parts:
        inside = np.zeros(box.num_elements, dtype=np.int64)
        inside[slice(*flat) if flat is not None else slice(None)] = 1
        counts[box.slices()] += inside.reshape(box.shape)
    return counts


# --- random shards against the element counter ----------------------------------------------------


SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def flattened(draw: st.DrawFn, box: Box) -> list[Part]:
    """``box`` as a chain of flattened ranges, some perhaps empty."""
    inner = draw(st.lists(st.integers(0, box.num_elements), max_size=3))
    edges = sorted([0, *inner, box.num_elements])
    return [(box, pair) for pair in pairwise([*edges, box.num_elements])]


@st.composite
def whole_sets(draw: st.DrawFn, shape: Ints) -> list[Part]:
    """Shards that make up a tensor exactly once."""
    parts: list[Part] = []
    for box in draw(tilings(Box.whole(shape))):
        parts += draw(flattened(box)) if draw(st.booleans()) else [(box, None)]
    return parts


@st.composite
def loose_parts(draw: st.DrawFn, shape: Ints) -> list[Part]:
    """Some boxes and ranges anywhere in a tensor."""
    parts: list[Part] = []
    for box in draw(st.lists(boxes(shape), max_size=5)):
        flat = None
        if draw(st.booleans()):
            edges = st.integers(0, box.num_elements)
            start, stop = sorted((draw(edges), draw(edges)))
            flat = (start, stop)
        parts.append((box, flat))
    return parts


def dealt(draw: Any, shape: Ints, parts: Sequence[Part]) -> list[list[ShardedTensor]]:
    """The parts, each on some rank, with a few copies that are not main replicas."""
    ranks: list[list[ShardedTensor]] = [[] for _ in range(draw(st.integers(1, 4)))]
    anywhere = st.integers(0, len(ranks) - 1)
    for box, flat in parts:
        ranks[draw(anywhere)].append(shard("w", shape, box, flat))
        if draw(st.booleans()):
            ranks[draw(anywhere)].append(shard("w", shape, box, flat, replica_id=1))
    return ranks


@examples(250)
@given(st.data())
def test_what_counting_finds_is_found_and_nothing_else(data: st.DataObject) -> None:
    shape: Ints = data.draw(SHAPES)
    parts = data.draw(whole_sets(shape))
    assert (counted(shape, parts) == 1).all()
    change = data.draw(st.sampled_from(["none", "less", "more", "twice"]))
    if change == "less":  # an empty range may be lost without harm
        parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        # With nothing left at all, nobody says that there is such a tensor.
        assume(parts)
    elif change == "more":  # anything anywhere, or a range of a box that is there already
        box, _ = data.draw(st.sampled_from(parts))
        ranges = flattened(box).map(lambda chain: chain[:1])
        parts += data.draw(st.one_of(loose_parts(shape), ranges))
    elif change == "twice":  # as many parts, but one in place of another
        lost, kept = (data.draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        parts[lost] = parts[kept]
    is_wrong = bool((counted(shape, parts) != 1).any())
    assert bool(problems(dealt(data.draw, shape, parts))) == is_wrong


@given(st.data())
def test_boxes_cut_anyhow_are_counted_right(data: st.DataObject) -> None:
    shape: Ints = data.draw(SHAPES)
    tiles = data.draw(tilings(Box.whole(shape)))
    for box, _ in data.draw(loose_parts(shape)):
        tiles = [*tiles, box] if data.draw(st.booleans()) else tiles[1:]
    tiles = [box for box in tiles if box.num_elements]
    counts = counted(shape, [(box, None) for box in tiles])
    table = Pieces.of(len(shape), [(box, None) for box in tiles])
    found = list(miscounted_parts(shape, table.offsets, table.shapes))
    named = np.zeros(shape, dtype=np.int64)
    for part, holders in found:
        named[part.slices()] += 1
        assert (counts[part.slices()] == len(holders)).all()
        assert all(tiles[row].contains(part) for row in holders)
    # All that is wrong is named once, and in C order.
    assert ((counts != 1) == (named == 1)).all()
    assert named.max(initial=0) <= 1
    assert [part.offset for part, _ in found] == sorted(part.offset for part, _ in found)


def staircase(count: int) -> list[Box]:
    """Boxes that make up a tensor of shape ``(2, 2, ...)``, cut once on every axis, off any grid.

    The first is half of it, the second half of the rest, and so on.
    """
    halves = [
        Box((1,) * axis + (0,) * (count - axis), (1,) * (axis + 1) + (2,) * (count - axis - 1))
        for axis in range(count)
    ]
    return [*halves, Box((1,) * count, (1,) * count)]


def test_many_axes_cut_off_any_grid() -> None:
    """Two cells on each axis make 2**40, which nobody can count one by one."""
    shape, tiles = (2,) * 40, staircase(40)
    ranks = [[shard("w", shape, box)] for box in tiles]
    last = f"{tiles[-1].offset} .. {tiles[-1].stop}"
    assert problems(ranks) == []
    (twice,) = problems([*ranks, [shard("w", shape, tiles[-1])]])
    assert (twice.ranks, twice.found) == ((40, 41), last)
    assert twice.problem == "2 shards hold this part"
    (lost,) = problems(ranks[:-1])
    assert (lost.ranks, lost.found) == ((), last)
    # As many elements as the tensor has, but not all of its elements.
    swapped = problems([*ranks[:-2], ranks[-1], ranks[-1]])
    assert [finding.problem[0] for finding in swapped] == ["n", "2"]


# --- special cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_a_tensor_without_elements_needs_nobody(shape: Ints) -> None:
    assert problems([[shard("w", shape, Box.whole(shape))], []]) == []
    assert problems([[shard("w", shape, Box.whole(shape), replica_id=1)]]) == []
