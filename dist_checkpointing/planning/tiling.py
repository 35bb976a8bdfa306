"""Which parts of a global tensor are not in exactly one of some boxes: pure functions of values.

The cuts of all boxes divide the tensor into cells. There may be far too many to count
(two cuts on each of 30 axes make 2**30). Instead every axis gives each of its slabs a random
weight, and the weight of a cell is the product over the axes. The weights of all boxes then add up
to the weight of the tensor if every cell is in exactly one box. If any is not, both are different
polynomials of the weights, which agree by chance for less than one set of weights in 10**18
(Schwartz-Zippel lemma, with ``_TRIALS`` independent sets). What is wrong is found by halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.geometry import Box, Ints

Int64s = npt.NDArray[np.int64]

_PRIME: Final = 2**31 - 1
"""A product of two weights modulo this fits into 64 bits."""
_TRIALS: Final = 3


def miscounted_parts(shape: Ints, offsets: Int64s, shapes: Int64s) -> Iterator[tuple[Box, Ints]]:
    """The parts that are not in exactly one box, in C order, and the numbers of their boxes.

    No box is empty or sticks out. Takes ``len(boxes) * len(shape)`` steps to find out whether there
    is any, and a few times as many for each that is asked for.
    """
    boxes, stops = range(len(offsets)), offsets + shapes
    cuts = [
        np.unique(np.r_[0, extent, offsets[:, axis], stops[:, axis]])
        for axis, extent in enumerate(shape)
    ]
    random = np.random.default_rng(len(boxes))
    weights = [_summed(random.integers(1, _PRIME, (len(cut) - 1, _TRIALS))) for cut in cuts]
    # From here on everything is counted in cells.
    starts = np.array(
        [np.searchsorted(cut, offsets[:, axis]) for axis, cut in enumerate(cuts)], dtype=np.int64
    ).reshape(len(shape), len(boxes))
    ends = np.array(
        [np.searchsorted(cut, stops[:, axis]) for axis, cut in enumerate(cuts)], dtype=np.int64
    ).reshape(len(shape), len(boxes))
    first = np.zeros((len(shape), 1), dtype=np.int64)
    last = np.array([len(cut) - 1 for cut in cuts], dtype=np.int64).reshape(len(shape), 1)
    regions = [(first, last, np.arange(len(boxes)))]
    while regions:
        begin, end, rows = regions.pop()
        clipped = np.maximum(starts[:, rows], begin), np.minimum(ends[:, rows], end)
        inside = (clipped[0] < clipped[1]).all(axis=0)
        rows = rows[inside]
        held = _weight(weights, clipped[0][:, inside], clipped[1][:, inside])
        if np.array_equal(held, _weight(weights, begin, end)):
            continue
        divisible = np.flatnonzero((end - begin)[:, 0] > 1)
        if len(divisible):
            axis = divisible[0]
            upper, lower_end = begin.copy(), end.copy()
            upper[axis] = lower_end[axis] = (begin[axis] + end[axis]) // 2
            regions += [(upper, end, rows), (begin, lower_end, rows)]
            continue
        offset = tuple(int(cut[i]) for cut, i in zip(cuts, begin[:, 0], strict=True))
        stop = tuple(int(cut[i]) for cut, i in zip(cuts, end[:, 0], strict=True))
        part = Box(offset, tuple(b - a for a, b in zip(offset, stop, strict=True)))
        yield part, tuple(rows.tolist())


def _summed(weights: Int64s) -> Int64s:
    """Weight of everything before each cut, modulo the prime: ``[cuts, trials]``."""
    sums = np.zeros((len(weights) + 1, _TRIALS), dtype=np.int64)
    # A sum of 2**32 of them fits.
    sums[1:] = np.cumsum(weights, axis=0) % _PRIME
    return sums


def _weight(weights: Sequence[Int64s], starts: Int64s, ends: Int64s) -> Int64s:
    """Weight of some boxes together, given in cells as ``[axes, boxes]``: one a trial."""
    product = np.ones((starts.shape[1], _TRIALS), dtype=np.int64)
    for sums, start, end in zip(weights, starts, ends, strict=True):
        product = product * ((sums[end] - sums[start]) % _PRIME) % _PRIME
    total: Int64s = product.sum(axis=0) % _PRIME
    return total
