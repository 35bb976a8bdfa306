"""What a checkpoint holds as a list and as a tree, from its index alone; without torch."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_checkpointing.format import element_types
from dist_checkpointing.format.index import Index

_MOST_LEVELS = 100
OBJECT = "object"
COMMON = "common"


class Entry(NamedTuple):
    """A line of the list. A named tuple, because there may be hundreds of thousands.

    Attributes:
        key: its name.
        shape: global shape of a tensor, grid of a sharded object; None for common state.
        dtype: of a tensor; ``"object"`` for a sharded object, ``"common"`` for common state.
        num_bytes: of the values of a tensor; 0 for what is not one.
        sharding: how it is stored, as text.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str
    num_bytes: int
    sharding: str


@dataclass(frozen=True, slots=True)
class Subtotal:
    """What all tensors whose keys begin alike have together."""

    prefix: str
    num_tensors: int
    num_bytes: int


@dataclass(slots=True)
class Branch:
    """What lies below one part of the keys.

    Attributes:
        name: the part.
        below: what follows it.
        entry: what has exactly this key, if anything has.
        num_entries: here and below.
        num_bytes: here and below.
    """

    name: str
    below: dict[str, Branch] = field(default_factory=dict)
    entry: Entry | None = None
    num_entries: int = 0
    num_bytes: int = 0


def name_filter(pattern: str | None, *, regex: bool = False) -> Callable[[str], bool]:
    """Whether a key is meant by a pattern.

    Args:
        pattern: with ``*``, ``?`` or ``[`` a glob for the whole key, else a part of it; None for
            every key.
        regex: it is a regular expression, which has to be found somewhere in the key.

    Raises:
        ValueError: if it does not compile.
    """
    if pattern is None:
        return lambda _: True
    try:
        if regex:
            found = re.compile(pattern).search
        elif any(sign in pattern for sign in "*?["):
            found = re.compile(fnmatch.translate(pattern)).match
        else:
            return lambda key: pattern in key
    except re.error as error:
        raise ValueError(f"the regular expression {pattern!r} does not compile: {error}") from None
    return lambda key: found(key) is not None


def tensor_entries(index: Index, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """The tensors of an index whose keys are wanted, in its order."""
    itemsizes = {row.name: row.itemsize for row in element_types.ELEMENT_TYPES}
    seen: dict[tuple[tuple[int, ...], tuple[int, ...] | None], tuple[int, str]] = {}
    columns = zip(
        index.keys_column,
        index.dtype_column,
        index.global_shape_column,
        index.chunk_shape_column,
        strict=True,
    )
    for key, dtype, extents, chunk in columns:
        if not wanted(key):
            continue
        shape = tuple(extents)
        # Most tensors of a large model have one of a few shapes.
        alike = (shape, None if chunk is None else tuple(chunk))
        if alike not in seen:
            seen[alike] = math.prod(shape), sharding_text(*alike)
        count, sharding = seen[alike]
        if chunk is None:
            pieces = len(index.pieces[key])
            sharding = f"{pieces} piece{'s' if pieces != 1 else ''}"
        yield Entry(key, shape, dtype, count * itemsizes[dtype], sharding)


def sharding_text(shape: tuple[int, ...], chunk: tuple[int, ...] | None) -> str:
    """``8x1 of 512x4096``: chunks along each axis, and the shape of a chunk."""
    if chunk is None:
        return "pieces"
    counts = [-(-extent // part) for extent, part in zip(shape, chunk, strict=True)]
    number = math.prod(counts)
    if number <= 1:
        return "1 chunk" if number else "empty"
    return f"{shape_text(counts)} of {shape_text(chunk)}"


def shape_text(shape: Iterable[int] | None) -> str:
    """``512x4096``: a shape without spaces, so that columns stay columns for ``awk``."""
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def subtotals(entries: Iterable[Entry]) -> list[Subtotal]:
    """The sums for each first part of the keys, largest first."""
    sums: dict[str, list[int]] = {}
    for entry in entries:
        prefix = entry.key.replace("/", ".").partition(".")[0]
        row = sums.setdefault(prefix, [0, 0])
        row[0] += 1
        row[1] += entry.num_bytes
    rows = [Subtotal(prefix, count, size) for prefix, (count, size) in sums.items()]
    return sorted(rows, key=lambda row: (-row.num_bytes, row.prefix))


def as_tree(entries: Iterable[Entry]) -> Branch:
    """The entries by the parts of their keys, which end at ``.`` and ``/``."""
    root = Branch("")
    for entry in entries:
        above, branch = root, root
        for name in entry.key.replace("/", ".").split(".", _MOST_LEVELS):
            above, known = branch, branch.below
            if name in known:
                branch = known[name]
            else:
                branch = known[name] = Branch(name)
        # Two keys may differ in their separators only: the second gets a line of its own.
        if branch.entry is not None:
            branch = above.below.setdefault(entry.key, Branch(entry.key))
        branch.entry = entry
    _sum_up(root)
    return root


def _sum_up(branch: Branch) -> None:
    entry = branch.entry
    branch.num_entries, branch.num_bytes = (1, entry.num_bytes) if entry else (0, 0)
    for child in branch.below.values():
        _sum_up(child)
        branch.num_entries += child.num_entries
        branch.num_bytes += child.num_bytes
