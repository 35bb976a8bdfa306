"""The rule of recipes that makes values of the codes and scales of quantized tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_checkpointing.format.dtypes import FLOATING, from_name
from dist_checkpointing.planning.derived_tensors import DerivedTensor
from dist_checkpointing.planning.quantization import Quantization
from dist_checkpointing.planning.recipe_rules import CastTo, Change, Misfit, Wanted

_FP8 = frozenset(name for name in FLOATING if name.startswith("float8"))
_E8M0 = frozenset({"uint8", "float8_e8m0fnu"})
_BLOCKS = "_blocks"
"""The end of the name of MXFP4 codes, which the values do not have."""


@dataclass(frozen=True)
class Dequantize(CastTo, name="dequantize"):
    """Makes the values of quantized tensors of their codes and scales, as both are read.

    It takes FP8 with one scale (in any floating-point dtype, or E8M0) for the tensor, for each row
    or column, or for each ``block`` of the last axes, and MXFP4: bytes ``[..., groups, bytes]`` of
    two values each and a power of two ``[..., groups]``. Experts in MXFP4, of three axes, change
    their last two axes, as the model of gpt-oss has them. What is not quantized stays as it is.

    Without ``scales``, a new name for the match, those of ``NAME`` are ``NAME_scale_inv`` or
    ``NAME_scale``, and ``NAME_blocks`` and ``NAME_scales`` (MXFP4) become ``NAME``. Each value is
    the product in float32, converted once to the dtype of the tensor to fill.

    Example:
        >>> from dist_checkpointing.planning import Dequantize
        >>> print(Dequantize("model.{x*}", "float32"))
        dequantize 'model.{x*}', dtype='float32'
    """

    pattern: str = "{name*}"
    dtype: str = "bfloat16"
    scales: str | None = None
    block: Sequence[int] = (128, 128)

    def check(self) -> None:
        super().check()
        are_sizes = self.block and all(type(size) is int and size > 0 for size in self.block)
        self.require(are_sizes, "block must be a list of positive numbers")

    def change(self, tensors: Mapping[str, Any], wanted: Wanted | None) -> Change:  # noqa: ARG002
        change = Change()
        for key, match, _ in self.matches(tensors):
            with change.noting(key):
                scales = self._key_of_scales(key, match, tensors)
                if scales is not None:
                    values = self._values(tensors[key], tensors[scales], scales)
                    change.made.append((key.removesuffix(_BLOCKS), values))
                    change.taken += (key, scales)
        change.count = len(change.made)
        return change

    def _key_of_scales(
        self, key: str, match: re.Match[str], tensors: Mapping[str, DerivedTensor]
    ) -> str | None:
        """The key of the scales of a tensor; None if it is not quantized."""
        is_packed = key.endswith(_BLOCKS)
        names = [f"{key}_scale_inv", f"{key}_scale"]
        if is_packed:
            names = [f"{key.removesuffix(_BLOCKS)}_scales"]
        if self.scales is not None:
            names = [self.expanded(match, self.scales)]
        found = next((name for name in names if name in tensors and name != key), None)
        dtype = tensors[key].dtype.name
        if dtype in (_FP8 | {"uint8"} if is_packed or self.scales else _FP8):
            if found is None:
                remedy = "Say with scales how they are named, or leave the tensor out."
                problem = "it is quantized, and its scales are missing"
                raise Misfit(problem, expected=" or ".join(names), found="none", remedy=remedy)
            return found
        if found is not None and (is_packed or self.scales or found == names[0]):
            problem = f"it has scales ({found}), and its dtype is none of quantized tensors"
            raise Misfit(problem, expected=f"{', '.join(sorted(_FP8))} or uint8", found=dtype)
        return None

    def _values(self, codes: DerivedTensor, scales: DerivedTensor, name: str) -> DerivedTensor:
        keys = [next(iter(tensor.sources), "") for tensor in (codes, scales)]
        for tensor, key, what in zip((codes, scales), keys, ("it", name), strict=True):
            if tensor != DerivedTensor.whole(key, tensor.shape, tensor.dtype):
                problem = f"{what} is cut, joined or turned by a rule before"
                raise Misfit(problem, remedy="Put this rule before that one.")
        is_packed = codes.dtype.name == "uint8"
        known = _E8M0 if is_packed else _E8M0 | FLOATING - _FP8
        if scales.dtype.name not in known:
            names = " or ".join(sorted(known))
            raise Misfit(f"wrong dtype of {name}", expected=names, found=scales.dtype.name)
        # A packed axis becomes three; all bytes of a group have one scale.
        shape = cut = (*codes.shape, 2) if is_packed else codes.shape
        sizes = cut[-2:] if is_packed else tuple(self.block)
        sizes = ((1,) * len(cut) + sizes)[len(sizes) :]
        expected = tuple(-(-n // max(size, 1)) for n, size in zip(cut, sizes, strict=True))
        counts = scales.shape + (1,) * (len(cut) - len(scales.shape))
        # One scale for a block, for each element of an axis, or for all of it.
        ways = zip(counts, expected, sizes, cut, strict=False)
        block = [{many: size, n: 1, 1: n}.get(count) for count, many, size, n in ways]
        if is_packed:
            expected, shape = cut[:-2], (*cut[:-3], math.prod(cut[-3:]))
            block = block if scales.shape == expected and len(cut) > 2 else [None]
        if len(counts) > len(cut) or None in block:
            remedy = "FP8 may also have one scale for each element of an axis, or for all of it."
            problem = f"wrong shape of {name}"
            raise Misfit(problem, expected=expected, found=scales.shape, remedy=remedy)
        extents = tuple(size or 1 for size in block)
        packed = cut[-3:] if is_packed else ()
        quantization = Quantization(keys[1], len(scales.shape), extents, packed)
        dtype = from_name(self._dtype_name)
        values = DerivedTensor.whole(keys[0], shape, dtype, quantization)
        return values.permuted([0, 2, 1]) if is_packed and len(shape) == 3 else values
