"""Records: the ``torch.save`` archives that a .distcp file is made of, one a chunk.

A record is a zip archive whose entries are not compressed, so the values of a tensor are a run of
bytes in the file. Writing puts a few hundred bytes before and behind those that are in memory
already; reading finds the run and reads any part of it.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch

from dist_checkpointing.geometry import Ints

ALIGNMENT = 64
"""Records and the values in them begin at multiples of this, as PyTorch's own do in an archive."""

# The structures of a zip archive, see APPNOTE.TXT of PKWARE, 4.3.7 to 4.3.16 and 4.5.3.
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_EXTRA = struct.Struct("<2H")
_SIZES64 = struct.Struct("<2Q")
_DESCRIPTOR_SIZES = (16, 24)
_OVERFLOW = 0xFFFFFFFF
_SIZES_FOLLOW = 0x8
_UTF8 = 0x800
_ENCRYPTED = 0x1
_VERSION = 45  # of the format that knows 64-bit sizes
_PADDING_ID = 0x4246

_ROOT = "archive"
_MOST_DESCRIPTION_BYTES = 1 << 16

Read = Callable[[int, int], bytes]
"""``(start, count)`` -> that part of a record; counted from its first byte."""


class BadRecord(ValueError):
    """A record is not what ``torch.save`` writes; the message says in which way."""


# Writing.


_STORAGE_CLASSES: dict[torch.dtype, type] = {
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
        typed = _STORAGE_CLASSES.get(dtype)
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

    Attributes:
        head: the bytes before the values.
        num_bytes: of the values.
        directory: the entries that lie in ``head``, as they are listed at the end.
    """

    head: bytes
    num_bytes: int
    directory: bytes

    def tail(self, crc: int) -> bytes:
        """The bytes behind the values.

        Args:
            crc: CRC-32 of the values; PyTorch's readers do not look at it, zip tools do.
        """
        name = f"{_ROOT}/data/0".encode()
        large = self.num_bytes >= _OVERFLOW
        sizes = _SIZES64 if large else struct.Struct("<2I")
        descriptor = b"PK\x07\x08" + struct.pack("<I", crc)
        descriptor += sizes.pack(self.num_bytes, self.num_bytes)
        size, extra = self.num_bytes, b""
        if large:
            size, extra = _OVERFLOW, _EXTRA.pack(1, _SIZES64.size)
            extra += _SIZES64.pack(self.num_bytes, self.num_bytes)
        start = _values_header_start(self.head)
        entry = _central(name, crc, size, start, extra)
        directory = self.directory + entry
        count = _NUM_SMALL_ENTRIES + 1
        where = len(self.head) + self.num_bytes + len(descriptor)
        end64 = _END64.pack(
            b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count,
            len(directory), where,
        )  # fmt: skip
        locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, where + len(directory), 1)
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(where, _OVERFLOW), 0)
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
        head += _LOCAL.pack(
            b"PK\x03\x04", _VERSION, _UTF8, 0, 0, 0, crc, len(content), len(content), len(path), 0
        )
        head += path + content
    path = f"{_ROOT}/data/0".encode()
    unpadded = len(head) + _LOCAL.size + len(path) + _EXTRA.size
    padding = -unpadded % ALIGNMENT
    head += _LOCAL.pack(
        b"PK\x03\x04", _VERSION, _UTF8 | _SIZES_FOLLOW, 0, 0, 0, 0, 0, 0, len(path),
        _EXTRA.size + padding,
    )  # fmt: skip
    head += path + _EXTRA.pack(_PADDING_ID, padding) + b"Z" * padding
    return RecordFormat(head, math.prod(shape) * dtype.itemsize, directory)


def _values_header_start(head: bytes) -> int:
    return head.rindex(b"PK\x03\x04")


def _central(name: bytes, crc: int, size: int, start: int, extra: bytes) -> bytes:
    flags = _UTF8 | (_SIZES_FOLLOW if name.endswith(b"/data/0") else 0)
    entry = _CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, flags, 0, 0, 0, crc, size, size, len(name), len(extra),
        0, 0, 0, 0, start,
    )  # fmt: skip
    return entry + name + extra


# Reading.


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


def contiguous_stride(shape: Ints) -> Ints:
    """Strides of a contiguous tensor, as PyTorch counts them."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


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
            fields = _CENTRAL.unpack_from(directory, position)
            flags, method, (packed, plain), start = fields[3], fields[4], fields[8:10], fields[16]
            if fields[0] != b"PK\x01\x02":
                raise BadRecord("its directory is damaged")
            name_size, extra_size, comment_size = fields[10:13]
            position += _CENTRAL.size
            name = directory[position : position + name_size].decode()
            position += name_size
            if _OVERFLOW in (packed, plain):
                extra = directory[position : position + extra_size]
                plain, packed = _SIZES64.unpack_from(extra, _find_extra(extra))
            position += extra_size + comment_size
            if method != 0 or packed != plain or flags & _ENCRYPTED:
                raise BadRecord(f"{name} is compressed, which PyTorch never does")
            local = _LOCAL.unpack(read(start, _LOCAL.size))
            begin = start + _LOCAL.size + local[9] + local[10]
            if local[0] != b"PK\x03\x04":
                raise BadRecord(f"{name} is not where the directory says")
            entries[name.partition("/")[2]] = begin, plain
            edges.append((start, begin + plain, flags & _SIZES_FOLLOW))
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
    if length < _END.size:
        raise BadRecord(f"{length} bytes are no archive")
    end = _END.unpack(read(length - _END.size, _END.size))
    signature, count, size, where = end[0], end[4], end[5], end[6]
    if signature != b"PK\x05\x06":
        raise BadRecord("it does not end like an archive of torch.save")
    if where == _OVERFLOW and length >= _END.size + _END64_LOCATOR.size:
        at = length - _END.size - _END64_LOCATOR.size
        locator = _END64_LOCATOR.unpack(read(at, _END64_LOCATOR.size))
        if locator[0] != b"PK\x06\x07" or locator[2] + _END64.size > length:
            raise BadRecord("its end is damaged")
        end64 = _END64.unpack(read(locator[2], _END64.size))
        count, size, where = end64[7:10]
    if where + size > length:
        raise BadRecord("its directory lies outside of it")
    return where, size, count


def _find_extra(extra: bytes) -> int:
    """Where the 64-bit sizes are among the extra fields of an entry."""
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if kind == 1:
            return position
        position += size
    raise BadRecord("an entry has no 64-bit size")


class _TooSpecial(Exception):
    """A pickle holds more than a plain tensor."""


class _Description(pickle.Unpickler):
    """Reads what the pickle of a tensor says, and makes nothing of it.

    Everything that it could call is made here and for this one pickle, so that there is nothing
    that a hostile one could change.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, stride, *_: (storage, offset, shape, stride, None)
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda storage, offset, shape, stride, _, __, dtype, *___: (
                storage, offset, shape, stride, dtype
            )  # fmt: skip
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: None
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        for dtype, cls in _STORAGE_CLASSES.items():
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
