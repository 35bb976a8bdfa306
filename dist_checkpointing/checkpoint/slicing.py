"""What ``tensor[slices]`` means: the boxes to read, and what to take of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_checkpointing.format.geometry import Box, Ints

if TYPE_CHECKING:
    import torch


_ALL = slice(None, None, 1)
_MOST_BOXES = 4096

_GAP_ELEMENTS = 4096
"""Rows further apart than this are read one by one, and what lies between them is not."""


class Selected(NamedTuple):
    """A part of a tensor.

    Attributes:
        boxes: Boxes to read, in elements of the tensor; they follow each other along ``axis``.
        axis: Axis along which they are joined.
        within: What to take of the array that they make up.
    """

    boxes: tuple[Box, ...]
    axis: int
    within: tuple[int | slice, ...]

    @property
    def shape(self) -> Ints:
        """Shape of what is selected."""
        extents = list(self.boxes[0].shape)
        if extents:
            extents[self.axis] = sum(box.shape[self.axis] for box in self.boxes)
        return tuple(
            len(range(extent)[part])
            for extent, part in zip(extents, self.within, strict=True)
            if isinstance(part, slice)
        )

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is selected, of the boxes that were read for it; in memory of its own."""
        import torch  # noqa: PLC0415 - a checkpoint is listed without it

        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=self.axis)
        if self.within.count(_ALL) == len(self.within):
            return whole
        part = whole[self.within]
        # A thin view would keep all that was read.
        return part if part.numel() == whole.numel() else part.clone()


def parse_slices(text: str) -> tuple[int | slice | Any, ...]:
    """What ``text`` means between brackets: ``"0:4,:8"``, ``"-1"``, ``"...,::2"``.

    Raises:
        ValueError: if it is something else.
    """
    parts: list[Any] = []
    for word in map(str.strip, text.strip().removeprefix("[").removesuffix("]").split(",")):
        bounds = word.split(":")
        try:
            if word == "...":
                parts.append(Ellipsis)
            elif len(bounds) == 1:
                parts.append(int(word))
            else:  # slice itself refuses more than three
                parts.append(slice(*(int(bound) if bound.strip() else None for bound in bounds)))
        except (TypeError, ValueError):
            raise ValueError(
                f"cannot read {word!r} in the slice {text!r}; write one index or "
                "start:stop:step for each axis, such as '0:4,:8' or '-1,...'"
            ) from None
    return tuple(parts)


def positions(shape: Ints, slices: Any, key: str) -> tuple[int | range, ...]:
    """For each axis the index, or the range of indices, that ``tensor[slices]`` takes.

    Raises:
        IndexError: if ``slices`` do not fit the shape.
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
    return tuple([_along(axis, shape[axis], part, key) for axis, part in enumerate(parts)])


def select(shape: Ints, slices: Any, key: str) -> Selected:
    """The part of a tensor that ``tensor[slices]`` means.

    Args:
        shape: shape of the tensor.
        slices: an int, a slice with a positive step, ``...``, or a tuple of them.
        key: key of the tensor, for messages.

    Raises:
        IndexError: if they do not fit the shape.
    """
    offset, lengths, within, is_dense = list[int](), list[int](), list[int | slice](), True
    for part, extent in zip(positions(shape, slices, key), shape, strict=True):
        if isinstance(part, int):
            offset.append(part)
            lengths.append(1)
            within.append(0)
            continue
        offset.append(min(part.start, extent))
        lengths.append(part[-1] - part[0] + 1 if part else 0)
        within.append(_ALL if part.step == 1 else slice(None, None, part.step))
        is_dense &= part.step == 1
    box = Box(tuple(offset), tuple(lengths))
    return Selected((box,), 0, tuple(within)) if is_dense else _rows_apart(box, tuple(within))


def _rows_apart(box: Box, within: tuple[int | slice, ...]) -> Selected:
    """Leave out what lies between rows that are far apart."""
    for axis, part in enumerate(within):
        step = part.step or 1 if isinstance(part, slice) else 1
        places = range(0, box.shape[axis], step)
        row_elements = math.prod(box.shape) // max(1, box.shape[axis])
        if len(places) <= 1 or len(places) > _MOST_BOXES:
            continue
        if (step - 1) * row_elements < _GAP_ELEMENTS:
            continue
        rows = tuple(
            Box(
                (*box.offset[:axis], box.offset[axis] + place, *box.offset[axis + 1 :]),
                (*box.shape[:axis], 1, *box.shape[axis + 1 :]),
            )
            for place in places
        )
        return Selected(rows, axis, (*within[:axis], slice(None), *within[axis + 1 :]))
    return Selected((box,), 0, within)


def _along(axis: int, extent: int, part: Any, key: str) -> int | range:
    if isinstance(part, slice):
        try:
            start, stop, step = part.indices(extent)
        except (TypeError, ValueError) as error:
            raise IndexError(f"{key!r}: axis {axis}: {error}") from error
        if step < 1:
            raise IndexError(f"{key!r}: axis {axis}: a step of {step} is not supported, only >= 1")
        return range(start, stop, step)
    # For torch, True is a mask and not the number 1.
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        found = type(part).__name__
        raise IndexError(f"{key!r}: axis {axis}: an int or a slice is needed, not {found}")
    try:
        place = part.__index__()
    except TypeError as error:
        raise IndexError(f"{key!r}: axis {axis}: {error}") from error
    if not -extent <= place < extent:
        raise IndexError(f"{key!r}: axis {axis} has {extent} elements, there is no {place}")
    return int(place % extent)
