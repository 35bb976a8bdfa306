"""Numbers of bytes: as people read and type them, and as the limit of what is done at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)},
    **{unit: 1024**power for power, unit in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def bytes_text(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parse_bytes(text: str) -> int:
    """``"2GiB"`` and ``"2G"`` -> 2147483648, ``"5GB"`` -> 5000000000; without a unit: bytes.

    Raises:
        ValueError: if it is not a size above zero.
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is not a size; write for example 256MiB, 2GiB or 5GB")
    return size


def in_batches(
    items: Iterable[tuple[Item, int]], most_bytes: int, most_items: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Items, given with their bytes, as many together as the limits allow, a larger one alone."""
    batch: list[Item] = []
    size = 0
    for item, num_bytes in items:
        if batch and (size + num_bytes > most_bytes or len(batch) == most_items):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes
    if batch:
        yield batch
