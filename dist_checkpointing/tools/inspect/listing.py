"""The tensors of a checkpoint as a list and as a tree, from its index, without torch."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.index import Index

_MOST_LEVELS = 100
OBJECT = "object"
COMMON = "common"


class Entry(NamedTuple):
    """A line of the list. A named tuple, because there may be hundreds of thousands.

    Attributes:
        key: Key of the tensor or object, or name of the value.
        shape: Global shape of a tensor, grid of a sharded object; None for common state.
        dtype: Dtype of a tensor; ``"object"`` for an object, ``"common"`` for common state.
        num_bytes: Bytes of the values of a tensor; 0 for other entries.
        sharding: How it is stored, as text.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str
    num_bytes: int
    sharding: str


@dataclass(frozen=True, slots=True)
class Subtotal:
    """The sums of all tensors whose keys have one prefix."""

    prefix: str
    num_tensors: int
    num_bytes: int


@dataclass(slots=True)
class Branch:
    """One part of the keys, and the parts below it.

    Attributes:
        name: This part of the keys.
        below: The next parts, by name.
        entry: The entry with exactly this key, if there is one.
        num_entries: Number of entries here and below.
        num_bytes: Bytes of the entries here and below.
    """

    name: str
    below: dict[str, Branch] = field(default_factory=dict)
    entry: Entry | None = None
    num_entries: int = 0
    num_bytes: int = 0


def name_filter(pattern: str | None, *, regex: bool = False) -> Callable[[str], bool]:
    """A function that tells whether a key matches a pattern.

    Args:
        pattern: a glob for the whole key if it has ``*``, ``?`` or ``[``, else a part of the key;
            None for every key.
        regex: whether the pattern is a regular expression, to be found anywhere in the key.

    Raises:
        ValueError: if the regular expression does not compile.
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
    """The tensors of an index whose keys are wanted, in the order of the index."""
    itemsizes = {row.name: row.itemsize for row in dtypes.ELEMENT_TYPES}
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
        # The tensors of a large model have only a few different shapes.
        cut = (shape, None if chunk is None else tuple(chunk))
        if cut not in seen:
            seen[cut] = math.prod(shape), sharding_text(*cut)
        count, sharding = seen[cut]
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
    """``512x4096``: a shape without spaces, so that ``awk`` sees one column."""
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
    """The entries as a tree of the parts of their keys, which are separated by ``.`` and ``/``."""
    root = Branch("")
    for entry in entries:
        above, branch = root, root
        for name in entry.key.replace("/", ".").split(".", _MOST_LEVELS):
            above, known = branch, branch.below
            if name in known:
                branch = known[name]
            else:
                branch = known[name] = Branch(name)
        # If two keys differ only in their separators, the second gets its own line.
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
