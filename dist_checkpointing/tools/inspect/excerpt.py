"""The corners of a tensor, read without what lies between them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from dist_checkpointing.checkpoint.handle import TensorHandle
from dist_checkpointing.checkpoint.slicing import positions


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """What there is to see of a tensor.

    Attributes:
        values: all of it, or the first and the last of every long axis, and one more in between
            that stands for what was left out.
        is_whole: whether it is all.
        shape: of what it is an excerpt of.
        edge: how many of each end.
    """

    values: torch.Tensor
    is_whole: bool
    shape: tuple[int, ...]
    edge: int


def read_excerpt(handle: TensorHandle, slices: Any = ..., *, most: int, edge: int) -> Excerpt:
    """Read a part of a tensor, or its corners if it is large.

    Args:
        handle: the tensor.
        slices: which part, see ``TensorHandle``.
        most: elements up to which all of it is read.
        edge: how many of each end of an axis to read otherwise.

    Raises:
        IndexError: if ``slices`` do not fit the shape.
        CheckpointingException: if it cannot be read.
    """
    taken = positions(handle.shape, slices, handle.key)
    shape = tuple(len(part) for part in taken if isinstance(part, range))
    if math.prod(shape) <= most:
        return Excerpt(handle[slices], is_whole=True, shape=shape, edge=edge)
    ends: list[list[Any]] = []
    for part in taken:
        if isinstance(part, int):
            ends.append([part])
        elif len(part) <= 2 * edge:
            ends.append([_as_slice(part)])
        else:
            ends.append([_as_slice(part[: edge + 1]), _as_slice(part[len(part) - edge :])])
    corners = [handle[corner] for corner in itertools.product(*ends)]
    axis = len(shape)
    for choices in reversed([end for end in ends if not isinstance(end[0], int)]):
        axis -= 1
        step = len(choices)
        corners = [
            torch.cat(corners[start : start + step], dim=axis) if step > 1 else corners[start]
            for start in range(0, len(corners), step)
        ]
    (values,) = corners
    return Excerpt(values, is_whole=False, shape=shape, edge=edge)


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)
