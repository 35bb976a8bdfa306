"""Writes the header of a safetensors file before its values are there.

The library only writes files whose tensors are all in memory. A file is 8 bytes with the length of
a JSON header, the header, and the values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dist_checkpointing.format.element_types import DType
from dist_checkpointing.format.geometry import Ints

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
METADATA_KEY: Final = "__metadata__"
MAX_HEADER_BYTES: Final = 100_000_000
"""What readers of the format take at most."""

_ALIGNMENT = 8
DTYPE_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_BY_DTYPE = {name: code for code, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
        key: its name.
        dtype: its element type.
        shape: its shape.
        start: where its values begin, in bytes from the start of the file.
    """

    key: str
    dtype: DType
    shape: Ints
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def can_hold(dtype: DType) -> bool:
    """Whether the format has this dtype."""
    return dtype.name in _BY_DTYPE


def header_bytes(
    tensors: Iterable[tuple[str, DType, Ints]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Entry]]:
    """The beginning of a file, and where in the file each tensor will be.

    The values follow without gaps, wide elements first, so that all are aligned.
    """
    rows: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    ordered = sorted(tensors, key=lambda row: (-row[1].itemsize, row[0]))
    places, position = [], 0
    for key, dtype, shape in ordered:
        num_bytes = math.prod(shape) * dtype.itemsize
        rows[key] = {
            "dtype": _BY_DTYPE[dtype.name],
            "shape": list(shape),
            "data_offsets": [position, position + num_bytes],
        }
        places.append(position)
        position += num_bytes
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    entries = [
        Entry(key, dtype, shape, begin + place)
        for (key, dtype, shape), place in zip(ordered, places, strict=True)
    ]
    return struct.pack("<Q", len(text)) + text, entries


def file_names(count: int) -> list[str]:
    """What Hugging Face calls the files of a model."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
