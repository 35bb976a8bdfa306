"""The tensor part of a WriteItem, made of whatever a planner of the user's own has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.mapping import tensor_memory


@dataclass(frozen=True, slots=True, init=False)
class TensorWriteData:
    """The tensor part of a WriteItem.

    Args:
        chunk: a Box, or anything with ``offsets`` and ``sizes``.
        dtype: a dtype, its name, or anything with a ``dtype``.
        properties: the same as ``dtype``.

    Attributes:
        chunk: The box to write, in elements of the global tensor.
        dtype: Name of the stored dtype.
        size: Global shape.
        flat_range: If given, only these elements of the flattened box, as a 1-D tensor.

    Raises:
        InvalidShardingError: if these are not a box, a dtype and a shape.
    """

    chunk: Box
    dtype: str
    size: Ints
    flat_range: tuple[int, int] | None

    def __init__(
        self,
        chunk: Any,
        dtype: Any = None,
        size: Sequence[int] = (),
        flat_range: tuple[int, int] | None = None,
        *,
        properties: Any = None,
    ) -> None:
        if type(chunk) is not Box:
            chunk = Box(_ints(_part(chunk, "offsets")), _ints(_part(chunk, "sizes")))
        dtype = properties if dtype is None else dtype
        if type(dtype) is not str:
            dtype = _dtype_name(dtype)
        if type(size) is not tuple:
            size = _ints(size)
        object.__setattr__(self, "chunk", chunk)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "flat_range", flat_range)

    @classmethod
    def of(cls, given: Any, key: str) -> TensorWriteData:
        """The same of a dict or an object with the names of the planner protocol.

        Raises:
            InvalidShardingError: if it lacks ``chunk``, ``properties`` or ``size``, or they do not
                fit together.
        """
        try:
            chunk, size = _part(given, "chunk"), _part(given, "size")
            data = cls(chunk, _dtype_name(_part(given, "properties")), size)
        except InvalidShardingError as error:
            (finding,) = error.findings
            raise InvalidShardingError(
                str(error).split("\n")[0], [replace(finding, key=key)]
            ) from None
        if not len(data.chunk.offset) == len(data.chunk.shape) == len(data.size):
            raise unusable_tensor_data(
                "chunk and size have different numbers of axes",
                key,
                expected=f"{len(data.size)} offsets and sizes, as size has",
                found=f"offsets {data.chunk.offset}, sizes {data.chunk.shape}",
            )
        return data

    @property
    def properties(self) -> TensorWriteData:
        """What has the ``dtype``: this."""
        return self

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def part_of(given: Any, name: str) -> Any:
    """What a dict or an object has under a name; None if it has nothing."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _part(given: Any, name: str) -> Any:
    part = part_of(given, name)
    if part is None:
        raise unusable_tensor_data(
            f"it has no {name}",
            expected="chunk (offsets, sizes), properties (dtype) and size",
            found=given,
        )
    return part


def _ints(given: Any) -> Ints:
    try:
        return tuple(map(int, given))
    except (TypeError, ValueError):
        raise unusable_tensor_data(
            "not a shape or an offset", expected="integers", found=given
        ) from None


def _dtype_name(given: Any) -> str:
    if not isinstance(given, str | torch.dtype):
        given = _part(given, "dtype")
    if isinstance(given, torch.dtype):
        return tensor_memory.from_torch(given).name
    name = str(given).removeprefix("torch.")
    known = [row.name for row in tensor_memory.DTYPES]
    if name not in known:
        problem = "this dtype cannot be stored"
        raise unusable_tensor_data(problem, expected=", ".join(known), found=name)
    return name


def unusable_tensor_data(
    problem: str, key: str | None = None, **details: Any
) -> InvalidShardingError:
    """The error about what a WriteItem has as ``tensor_data``."""
    remedy = "Give it a TensorWriteData, or a dict or an object with its names."
    finding = Finding(problem, key, remedy=remedy, **details)
    return InvalidShardingError("the tensor_data of a WriteItem is not usable", [finding])
