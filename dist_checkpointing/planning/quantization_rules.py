"""The rule of recipes that makes values of the codes and scales of quantized tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_checkpointing.format.dtypes import FLOATING, from_name
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.quantization import Quantization
from dist_checkpointing.planning.recipe_rules import CastTo, Change, Misfit, Wanted, are_counts

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
        how = Quantization(keys[0], keys[1], block[: len(scales.shape)], packed)
        values = DerivedTensor.whole(keys[0], shape, from_name(self._dtype_name), how)
        return values.permuted([0, 2, 1]) if is_packed and len(shape) == 3 else values
