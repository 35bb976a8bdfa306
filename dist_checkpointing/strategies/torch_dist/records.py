"""Records: the ``torch.save`` archives that a .distcp file is made of, one a chunk.

A record is a zip archive whose entries are not compressed, so the values of a tensor are a run of
bytes in the file. Writing puts a few hundred bytes before and behind those that are in memory
already; reading finds the run and reads any part of it.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch

from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.strategies.torch_archive import (
    CENTRAL,
    END,
    END64,
    END64_LOCATOR,
    EXTRA,
    LOCAL,
    OVERFLOW,
    SIZES64,
    SIZES_FOLLOW,
)

ALIGNMENT = 64
"""Records and the values in them begin at multiples of this, as PyTorch's own do in an archive."""

_UTF8 = 0x800
_VERSION = 45  # of the format that knows 64-bit sizes
_PADDING_ID = 0x4246

_ROOT = "archive"


def contiguous_stride(shape: Ints) -> Ints:
    """Strides of a contiguous tensor, as PyTorch counts them."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


STORAGE_CLASSES: dict[torch.dtype, type] = {
    torch.bool: torch.BoolStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""Dtypes that pickles name by a class; the others came later and are rebuilt from bytes."""


class _Storage(NamedTuple):
    """What PyTorch's pickles say of the memory of a tensor."""

    kind: str
    cls: Any
    name: str
    location: str
    size: int


class _Described:
    """Pickles like a contiguous tensor of a dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: Ints) -> None:
        count, stride = math.prod(shape), contiguous_stride(shape)
        typed = STORAGE_CLASSES.get(dtype)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        if typed is None:
            storage = _Storage("storage", torch.UntypedStorage, "0", "cpu", count * dtype.itemsize)
            rest: tuple[Any, ...] = (dtype,)
            self._rebuild: Any = torch._utils._rebuild_tensor_v3  # noqa: SLF001 - the name in the files
        else:
            storage = _Storage("storage", typed, "0", "cpu", count)
            rest = ()
            self._rebuild = torch._utils._rebuild_tensor_v2  # noqa: SLF001
        self._args = (storage, 0, shape, stride, False, hooks, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild, self._args


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return tuple(obj) if isinstance(obj, _Storage) else None


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The bytes around the values of a contiguous tensor of one dtype and shape.

    The directory lists the entries in ``head``, as they are listed at the end.
    """

    head: bytes
    num_bytes: int
    directory: bytes

    def tail(self, crc: int) -> bytes:
        """The bytes behind the values. PyTorch's readers ignore the CRC-32; zip tools do not."""
        name = f"{_ROOT}/data/0".encode()
        large = self.num_bytes >= OVERFLOW
        sizes = SIZES64 if large else struct.Struct("<2I")
        descriptor = b"PK\x07\x08" + struct.pack("<I", crc)
        descriptor += sizes.pack(self.num_bytes, self.num_bytes)
        size, extra = self.num_bytes, b""
        if large:
            size, extra = OVERFLOW, EXTRA.pack(1, SIZES64.size)
            extra += SIZES64.pack(self.num_bytes, self.num_bytes)
        start = self.head.rindex(b"PK\x03\x04")
        entry = _central(name, crc, size, start, extra)
        directory = self.directory + entry
        count = _NUM_SMALL_ENTRIES + 1
        where = len(self.head) + self.num_bytes + len(descriptor)
        end64 = END64.pack(
            b"PK\x06\x06", END64.size - 12, _VERSION, _VERSION, 0, 0, count, count,
            len(directory), where,
        )  # fmt: skip
        locator = END64_LOCATOR.pack(b"PK\x06\x07", 0, where + len(directory), 1)
        end = END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(where, OVERFLOW), 0)
        return descriptor + directory + end64 + locator + end


_NUM_SMALL_ENTRIES = 3


@lru_cache(maxsize=1024)
def record_format(dtype: torch.dtype, shape: Ints) -> RecordFormat:
    """How ``torch.save`` frames a contiguous CPU tensor; thousands of tensors share a few."""
    description = io.BytesIO()
    _TensorPickler(description, protocol=2).dump(_Described(dtype, shape))
    small = {"data.pkl": description.getvalue(), "byteorder": b"little", "version": b"3\n"}
    assert len(small) == _NUM_SMALL_ENTRIES
    head, directory = b"", b""
    for name, content in small.items():
        path, crc = f"{_ROOT}/{name}".encode(), crc32(content)
        directory += _central(path, crc, len(content), len(head), b"")
        head += LOCAL.pack(
            b"PK\x03\x04", _VERSION, _UTF8, 0, 0, 0, crc, len(content), len(content), len(path), 0
        )
        head += path + content
    path = f"{_ROOT}/data/0".encode()
    unpadded = len(head) + LOCAL.size + len(path) + EXTRA.size
    padding = -unpadded % ALIGNMENT
    head += LOCAL.pack(
        b"PK\x03\x04", _VERSION, _UTF8 | SIZES_FOLLOW, 0, 0, 0, 0, 0, 0, len(path),
        EXTRA.size + padding,
    )  # fmt: skip
    head += path + EXTRA.pack(_PADDING_ID, padding) + b"Z" * padding
    return RecordFormat(head, math.prod(shape) * dtype.itemsize, directory)


def _central(name: bytes, crc: int, size: int, start: int, extra: bytes) -> bytes:
    flags = _UTF8 | (SIZES_FOLLOW if name.endswith(b"/data/0") else 0)
    entry = CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, flags, 0, 0, 0, crc, size, size, len(name), len(extra),
        0, 0, 0, 0, start,
    )  # fmt: skip
    return entry + name + extra
