"""Every element type that a checkpoint can hold: a table with numpy's and zarr's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_checkpointing.errors import Finding, UnsupportedFormatError

if TYPE_CHECKING:
    import torch


FLOATING = frozenset(
    {"float16", "bfloat16", "float32", "float64"}
    | {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)
"""The dtypes that a cast applies to; float8_e8m0fnu holds scales of others, not values."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type that can be stored.

    ``name`` is that of zarr v3, the index and torch; ``zarr_v2`` that of Megatron and TensorStore.
    ``bits``, of the same size, is always of numpy, which copies it at full speed.
    """

    name: str
    zarr_v2: str
    bits: np.dtype[Any]

    @property
    def is_of_numpy(self) -> bool:
        return self.zarr_v2 != self.name

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype, of ml_dtypes where numpy has none."""
        if self.is_of_numpy:
            return self.bits
        import ml_dtypes  # noqa: PLC0415 - it takes as long as reading a few tensors

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.name))
        return found

    @property
    def itemsize(self) -> int:
        return self.bits.itemsize

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype; UnsupportedFormatError if the installed torch is too old to have it."""
        import torch  # noqa: PLC0415 - checkpoints are listed without torch

        found: torch.dtype | None = getattr(torch, self.name, None)
        if found is None:
            finding = Finding(
                "the installed torch has no such dtype", found=self.name, remedy="Update torch."
            )
            raise UnsupportedFormatError("the checkpoint holds a dtype we cannot read", [finding])
        return found


_PLAIN = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
)
_BYTE_FLOATS = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
ELEMENT_TYPES: tuple[DType, ...] = (
    *(
        DType(dtype.name, dtype.newbyteorder("<").str, dtype)
        for dtype in map(np.dtype, _PLAIN.split())
    ),
    DType("bfloat16", "bfloat16", np.dtype(np.int16)),
    *(DType(name, name, np.dtype(np.int8)) for name in _BYTE_FLOATS.split()),
)
_BY_NAME = {row.name: row for row in ELEMENT_TYPES}
_BY_ZARR_V2 = {row.zarr_v2: row for row in ELEMENT_TYPES}


def from_name(name: str) -> DType:
    """The dtype with this zarr v3 name; UnsupportedFormatError if it cannot be stored."""
    if name not in _BY_NAME:
        raise _unsupported(name, _BY_NAME)
    return _BY_NAME[name]


def from_zarr_v2(name: object, key: str | None = None, path: str | None = None) -> DType:
    """The dtype with this zarr v2 name; no big-endian dtype can be stored."""
    if not isinstance(name, str) or name not in _BY_ZARR_V2:
        raise _unsupported(name, _BY_ZARR_V2, key, path)
    return _BY_ZARR_V2[name]


def _unsupported(
    name: object, known: dict[str, DType], key: str | None = None, path: str | None = None
) -> UnsupportedFormatError:
    finding = Finding("unknown stored dtype", key, ", ".join(known), repr(name), path=path)
    return UnsupportedFormatError("the checkpoint holds a dtype we cannot read", [finding])
