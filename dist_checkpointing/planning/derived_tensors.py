"""Tensors made of boxes of other tensors: what a recipe makes of a checkpoint, before any read.

Cutting, joining and turning tensors only changes which box of which stored tensor fills a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import StoredTensor

if TYPE_CHECKING:
    from dist_checkpointing.planning.quantization import Quantized

_FEW = 32
"""Of more pieces than these, those that meet a box are found in columns."""

Fill = Literal["zeros", "template"]
"""What fills elements that nothing stored fills: zeros, or what the template holds there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a derived tensor, and the box of a stored tensor that fills it, from ``origin`` on.

    Nothing stored fills a box whose ``key`` is None, but ``fill``. ``axes`` has for each axis of
    the box the axis of the stored tensor that it runs along; None for an axis of extent 1 that the
    stored tensor does not have. If that is quantized, all of this speaks of its values; if it is
    to be quantized, of its codes or its scales.
    """

    box: Box
    key: str | None
    origin: Ints
    axes: tuple[int | None, ...]
    fill: Fill = "zeros"
    quantization: Quantized | None = None

    @property
    def stored_boxes(self) -> Iterator[tuple[str, Box]]:
        """Keys and boxes of what is read for it."""
        if self.quantization is not None:
            for task in self.quantization.tasks(self.source_box, None, is_shared=False):
                for tensor, box, _ in task.reads:
                    yield from chain.from_iterable(p.stored_boxes for p in tensor.parts(box))
        elif self.key is not None:
            yield self.key, self.source_box

    @property
    def source_box(self) -> Box:
        """The box of the stored tensor; its extent is 1 on axes that the piece does not have."""
        extents = dict(zip(self.axes, self.box.shape, strict=True))
        return Box(self.origin, tuple(extents.get(axis, 1) for axis in range(len(self.origin))))

    def part(self, box: Box) -> Piece:
        """The piece that fills a box inside the own box."""
        origin = list(self.origin)
        for axis, begin, own in zip(self.axes, box.offset, self.box.offset, strict=True):
            if axis is not None:
                origin[axis] += begin - own
        return replace(self, box=box, origin=tuple(origin))

    def filled_by(self, box: Box) -> Piece | None:
        """The piece that a box of the stored tensor fills."""
        common = self.source_box.intersect(box)
        if common is None:
            return None
        offset, shape = list(self.box.offset), [1] * len(self.axes)
        for own, axis in enumerate(self.axes):
            if axis is not None:
                offset[own] += common.offset[axis] - self.origin[axis]
                shape[own] = common.shape[axis]
        return self.part(Box(tuple(offset), tuple(shape)))

    def from_source(self, values: torch.Tensor) -> torch.Tensor:
        """A view of a tensor of the shape of ``source_box`` that has the shape of ``box``."""
        used = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(len(self.origin)) if axis not in used]
        return values.permute([*used, *others]).view(self.box.shape)

    def as_source(self, values: torch.Tensor) -> torch.Tensor:
        """A view of a tensor of the shape of ``box`` that has the shape of ``source_box``."""
        order = sorted((-1 if axis is None else axis, own) for own, axis in enumerate(self.axes))
        return values.permute([own for _, own in order]).view(self.source_box.shape)


@dataclass(frozen=True)
class DerivedTensor:
    """A global tensor made of pieces, which cover each element once."""

    shape: Ints
    dtype: DType
    pieces: tuple[Piece, ...]

    @classmethod
    def of_stored(cls, tensor: StoredTensor, dtype: DType | None = None) -> DerivedTensor:
        """A stored tensor as it is, or with another element type."""
        return cls.whole(tensor.key, tensor.global_shape, dtype or tensor.dtype)

    @classmethod
    def whole(
        cls, key: str, shape: Ints, dtype: DType, quantization: Quantized | None = None
    ) -> DerivedTensor:
        """A stored tensor, perhaps quantized, of which nothing is cut."""
        axes = tuple(range(len(shape)))
        piece = Piece(Box.whole(shape), key, (0,) * len(shape), axes, quantization=quantization)
        return cls(shape, dtype, () if 0 in shape else (piece,))

    @classmethod
    def filled(cls, shape: Ints, dtype: DType, fill: Fill) -> DerivedTensor:
        """A tensor of which nothing is stored."""
        piece = Piece(Box.whole(shape), None, (), (None,) * len(shape), fill)
        return cls(shape, dtype, () if 0 in shape else (piece,))

    @classmethod
    def joined(cls, tensors: Sequence[DerivedTensor], axis: int) -> DerivedTensor:
        """Tensors of one dtype, and of one shape but for the axis, along which they follow."""
        pieces: list[Piece] = []
        extent = 0
        for tensor in tensors:
            pieces += (_moved(piece, axis, extent) for piece in tensor.pieces)
            extent += tensor.shape[axis]
        first = tensors[0]
        return cls(with_extent(first.shape, axis, extent), first.dtype, tuple(pieces))

    def narrow(self, axis: int, start: int, extent: int) -> DerivedTensor:
        """``extent`` rows of an axis."""
        shape = with_extent(self.shape, axis, extent)
        kept = Box(with_extent((0,) * len(shape), axis, start), shape)
        pieces = tuple(_moved(piece, axis, -start) for piece in self.parts(kept))
        return replace(self, shape=shape, pieces=pieces)

    def cut(self, axis: int, extents: Sequence[int]) -> list[DerivedTensor]:
        """Parts with these extents, one after the other along an axis."""
        starts = [sum(extents[:number]) for number in range(len(extents))]
        return [self.narrow(axis, *rows) for rows in zip(starts, extents, strict=True)]

    def permuted(self, order: Sequence[int | None]) -> DerivedTensor:
        """These axes in this order; None stands for a new axis, and one left out has extent 1."""

        def turned(values: Sequence[Any], new: object) -> tuple[Any, ...]:
            return tuple(new if axis is None else values[axis] for axis in order)

        pieces = []
        for piece in self.pieces:
            box = Box(turned(piece.box.offset, 0), turned(piece.box.shape, 1))
            pieces.append(replace(piece, box=box, axes=turned(piece.axes, None)))
        return replace(self, shape=turned(self.shape, 1), pieces=tuple(pieces))

    def parts(self, box: Box) -> Iterator[Piece]:
        """The pieces that fill a box, each as far as it lies in the box."""
        pieces: Iterable[Piece] = self.pieces
        if len(self.pieces) > _FEW:
            starts, stops = self._bounds
            meets = ((starts < np.array(box.stop)) & (stops > np.array(box.offset))).all(axis=1)
            pieces = [self.pieces[row] for row in np.flatnonzero(meets).tolist()]
        for piece in pieces:
            common = piece.box.intersect(box)
            if common is not None:
                yield piece.part(common)

    @cached_property
    def _bounds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each piece starts and stops: a row a piece."""
        boxes = [(piece.box.offset, piece.box.stop) for piece in self.pieces]
        starts, stops = np.array(boxes, np.int64).reshape(len(boxes), 2, -1).swapaxes(0, 1)
        return starts, stops

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Keys of the stored tensors that fill it."""
        pairs = (p.stored_boxes if p.quantization else [(p.key, None)] for p in self.pieces)
        return tuple(dict.fromkeys(key for key, _ in chain.from_iterable(pairs) if key is not None))


def with_extent(values: Ints, axis: int, value: int) -> Ints:
    """A shape or an offset with another value for one axis."""
    return (*values[:axis], value, *values[axis + 1 :])


def _moved(piece: Piece, axis: int, by: int) -> Piece:
    offset = with_extent(piece.box.offset, axis, piece.box.offset[axis] + by)
    return replace(piece, box=Box(offset, piece.box.shape))
