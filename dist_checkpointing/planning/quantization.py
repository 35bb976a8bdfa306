"""Quantized tensors, both ways: which boxes are read for a box, and what is computed of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dist_checkpointing.format.geometry import Box, Ints, split_flat_range, split_rows
from dist_checkpointing.mapping.tensor_memory import is_lossless

if TYPE_CHECKING:
    from dist_checkpointing.planning.derived_tensors import DerivedTensor

_MOST_TOGETHER = 2**18
"""So many values at a time are computed, in float32."""
_MOST_READ = 2**20
"""So many values at a time are read to be quantized."""
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4_E2M1, *(-value for value in _FP4_E2M1)], dtype=torch.float32)


class Task(NamedTuple):
    """Boxes of tensors to read, each into some memory, and what is computed of them then."""

    reads: list[tuple[DerivedTensor, Box, Tensor | None]]
    step: Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a tensor is stored: as codes, and as scales, one for each block of its values.

    Scale ``i // block`` of an axis is that of its element ``i``; ``block`` has only the axes of the
    scales, the first ones, and the others have one scale.

    If a byte holds two values, ``packed`` are the extents ``(groups, bytes of a group, 2)`` of the
    last axis, which becomes three. The codes have the first two of them.
    """

    codes: DerivedTensor
    scales: DerivedTensor
    block: Ints
    packed: Ints = ()

    def tasks(self, box: Box, values: Tensor | None, is_shared: bool) -> Iterator[Task]:
        """What makes a box of values, in memory that others may share.

        Codes are read to where their values belong, if these can hold them.
        """
        for part, view in self.parts(box, values):
            ndim, blocks = len(part.shape) - bool(self.packed), _blocks_of(part, self.block)
            own = Box(part.offset[:ndim], part.shape[:ndim])
            codes = scales = step = None
            if view is not None:
                codes, dtype = view[..., 0] if self.packed else view, self.codes.dtype.torch
                if is_shared or not is_lossless(dtype, view.dtype):
                    codes = view.new_empty(own.shape, dtype=dtype)
                scales = view.new_empty(blocks.shape, dtype=self.scales.dtype.torch)
                step = partial(self.dequantize, part, view, codes, scales)
            yield Task([(self.codes, own, codes), (self.scales, blocks, scales)], step)

    def parts(self, box: Box, values: Tensor | None) -> Iterator[tuple[Box, Tensor | None]]:
        """The boxes that make up a box, with three axes for a packed one, and views of its values.

        It is one, unless bytes or groups of bytes are wanted in part.
        """
        if not self.packed:
            yield box, values
            return
        done, own = box.offset[-1], None
        for run in split_flat_range(self.packed, done, box.stop[-1]):
            if values is not None:
                own = values.narrow(-1, done - box.offset[-1], run.num_elements)
                own = own.view(*own.shape[:-1], *run.shape)
            done += run.num_elements
            yield Box(box.offset[:-1] + run.offset, box.shape[:-1] + run.shape), own

    def dequantize(self, part: Box, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Compute the values of a part; codes may have their memory: the first of each byte."""
        blocks = _blocks_of(part, self.block)
        are_exponents = scales.dtype.itemsize == 1
        scales = scales.view(torch.uint8).int() - 127 if are_exponents else scales.float()
        scales = scales[(..., *(None for _ in part.shape[len(self.block) :]))]
        with torch.inference_mode(values.is_inference()):
            for rows in split_rows(Box.whole(part.shape), _MOST_TOGETHER):
                place, own = rows.moved(part.offset), scales
                axes = zip(place.offset, place.stop, self.block, blocks.offset, strict=False)
                for axis, (start, stop, size, first) in enumerate(axes):
                    elements = torch.arange(start, stop, device=own.device)
                    own = own.index_select(axis, elements // size - first)
                if self.packed:
                    pairs = codes[rows.slices()[:-1]].to(torch.uint8).unsqueeze(-1)
                    bits = torch.arange(0, 8, 4, device=codes.device, dtype=torch.uint8)
                    halves = (pairs >> bits[place.slices()[-1]]) & 15
                    numbers = _FP4_VALUES.to(codes.device)[halves.long()]
                else:
                    numbers = codes[rows.slices()].float()
                numbers = torch.ldexp(numbers, own) if are_exponents else numbers * own
                values[rows.slices()] = numbers


@dataclass(frozen=True, slots=True)
class BlockQuantization:
    """The codes in float8_e4m3fn, or the scales, that are made of the values of a tensor.

    A scale is the largest finite magnitude in its block divided by 448, or 1 if that is zero. A
    code is a value divided by its scale. Values that are not finite become NaN. All is computed in
    float32, of whole blocks, so that no cut changes a bit.

    ``block`` has all axes of the tensor.
    """

    values: DerivedTensor
    block: Ints
    makes_scales: bool = False

    def tasks(self, box: Box, made: Tensor | None, is_shared: bool) -> Iterator[Task]:  # noqa: ARG002
        """What makes a box of codes or scales."""
        read = step = None
        for part, place in self._parts(box, sys.maxsize if made is None else _MOST_READ):
            if made is not None:
                read = made.new_empty(place.shape, dtype=self.values.dtype.torch)
                view = made[part.relative_to(box.offset).slices()]
                step = partial(self.quantize, part, view, read)
            yield Task([(self.values, place, read)], step)

    def quantize(self, box: Box, made: Tensor, values: Tensor) -> None:
        """Compute a box of codes or scales of the values in all blocks that it meets."""
        first = self._values_in(self._blocks_for(box)).offset
        with torch.inference_mode(made.is_inference()):
            for part, place in self._parts(box, _MOST_TOGETHER):
                missing = [(0, -n % size) for n, size in zip(place.shape, self.block, strict=True)]
                padded = torch.nn.functional.pad(
                    values[place.relative_to(first).slices()].float(),
                    [*chain.from_iterable(reversed(missing))],
                )
                pairs = [(n // m, m) for n, m in zip(padded.shape, self.block, strict=True)]
                blocks = padded.reshape([*chain.from_iterable(pairs)])
                inside = [*range(1, blocks.ndim, 2)]
                largest = blocks.abs().amax(inside, keepdim=True)
                if not largest.isfinite().all():
                    blocks = blocks.where(blocks.isfinite(), math.nan)
                    largest = blocks.nan_to_num(0).abs().amax(inside, keepdim=True)
                # By a tensor: by a number, CUDA multiplies with its reciprocal, which rounds twice.
                scales = largest / torch.full_like(largest, _FP8_MAX)
                scales = scales.masked_fill(scales == 0, 1)
                if self.makes_scales:
                    results = scales.reshape(part.shape)
                else:
                    codes = (blocks / scales).clamp(-_FP8_MAX, _FP8_MAX)
                    codes = codes.reshape(padded.shape)[part.relative_to(place.offset).slices()]
                    results = codes.to(torch.float8_e4m3fn)
                made[part.relative_to(box.offset).slices()] = results

    def _parts(self, box: Box, most: int) -> Iterator[tuple[Box, Box]]:
        """Parts of a box, each with the box of the values in its blocks: at most so many of those,
        unless they are in one block.
        """
        for blocks in split_rows(self._blocks_for(box), most // math.prod(self.block)):
            values = self._values_in(blocks)
            yield blocks if self.makes_scales else values.intersect(box) or values, values

    def _blocks_for(self, box: Box) -> Box:
        return box if self.makes_scales else _blocks_of(box, self.block)

    def _values_in(self, blocks: Box) -> Box:
        axes = [*zip(blocks.offset, blocks.stop, self.block, self.values.shape, strict=True)]
        shape = tuple(min(stop * size, n) - start * size for start, stop, size, n in axes)
        return Box(tuple(start * size for start, _, size, _ in axes), shape)


def _blocks_of(box: Box, block: Ints) -> Box:
    """The blocks that a box meets, along the axes that ``block`` has."""
    axes = zip(box.offset, box.stop, block, strict=False)
    blocks = [range(start // size, -(-stop // size)) for start, stop, size in axes]
    return Box(tuple(own.start for own in blocks), tuple(map(len, blocks)))


Quantized = Quantization | BlockQuantization
