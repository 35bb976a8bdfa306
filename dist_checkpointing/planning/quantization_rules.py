"""The rules of recipes for quantized tensors: values of codes and scales, and the way back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dist_checkpointing.format.dtypes import FLOATING, from_name
from dist_checkpointing.format.geometry import ChunkGrid, Ints
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.quantization import BlockQuantization, Quantization
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

_FP8 = frozenset(name for name in FLOATING if name.startswith("float8"))
_E8M0 = frozenset({"uint8", "float8_e8m0fnu"})


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
                    values = self._values(tensors[key], tensors[scales], scales)
                    change.made.append((name, values))
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
                raise Misfit(f"a rule before has cut, joined or turned {key}", remedy=remedy)
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
