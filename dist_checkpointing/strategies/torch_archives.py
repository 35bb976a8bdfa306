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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dist_checkpointing.strategies.pickle_scanner import BadPickle, Stub, check_pickle, items_of

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


class Archive(Protocol):
    """The bytes of an archive, of which a slice is read when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


class BadRecord(ValueError):
    """An archive is not one that ``torch.save`` writes; see the message."""


def entries(archive: Archive) -> dict[str, tuple[int, int]]:
    """``(start, size)`` of each entry, by its name below the folder of the archive.

    They lie in the archive, one behind the other.
    """
    where, size, count = _find_directory(archive)
    directory = bytes(archive[where : where + size])
    found: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
    edges: list[tuple[int, int, tuple[int, ...]]] = [(where, where, ())]
    position = 0
    try:
        for _ in range(count):
            kind, _, _, flags, method, _, _, _, packed, plain, *lengths, _, _, _, start = (
                CENTRAL.unpack_from(directory, position)
            )
            if kind != b"PK\x01\x02":
                raise BadRecord("its directory is damaged")
            name_end = position + CENTRAL.size + lengths[0]
            name = directory[position + CENTRAL.size : name_end].decode()
            position = name_end + lengths[1] + lengths[2]
            if OVERFLOW in (packed, plain, start):
                extra = directory[name_end : name_end + lengths[1]]
                plain, packed, start = _wide(extra, [plain, packed, start])
            if method != 0 or packed != plain or flags & _ENCRYPTED:
                raise BadRecord(f"{name} is compressed, which PyTorch never does")
            *local, name_size, extra_size = LOCAL.unpack(archive[start : start + LOCAL.size])
            if local[0] != _ARCHIVE_START:
                raise BadRecord(f"{name} is not where the directory says")
            begin = start + LOCAL.size + name_size + extra_size
            folder, _, own = name.partition("/")
            folders.add(folder)
            found[own] = begin, plain
            has_descriptor = bool(flags & SIZES_FOLLOW)
            edges.append((start, begin + plain, _DESCRIPTOR_SIZES if has_descriptor else (0,)))
    except (struct.error, UnicodeDecodeError) as error:
        raise BadRecord(f"its directory is damaged: {error}") from error
    # PyTorch ignores the case of names: it could take either of two that differ only in case.
    if len(folders) > 1 or len({name.lower() for name in found}) != count:
        raise BadRecord("its directory has a name twice")
    # A number that is slightly wrong would shift all values, so entries must follow each other.
    edges.sort()
    for (_, stop, gaps), (start, _, _) in itertools.pairwise(edges):
        if start - stop not in gaps:
            raise BadRecord("its entries do not follow each other")
    return found


def _find_directory(archive: Archive) -> tuple[int, int, int]:
    """(start, size, number of entries) of the directory at the end of an archive."""
    length = len(archive)
    if length < END.size:
        raise BadRecord(f"{length} bytes are too few for an archive")
    signature, _, _, _, count, size, where, _ = END.unpack(archive[length - END.size : length])
    if signature != b"PK\x05\x06":
        raise BadRecord("it does not end like an archive of torch.save")
    at = length - END.size - END64_LOCATOR.size
    if at >= 0:
        signature, _, start, _ = END64_LOCATOR.unpack(archive[at : at + END64_LOCATOR.size])
        if signature == b"PK\x06\x07":
            if start + END64.size > at:
                raise BadRecord("its end is damaged")
            wide = END64.unpack(archive[start : start + END64.size])[7:]
            # Some readers use the one and some the other, so they must not contradict each other.
            if (count, size, where) != tuple(map(min, wide, (_OVERFLOW_16, OVERFLOW, OVERFLOW))):
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


def check_torch_file(source: bytes | Path) -> tuple[set[str], bytes]:
    """Check what ``torch.load(weights_only=True)`` is about to read.

    Returns the names of the classes and functions in it, and its pickle.

    Raises:
        ValueError: if it is damaged, or would build what no state dict holds.
        OSError: if it cannot be read.
    """
    if isinstance(source, bytes):
        return _check(source)
    with source.open("rb") as file:
        if not file.read(1):
            raise BadRecord("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _check(mapped)


def _check(data: bytes | mmap.mmap) -> tuple[set[str], bytes]:
    if data[: len(_ARCHIVE_START)] != _ARCHIVE_START:
        raise BadRecord("it does not begin like a file of torch.save")
    found = entries(data)
    if "data.pkl" not in found:
        raise BadRecord("its archive has no data.pkl")
    start, size = found["data.pkl"]
    content = data[start : start + size]
    return check_pickle(content, partial(_stored_elements, found)).names, content


def _stored_elements(found: Mapping[str, tuple[int, int]], pid: Any) -> int:
    items = items_of(pid)
    kind, cls, key, _, count = items if len(items) == 5 else (None,) * 5
    itemsize = _ITEMSIZES.get(cls.name) if isinstance(cls, Stub) and cls.kind == "global" else None
    if kind != "storage" or itemsize is None or type(count) is not int or count < 0:
        raise BadPickle("it refers to something that is not a storage")
    _, size = found.get(f"data/{key}", (0, -1))
    if count * itemsize > size:
        there = "none" if size < 0 else f"{size} bytes"
        raise BadRecord(f"storage {key} of {count * itemsize} bytes, found {there}")
    return count
