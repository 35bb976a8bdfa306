"""Where the values of a tensor are in a record, whoever wrote it."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dist_checkpointing.geometry import Ints
from dist_checkpointing.strategies.torch_dist.records import (
    CENTRAL,
    END,
    END64,
    END64_LOCATOR,
    EXTRA,
    LOCAL,
    OVERFLOW,
    SIZES64,
    SIZES_FOLLOW,
    STORAGE_CLASSES,
    contiguous_stride,
)

_DESCRIPTOR_SIZES = (16, 24)
_ENCRYPTED = 0x1
_MOST_DESCRIPTION_BYTES = 1 << 16

Read = Callable[[int, int], bytes]
"""``(start, count)`` -> that part of a record; counted from its first byte."""


class BadRecord(ValueError):
    """A record is not what ``torch.save`` writes; the message says in which way."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How the elements of a stored tensor lie in its storage, in elements of ``dtype``."""

    storage: str
    dtype: torch.dtype
    storage_bytes: int
    offset: int
    shape: Ints
    stride: Ints

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        places = zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        return 0 in self.shape or all(extent == 1 or own == c for extent, own, c in places)


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in a record.

    Attributes:
        layout: how it lies in its storage; None for a subclass that only PyTorch can rebuild.
        start: where its first element is, in bytes from the first of the record.
    """

    layout: StoredLayout | None
    start: int


def find_tensor(read: Read, length: int) -> FoundTensor:
    """Find the values of the tensor in a record, without reading them.

    Args:
        read: gives parts of the record.
        length: of the record, in bytes.

    Raises:
        BadRecord: if it is none, or damaged.
    """
    entries = _entries(read, length)
    start, size = entries.get("data.pkl") or _missing("data.pkl")
    if size > _MOST_DESCRIPTION_BYTES:
        raise BadRecord(f"a description of {size} bytes")
    if "byteorder" in entries and read(*entries["byteorder"]) != b"little":
        raise BadRecord("it was not written by a little-endian machine")
    layout = _describe(read(start, size))
    if layout is None:
        return FoundTensor(None, 0)
    start, size = entries.get(f"data/{layout.storage}") or _missing(f"data/{layout.storage}")
    if size != layout.storage_bytes:
        raise BadRecord(f"a storage of {layout.storage_bytes} bytes with {size} bytes of data")
    return FoundTensor(layout, start + layout.offset * layout.dtype.itemsize)


def _missing(name: str) -> tuple[int, int]:
    raise BadRecord(f"its archive has no {name}")


def _entries(read: Read, length: int) -> dict[str, tuple[int, int]]:
    """Name (below the archive's folder) -> (start, size) of all entries, which are all plain."""
    where, size, count = _find_directory(read, length)
    directory = read(where, size)
    entries: dict[str, tuple[int, int]] = {}
    edges = [(where, where, 0)]
    position = 0
    try:
        for _ in range(count):
            fields = CENTRAL.unpack_from(directory, position)
            flags, method, (packed, plain), start = fields[3], fields[4], fields[8:10], fields[16]
            if fields[0] != b"PK\x01\x02":
                raise BadRecord("its directory is damaged")
            name_size, extra_size, comment_size = fields[10:13]
            position += CENTRAL.size
            name = directory[position : position + name_size].decode()
            position += name_size
            if OVERFLOW in (packed, plain):
                extra = directory[position : position + extra_size]
                plain, packed = SIZES64.unpack_from(extra, _find_extra(extra))
            position += extra_size + comment_size
            if method != 0 or packed != plain or flags & _ENCRYPTED:
                raise BadRecord(f"{name} is compressed, which PyTorch never does")
            local = LOCAL.unpack(read(start, LOCAL.size))
            begin = start + LOCAL.size + local[9] + local[10]
            if local[0] != b"PK\x03\x04":
                raise BadRecord(f"{name} is not where the directory says")
            entries[name.partition("/")[2]] = begin, plain
            edges.append((start, begin + plain, flags & SIZES_FOLLOW))
    except (struct.error, UnicodeDecodeError) as error:
        raise BadRecord(f"its directory is damaged: {error}") from error
    # A number that is wrong by a little would shift all values: entries must lie end to end.
    edges.sort()
    for (_, stop, descriptor), (start, _, _) in itertools.pairwise(edges):
        if start - stop not in (_DESCRIPTOR_SIZES if descriptor else (0,)):
            raise BadRecord("its entries do not follow each other")
    return entries


def _find_directory(read: Read, length: int) -> tuple[int, int, int]:
    """(start, size, number of entries) of the directory at the end of an archive."""
    if length < END.size:
        raise BadRecord(f"{length} bytes are no archive")
    end = END.unpack(read(length - END.size, END.size))
    signature, count, size, where = end[0], end[4], end[5], end[6]
    if signature != b"PK\x05\x06":
        raise BadRecord("it does not end like an archive of torch.save")
    if where == OVERFLOW and length >= END.size + END64_LOCATOR.size:
        at = length - END.size - END64_LOCATOR.size
        locator = END64_LOCATOR.unpack(read(at, END64_LOCATOR.size))
        if locator[0] != b"PK\x06\x07" or locator[2] + END64.size > length:
            raise BadRecord("its end is damaged")
        end64 = END64.unpack(read(locator[2], END64.size))
        count, size, where = end64[7:10]
    if where + size > length:
        raise BadRecord("its directory lies outside of it")
    return where, size, count


def _find_extra(extra: bytes) -> int:
    """Where the 64-bit sizes are among the extra fields of an entry."""
    position = 0
    while position + EXTRA.size <= len(extra):
        kind, size = EXTRA.unpack_from(extra, position)
        position += EXTRA.size
        if kind == 1:
            return position
        position += size
    raise BadRecord("an entry has no 64-bit size")


class _TooSpecial(Exception):
    """A pickle holds more than a plain tensor."""


def _plain(args: Sequence[Any], dtype: Any, bits: Sequence[Any]) -> tuple[Any, ...]:
    if any(bits):
        # Conjugate and negative views: what is stored is not what they stand for.
        raise _TooSpecial(f"a tensor with {bits}")
    storage, offset, shape, stride = args
    return storage, offset, shape, stride, dtype


class _Description(pickle.Unpickler):
    """Reads what the pickle of a tensor says, and makes nothing of it.

    Everything that it could call is made here and for this one pickle, so that there is nothing
    that a hostile one could change.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda *args: _plain(args[:4], None, args[6:7])
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda *args: _plain(args[:4], args[6], args[7:8])
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: None
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        for dtype, cls in STORAGE_CLASSES.items():
            if module == "torch" and cls.__name__ == name:
                return dtype
        raise _TooSpecial(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, name, _, size = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise BadRecord("its description is damaged")
        return dtype, name, size


@lru_cache(maxsize=1024)
def _describe(content: bytes) -> StoredLayout | None:
    try:
        storage, offset, shape, stride, dtype = _Description(io.BytesIO(content)).load()
        stored, name, size = storage
        numbers = (offset, size, *shape, *stride)
        plain = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        if not plain or type(name) is not str or len(shape) != len(stride):
            raise BadRecord("its description is damaged")
    except _TooSpecial:
        return None
    except BadRecord:
        raise
    except Exception as error:
        raise BadRecord(f"its description cannot be read: {error}") from error
    dtype = dtype or stored
    layout = StoredLayout(name, dtype, size * stored.itemsize, offset, tuple(shape), tuple(stride))
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > layout.storage_bytes:
        raise BadRecord("its tensor sticks out of its storage")
    return layout
