"""Quantized tensors, both ways: which boxes are read for a box, what is computed of them, and the
rules of recipes for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_checkpointing.format.dtypes import FLOATING, from_name
from dist_checkpointing.format.geometry import Box, ChunkGrid, Ints, split_flat_range, split_rows
from dist_checkpointing.mapping.tensor_memory import is_lossless
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.recipe_rules import (
    CastTo,
    Change,
    EachRule,
    Made,
    Matched,
    Misfit,
    Wanted,
    are_counts,
)

_MOST_TOGETHER = 2**18
"""So many values at a time are computed, in float32."""
_MOST_READ = 2**20
"""So many values at a time are read to be quantized."""
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4_E2M1, *(-value for value in _FP4_E2M1)], dtype=torch.float32)
_FP8 = frozenset(name for name in FLOATING if name.startswith("float8"))
_E8M0 = frozenset({"uint8", "float8_e8m0fnu"})


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


# The rules.


@dataclass(frozen=True)
class Dequantize(CastTo, name="dequantize"):
    """Makes the values of quantized tensors of their codes and scales, as both are read.

    It takes FP8 with one scale (in any floating-point dtype, or E8M0) for the tensor, for each row
    or column, or for each ``block`` of the last axes, and MXFP4: bytes ``[..., groups, bytes]`` of
    two values each and a power of two ``[..., groups]``. Experts in MXFP4, of three axes, change
    their last two axes, as the model of gpt-oss has them. What is not quantized stays as it is.

    The scales of ``NAME`` are ``NAME_scale_inv`` or ``NAME_scale``; ``NAME_blocks`` and
    ``NAME_scales`` (MXFP4) become ``NAME``. Rules before may give such names. Each value is the
    product in float32, converted once to the dtype of the tensor to fill.

    Example:
        >>> from dist_checkpointing.planning import Dequantize
        >>> print(Dequantize("model.{x*}", "float32"))
        dequantize 'model.{x*}', dtype='float32'
    """

    pattern: str = "{name*}"
    dtype: str = "bfloat16"
    block: Sequence[int] = (128, 128)

    def check(self) -> None:
        super().check()
        self.require(are_counts(1, *self.block), "block must be a list of positive numbers")

    def change(self, tensors: Mapping[str, Any], wanted: Wanted | None) -> Change:  # noqa: ARG002
        change = Change()
        for key, *_ in self.matches(tensors):
            with change.noting(key):
                name, dtype = key.removesuffix("_blocks"), tensors[key].dtype.name
                names, dtypes = [f"{key}_scale_inv", f"{key}_scale"], _FP8
                if name != key:
                    names, dtypes = [f"{name}_scales"], frozenset({"uint8"})
                scales = next((own for own in names if own in tensors), None)
                if dtype in dtypes and scales is not None:
                    change.made.append((name, self._values(tensors[key], tensors[scales], scales)))
                    change.taken += (key, scales)
                elif dtype in dtypes:
                    expected = " or ".join(names)
                    raise Misfit("its scales are missing", expected=expected, found=dtype)
                elif scales == names[0]:
                    expected = " or ".join(sorted(dtypes))
                    raise Misfit(f"it has {scales}, but no codes", expected=expected, found=dtype)
        change.count = len(change.made)
        return change

    def _values(self, codes: DerivedTensor, scales: DerivedTensor, name: str) -> DerivedTensor:
        keys = [next(iter(tensor.sources), "") for tensor in (codes, scales)]
        for tensor, key in zip((codes, scales), keys, strict=True):
            if tensor != DerivedTensor.whole(key, tensor.shape, tensor.dtype):
                remedy = "Put this rule before that one."
                raise Misfit(f"an earlier rule has changed the layout of {key}", remedy=remedy)
        is_packed = codes.dtype.name == "uint8"
        known = _E8M0 if is_packed else _E8M0 | FLOATING - _FP8
        if scales.dtype.name not in known:
            dtypes = " or ".join(sorted(known))
            raise Misfit(f"wrong dtype of {name}", expected=dtypes, found=scales.dtype.name)
        shape, packed, ndim = codes.shape, Ints(), len(codes.shape)
        if is_packed:  # the last axis becomes three, and all bytes of a group have one scale
            expected, packed = shape[:-1], (*shape[-2:], 2)
            block = (1,) * (ndim - 1)
            fits = scales.shape == expected != ()
            shape = (*shape[:-2], math.prod(packed))
        else:
            sizes = ((1,) * ndim + tuple(self.block))[len(self.block) :]
            expected = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
            counts = scales.shape + (1,) * (ndim - len(scales.shape))
            # One scale for a block, for each element of an axis, or for all of it.
            ways = zip(counts, expected, sizes, shape, strict=False)
            block = tuple({many: size, n: 1, 1: n}.get(count, 0) for count, many, size, n in ways)
            fits = len(counts) == ndim and (0 not in block or 0 in shape)
        if not fits:
            raise Misfit(f"wrong shape of {name}", expected=expected, found=scales.shape)
        how = Quantization(codes, scales, block[: len(scales.shape)], packed)
        values = DerivedTensor.whole(keys[0], shape, from_name(self._dtype_name), how)
        return values.permuted([0, 2, 1]) if is_packed and len(shape) == 3 else values


@dataclass(frozen=True)
class Quantize(EachRule, name="quantize"):
    """Makes codes in float8_e4m3fn of floating-point tensors, and scales in float32, as DeepSeek.

    ``NAME`` becomes codes, and ``NAME_scale_inv`` has the scales: one for each ``block`` of the
    last axes, of which those at the edges may be smaller. A scale is the largest finite magnitude
    in its block divided by 448, or 1 if that is zero; a code is the value divided by the scale,
    both in float32, and NaN if the value is NaN or infinite. No sharding changes a bit of them.

    Tensors in FP8, scales, and tensors with fewer axes than a block, such as norms and biases, stay
    as they are.

    Example:
        >>> from dist_checkpointing.planning import Quantize
        >>> print(Quantize("model.layers.{i}.{x*}_proj.weight"))
        quantize 'model.layers.{i}.{x*}_proj.weight'
    """

    pattern: str
    block: Sequence[int] = (128, 128)

    def check(self) -> None:
        is_valid = self.block and are_counts(1, *self.block)
        self.require(is_valid, "block must be a list of positive numbers")

    def made(self, own: Matched) -> Made:
        key, tensor, missing = own.key, own.tensor, len(own.tensor.shape) - len(self.block)
        is_plain = tensor.dtype.name in FLOATING - _FP8 and not key.endswith("_scale_inv")
        if not (is_plain and missing >= 0 and tensor.sources):
            return [(key, tensor)]
        if any(piece.key is None and piece.fill == "template" for piece in tensor.pieces):
            raise Misfit("only the template holds some of its values", remedy="Fill with zeros.")
        block, source = (*[1] * missing, *self.block), tensor.sources[0]
        how, counts = BlockQuantization(tensor, block), ChunkGrid(tensor.shape, block).counts
        codes = DerivedTensor.whole(source, tensor.shape, from_name("float8_e4m3fn"), how)
        how = replace(how, makes_scales=True)
        scales = DerivedTensor.whole(source, counts, from_name("float32"), how)
        return [(key, codes), (f"{key}_scale_inv", scales)]
