"""What stands between the brackets of a tensor, as the box to read and what to take of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_checkpointing.geometry import Box, Ints


@dataclass(frozen=True, slots=True)
class Selected:
    """A part of a tensor.

    Attributes:
        box: the smallest box that holds it, in elements of the tensor.
        within: what to take of an array of that box.
    """

    box: Box
    within: tuple[int | slice, ...]


def select(shape: Ints, slices: Any, key: str) -> Selected:
    """The part of a tensor that ``tensor[slices]`` means.

    Args:
        shape: of the tensor.
        slices: an int, a slice with a positive step, ``...``, or a tuple of them.
        key: of the tensor, for messages.

    Raises:
        IndexError: if they do not fit the shape.
    """
    given = slices if isinstance(slices, tuple) else (slices,)
    dots = [place for place, part in enumerate(given) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{key!r}: more than one '...'")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{key!r}: {len(given) - len(dots)} indices for shape {shape}")
    place = dots[0] if dots else len(given)
    filling = (slice(None),) * (len(shape) - len(given) + len(dots))
    parts = given[:place] + filling + given[place + 1 :]
    axes = [
        _along(axis, extent, part, key)
        for axis, (extent, part) in enumerate(zip(shape, parts, strict=True))
    ]
    box = Box(tuple(start for start, _, _ in axes), tuple(extent for _, extent, _ in axes))
    return Selected(box, tuple(within for _, _, within in axes))


def _along(axis: int, extent: int, part: Any, key: str) -> tuple[int, int, int | slice]:
    """Start and extent to read along one axis, and what to take of it."""
    if isinstance(part, slice):
        try:
            start, stop, step = part.indices(extent)
        except TypeError as error:
            raise IndexError(f"{key!r}: axis {axis}: {error}") from error
        if step < 1:
            raise IndexError(f"{key!r}: axis {axis}: a step of {step} is not supported, only >= 1")
        count = len(range(start, stop, step))
        if count == 0:
            return min(start, extent), 0, slice(None)
        return start, (count - 1) * step + 1, slice(None, None, step)
    try:
        place = part.__index__()
    except AttributeError:
        found = type(part).__name__
        raise IndexError(
            f"{key!r}: axis {axis}: an int or a slice is needed, not {found}"
        ) from None
    if not -extent <= place < extent:
        raise IndexError(f"{key!r}: axis {axis} has {extent} elements, there is no {place}")
    return place % extent, 1, 0
