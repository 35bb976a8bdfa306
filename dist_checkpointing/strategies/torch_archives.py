"""The files of ``torch.save``: where each entry is, and whether all is sound before torch reads it.

PyTorch trusts what a pickle says about the memory of a tensor: a storage that is larger than its
bytes in the file would crash the process.

The entries of an archive are uncompressed, follow each other, and are in one folder. Any other
archive is refused, because PyTorch's reader could find something else in it than what was checked.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.strategies.pickle_scanner import (
    BadPickle,
    StorageCheck,
    Stub,
    check_pickle,
)

# The structures of a zip archive, see APPNOTE.TXT of PKWARE, 4.3.7 to 4.3.16 and 4.5.3.
LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
EXTRA = struct.Struct("<2H")
SIZES64 = struct.Struct("<2Q")
OVERFLOW = 0xFFFFFFFF
SIZES_FOLLOW = 0x8

_OVERFLOW_16 = 0xFFFF
_DESCRIPTOR_SIZES = (16, 24)
_ENCRYPTED = 0x1

_ARCHIVE_START = b"PK\x03\x04"
_NUM_HEADERS = 3  # pickles of the magic number, the protocol and the machine
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C

Read = Callable[[int, int], bytes]
"""``(start, count)`` -> so many bytes of an archive, from byte ``start`` on."""


class BadRecord(ValueError):
    """An archive is not one that ``torch.save`` writes; see the message."""


def entries(read: Read, length: int) -> dict[str, tuple[int, int]]:
    """``(start, size)`` of each entry, by its name below the folder of the archive."""
    where, size, count = _find_directory(read, length)
    directory = read(where, size)
    found: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
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
            if OVERFLOW in (packed, plain, start):
                extra = directory[position : position + extra_size]
                plain, packed, start = _wide(extra, [plain, packed, start])
            position += extra_size + comment_size
            if method != 0 or packed != plain or flags & _ENCRYPTED:
                raise BadRecord(f"{name} is compressed, which PyTorch never does")
            local = LOCAL.unpack(read(start, LOCAL.size))
            begin = start + LOCAL.size + local[9] + local[10]
            if local[0] != b"PK\x03\x04":
                raise BadRecord(f"{name} is not where the directory says")
            folder, _, own = name.partition("/")
            folders.add(folder)
            found[own] = begin, plain
            edges.append((start, begin + plain, flags & SIZES_FOLLOW))
    except (struct.error, UnicodeDecodeError) as error:
        raise BadRecord(f"its directory is damaged: {error}") from error
    # PyTorch ignores the case of names: it could take either of two that differ only in case.
    if len(folders) > 1 or len({name.lower() for name in found}) != count:
        raise BadRecord("its directory has a name twice")
    # A number that is slightly wrong would shift all values, so entries must follow each other.
    edges.sort()
    for (_, stop, descriptor), (start, _, _) in itertools.pairwise(edges):
        if start - stop not in (_DESCRIPTOR_SIZES if descriptor else (0,)):
            raise BadRecord("its entries do not follow each other")
    return found


def _find_directory(read: Read, length: int) -> tuple[int, int, int]:
    """(start, size, number of entries) of the directory at the end of an archive."""
    if length < END.size:
        raise BadRecord(f"{length} bytes are too few for an archive")
    end = END.unpack(read(length - END.size, END.size))
    signature, count, size, where = end[0], end[4], end[5], end[6]
    if signature != b"PK\x05\x06":
        raise BadRecord("it does not end like an archive of torch.save")
    at = length - END.size - END64_LOCATOR.size
    if at >= 0:
        locator = END64_LOCATOR.unpack(read(at, END64_LOCATOR.size))
        if locator[0] == b"PK\x06\x07":
            if locator[2] + END64.size > at:
                raise BadRecord("its end is damaged")
            wide = END64.unpack(read(locator[2], END64.size))[7:10]
            # Some readers use the one and some the other, so they must not contradict each other.
            for narrow, full, most in zip(
                (count, size, where), wide, (_OVERFLOW_16, OVERFLOW, OVERFLOW), strict=True
            ):
                if narrow != min(full, most):
                    raise BadRecord("its two ends contradict each other")
            count, size, where = wide
    if where + size > length or count * CENTRAL.size > size:
        raise BadRecord("its directory lies outside of it")
    return where, size, count


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """The sizes and the start of an entry, with 64-bit numbers from its extra fields."""
    position = 0
    while position + EXTRA.size <= len(extra):
        kind, size = EXTRA.unpack_from(extra, position)
        position += EXTRA.size
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{numbers.count(OVERFLOW)}Q", extra, position))
            return [next(wide) if number == OVERFLOW else number for number in numbers]
        position += size
    raise BadRecord("an entry has no 64-bit size")


# Checks.


_ITEMSIZES = {
    f"torch.{name}": dtype.itemsize
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()  # noqa: SLF001 - torch has no public list
} | {"torch.storage.UntypedStorage": 1, "torch.storage.TypedStorage": 1}
"""Bytes of an element of each class of storage, by its name in pickles."""


def check_torch_file(source: bytes | Path) -> None:
    """Check what ``torch.load(weights_only=True)`` is about to read.

    Raises:
        ValueError: if it is damaged, or would build what no state dict holds.
        OSError: if it cannot be read.
    """
    if isinstance(source, bytes):
        _check(source)
        return
    with source.open("rb") as file:
        if not file.read(1):
            raise BadRecord("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            _check(mapped)


def _check(data: Any) -> None:
    def read(start: int, count: int) -> bytes:
        if start < 0 or start + count > len(data):
            raise BadRecord("it refers to bytes outside of it")
        return bytes(data[start : start + count])

    if data[: len(_ARCHIVE_START)] == _ARCHIVE_START:
        found = entries(read, len(data))
        if "data.pkl" not in found:
            raise BadRecord("its archive has no data.pkl")
        check_pickle(read(*found["data.pkl"]), storage=partial(_stored_elements, found))
        return
    # The format before PyTorch 1.6: several pickles, then the storages.
    position = 0
    for number in range(_NUM_HEADERS):
        header = check_pickle(data, position)
        if number == 0 and header.value != _MAGIC_NUMBER:
            raise BadRecord("it does not begin like a file of torch.save")
        position = header.end
    position = check_pickle(data, position, _legacy_storages(len(data))).end
    check_pickle(data, position)  # the order of the storages


def _storage(pid: Any, least: int) -> tuple[str, int, int, Sequence[Any]]:
    """Name, number of elements and bytes of the storage with this id, which has so many parts."""
    items = pid.items if isinstance(pid, Stub) and pid.kind == "tuple" else ()
    if len(items) < least:
        raise BadPickle("it refers to something that is not a storage")
    kind, cls, key, _, count = items[:5]
    itemsize = _ITEMSIZES.get(cls.name) if isinstance(cls, Stub) and cls.kind == "global" else None
    is_known = kind in ("storage", b"storage") and itemsize is not None
    if not is_known or type(count) is not int or count < 0:
        raise BadPickle("it refers to something that is not a storage")
    assert itemsize is not None
    name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return name, count, count * itemsize, items


def _stored_elements(found: Mapping[str, tuple[int, int]], pid: Any) -> int:
    name, count, num_bytes, _ = _storage(pid, 5)
    _, size = found.get(f"data/{name}", (0, None))
    if size is None or num_bytes > size:
        there = "none" if size is None else f"{size} bytes"
        raise BadRecord(f"storage {name} of {num_bytes} bytes, found {there}")
    return count


def _legacy_storages(most_bytes: int) -> StorageCheck:
    """A check of the storages in an old file of ``most_bytes`` bytes."""
    known: dict[str, tuple[int, int]] = {}
    total = 0

    def check(pid: Any) -> int:
        name, count, num_bytes, items = _storage(pid, 6)
        nonlocal total
        total += 0 if name in known else num_bytes
        if known.setdefault(name, (count, num_bytes)) != (count, num_bytes):
            raise BadRecord(f"storage {name} has two sizes")
        if total > most_bytes:
            raise BadRecord(f"storages of {total} bytes in a file of {most_bytes}")
        view = items[5]
        if view is None:
            return count
        parts = view.items if isinstance(view, Stub) and view.kind == "tuple" else ()
        if len(parts) != 3 or any(type(n) is not int or n < 0 for n in parts[1:]):
            raise BadPickle("an invalid view of a storage")
        if parts[1] + parts[2] > count:
            raise BadRecord(f"a view that sticks out of storage {name}")
        return int(parts[2])

    return check
