"""Which part of a tensor lies in which stored chunk, as a plane to draw; without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from dist_checkpointing.format.geometry import Ints, boxes_of_part, most_cut_axes, ravel_offset
from dist_checkpointing.format.index import Pieces, StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """A plane through a tensor along the two axes that are cut most, at 0 on all others.

    Attributes:
        axes: the axes of the tensor that run down and to the right; one, or none, for a tensor that
            has no more.
        cut_axes: all axes along which the tensor is cut.
        row_cuts: where a chunk begins or ends on the way down, from 0 to the extent.
        column_cuts: likewise, to the right.
        owner: row and column between the cuts -> number of the chunk there, as in
            ``TensorHandle.chunks``; None if nothing is stored there.
    """

    axes: Ints
    cut_axes: Ints
    row_cuts: Sequence[int]
    column_cuts: Sequence[int]
    owner: Callable[[int, int], int | None]


class _Steps(Sequence[int]):
    """Where the chunks of a grid begin along an axis, and where the last ends; takes no memory."""

    def __init__(self, extent: int, step: int, count: int) -> None:
        self._extent = extent
        self._step = step
        self._count = count

    def __len__(self) -> int:
        return self._count + 1

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return min(place % len(self) * self._step, self._extent)


def chunk_layout(stored: StoredTensor) -> ChunkLayout:
    """How a tensor is cut up."""
    if stored.pieces is not None:
        return _of_pieces(stored, stored.pieces)
    grid = stored.grid
    cut_axes = tuple(axis for axis, count in enumerate(grid.counts) if count > 1)
    axes = most_cut_axes(grid.counts)
    cuts = [
        _Steps(grid.global_shape[axis], grid.chunk_shape[axis], grid.counts[axis]) for axis in axes
    ]

    def owner(row: int, column: int) -> int | None:
        if 0 in grid.global_shape:
            return None
        place = [0] * len(grid.counts)
        for axis, index in zip(axes, (row, column), strict=False):
            place[axis] = index
        return ravel_offset(tuple(place), grid.counts)

    return _map(axes, cut_axes, cuts, owner)


def _map(
    axes: Ints,
    cut_axes: Ints,
    cuts: Sequence[Sequence[int]],
    owner: Callable[[int, int], int | None],
) -> ChunkLayout:
    rows, columns = [*cuts, [0, 1], [0, 1]][:2]
    return ChunkLayout(axes, cut_axes, rows, columns, owner)


def _of_pieces(stored: StoredTensor, pieces: Pieces) -> ChunkLayout:
    shape = stored.global_shape
    boxes = [(number, box) for number, piece in enumerate(pieces) for box in boxes_of_part(*piece)]
    edges = [
        sorted({0, extent, *(e for _, box in boxes for e in (box.offset[axis], box.stop[axis]))})
        for axis, extent in enumerate(shape)
    ]
    cut_axes = tuple(axis for axis, found in enumerate(edges) if len(found) > 2)
    axes = most_cut_axes([len(found) - 1 for found in edges])
    # Only what the plane goes through.
    met = [
        (number, box)
        for number, box in boxes
        if all(box.offset[a] == 0 < box.shape[a] for a in range(len(shape)) if a not in axes)
    ]
    cuts = [edges[axis] for axis in axes]

    def owner(row: int, column: int) -> int | None:
        place = [axis_cuts[index] for axis_cuts, index in zip(cuts, (row, column), strict=False)]
        for number, box in met:
            inside = (box.offset[a] <= at < box.stop[a] for a, at in zip(axes, place, strict=True))
            if all(inside):
                return number
        return None

    return _map(axes, cut_axes, cuts, owner)
