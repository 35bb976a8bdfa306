"""Flattened tensors as Megatron stores them: one axis more, on which the pieces of a box lie.

A tensor of global shape ``[X, Y]`` whose boxes of shape ``[x, y]`` are flattened becomes one of
shape ``[X/x, Y/y, x*y]``; elements ``a .. b`` of the box at ``[i*x, j*y]`` are its chunk at
``[i, j, a]`` with shape ``[1, 1, b-a]``.
"""

from __future__ import annotations

import math

import numpy as np

from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import StoredTensor


def common_box_shape(tensor: StoredTensor) -> Ints | None:
    """The shape of the boxes of a tensor that can be stored in this way; None if it cannot.

    It can if all of it is flattened and the boxes divide it evenly.
    """
    pieces = tensor.pieces
    if pieces is None or not len(pieces) or (pieces.flat[:, 0] < 0).any():
        return None
    shape = pieces.shapes[0]
    whole = np.array(tensor.global_shape, dtype=np.int64)
    even = (pieces.shapes == shape).all() and not (pieces.offsets % shape).any()
    return tuple(shape.tolist()) if even and not (whole % shape).any() else None


def flattened_size(global_shape: Ints, box_shape: Ints) -> Ints:
    """The shape that the tensor is stored in."""
    counts = tuple(whole // own for whole, own in zip(global_shape, box_shape, strict=True))
    return (*counts, math.prod(box_shape))


def flattened_chunk(box: Box, flat: tuple[int, int]) -> tuple[Ints, Ints]:
    """``(offsets, sizes)`` of a piece in the tensor as stored."""
    index = tuple(o // n for o, n in zip(box.offset, box.shape, strict=True))
    return (*index, flat[0]), (*(1 for _ in index), flat[1] - flat[0])


def piece_of_chunk(
    global_shape: Ints, size: Ints, offsets: Ints, sizes: Ints
) -> tuple[Box, tuple[int, int]]:
    """The box and flat range that a stored chunk is."""
    counts = size[:-1]
    uneven = len(counts) != len(global_shape) or 0 in counts
    if uneven or any(n % c for n, c in zip(global_shape, counts, strict=True)):
        raise ValueError(f"a tensor of shape {global_shape} flattened into {size}")
    box_shape = tuple(n // c for n, c in zip(global_shape, counts, strict=True))
    if math.prod(box_shape) != size[-1] or any(n != 1 for n in sizes[:-1]):
        raise ValueError(f"a chunk of shape {sizes} in {global_shape} flattened into {size}")
    offset = tuple(i * n for i, n in zip(offsets[:-1], box_shape, strict=True))
    return Box(offset, box_shape), (offsets[-1], offsets[-1] + sizes[-1])
