"""Teaches zarr-python the dtypes of ml_dtypes: importing this module registers them.

zarr-python 3.1 knows entry points for dtypes, but does not load them; hence an import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.core.dtype.wrapper import ZDType
from zarr.dtype import data_type_registry

from dist_checkpointing.mapping.tensor_memory import DTYPES

_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, kw_only=True)
class _ExtendedFloat(ZDType[Any, Any], HasEndianness, HasItemSize):
    """A float of ml_dtypes.

    It has an endianness because TensorStore wants a "bytes" codec that declares one, and
    zarr-python writes that only for dtypes with endianness.
    """

    native: ClassVar[np.dtype[Any]]

    @property
    def item_size(self) -> int:
        return self.native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != cls.native:
            raise DataTypeValidationError(f"{dtype} is not {cls.native}")
        return cls()

    def to_native_dtype(self) -> Any:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        name = data.get("name") if isinstance(data, dict) else data
        return cls._from_json_v3(name)

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format == 2:
            return {"name": self._zarr_v3_name, "object_codec_id": None}
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | np.bool_ | self.native.type)

    def cast_scalar(self, data: object) -> Any:
        return self.native.type(data)

    def default_scalar(self) -> Any:
        return self.native.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002
        return self.native.type(_SPECIAL.get(data, data))

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:  # noqa: ARG002
        value = float(self.cast_scalar(data))
        if np.isfinite(value):
            return value
        return "NaN" if np.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


for _row in DTYPES:
    # isbuiltin is 1 for numpy's own types, which zarr-python knows.
    if _row.numpy.isbuiltin != 1:
        _class = type(
            f"{_row.name.title()}ZDType",
            (_ExtendedFloat,),
            {
                "native": _row.numpy,
                "dtype_cls": type(_row.numpy),
                "_zarr_v3_name": _row.name,
                "__module__": __name__,
            },
        )
        data_type_registry.register(_row.name, _class)
