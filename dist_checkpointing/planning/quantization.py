"""Quantized tensors: which boxes of stored codes and scales are read for a box, and its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_checkpointing.format.geometry import Box, Ints, split_flat_range, split_rows

_MOST_TOGETHER = 2**18
"""So many values at a time are computed, in float32."""
_FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4_E2M1, *(-value for value in _FP4_E2M1)], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a tensor is stored: as codes, and as scales, one for each block of its values; by keys.

    Scale ``i // block`` of an axis is that of its element ``i``; ``block`` has only the axes of the
    scales, the first ones, and the others have one scale.

    If a byte holds two values, ``packed`` are the extents ``(groups, bytes of a group, 2)`` of the
    last axis, which becomes three. The codes have the first two of them.
    """

    codes: str
    scales: str
    block: Ints
    packed: Ints = ()

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

    def stored_boxes(self, part: Box) -> tuple[tuple[str, Box], tuple[str, Box]]:
        """Keys and boxes of the codes and of the scales of a part."""
        ndim = len(part.shape) - bool(self.packed)
        axes = zip(part.offset, part.stop, self.block, strict=False)
        blocks = [range(start // size, -(-stop // size)) for start, stop, size in axes]
        scales = Box(tuple(block.start for block in blocks), tuple(map(len, blocks)))
        return (self.codes, Box(part.offset[:ndim], part.shape[:ndim])), (self.scales, scales)

    def dequantize(self, part: Box, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Compute the values of a part; codes may have their memory: the first of each byte."""
        _, (_, blocks) = self.stored_boxes(part)
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
