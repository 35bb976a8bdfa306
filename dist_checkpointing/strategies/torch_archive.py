"""The zip archives of ``torch.save``: where each entry is, found without unpacking.

All entries are uncompressed, follow each other, and are in one folder. Any other archive is
refused, because PyTorch's reader could find something else in it than what was checked.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

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
                packed, plain, start = _wide(extra, packed, plain, start)
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


def _wide(extra: bytes, packed: int, plain: int, start: int) -> tuple[int, int, int]:
    """The sizes and the start of an entry, with 64-bit numbers from its extra fields."""
    position = _find_extra(extra)
    numbers = []
    for number in (plain, packed, start):
        if number != OVERFLOW:
            numbers.append(number)
            continue
        numbers.append(struct.unpack_from("<Q", extra, position)[0])
        position += 8
    return numbers[1], numbers[0], numbers[2]


def _find_extra(extra: bytes) -> int:
    """Position of the 64-bit numbers in the extra fields of an entry."""
    position = 0
    while position + EXTRA.size <= len(extra):
        kind, size = EXTRA.unpack_from(extra, position)
        position += EXTRA.size
        if kind == 1:
            return position
        position += size
    raise BadRecord("an entry has no 64-bit size")
