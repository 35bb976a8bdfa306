"""Writes the tree of keys of a new database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_checkpointing.format.ocdbt.columns import I64, shared_lengths
from dist_checkpointing.format.ocdbt.manifest import NODE_BYTES, Root
from dist_checkpointing.format.ocdbt.nodes import (
    MOST_ENTRIES,
    Extents,
    FileRef,
    TreeStatistics,
    encode_interior,
    encode_leaf,
)

_LEAF_ENTRY_BYTES = 32
_INTERIOR_ENTRY_BYTES = 56
"""How large TensorStore takes an entry for, beside its key and the path of a file."""


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one height, and how many bytes all keys below each have in common."""

    keys: Sequence[bytes]
    prefixes: I64
    extents: Extents
    statistics: Sequence[TreeStatistics]


def encode_tree(
    keys: Sequence[bytes], files: Sequence[str], extents: Extents, path: str, offset: int = 0
) -> tuple[list[bytes], Root | None]:
    """The nodes of a tree of sorted keys.

    The nodes will lie one after the other in the file at ``path``, the first at ``offset``.

    Returns:
        The nodes, and what the manifest says of the last one; nothing and None without keys.
    """
    if not keys:
        return [], None
    shared = shared_lengths(keys)
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    path_sizes = np.array([len(file) for file in files], dtype=np.int64)
    sizes = lengths + path_sizes[extents.file] + _LEAF_ENTRY_BYTES
    groups = list(_groups(sizes))
    nodes = []
    prefixes = []
    statistics = []
    for rows in groups:
        prefix = _prefix(keys, rows) if len(groups) > 1 else 0
        part = extents.rows(rows)
        node = encode_leaf(keys[rows], shared[rows], prefix, files, part)
        nodes.append(node)
        prefixes.append(prefix)
        value_bytes = int(part.length.sum())
        statistics.append(TreeStatistics(len(part.length), len(node), value_bytes))
    firsts = [keys[rows.start] for rows in groups]
    level = _Level(firsts, np.array(prefixes), _extents(nodes, offset), statistics)
    height = 0
    while len(level.keys) > 1:
        height += 1
        offset += sum(map(len, nodes[-len(level.keys) :]))
        level, added = _above(level, height, path, offset)
        nodes += added
    at, length = int(level.extents.offset[0]), int(level.extents.length[0])
    return nodes, Root(height, FileRef(path, ""), at, length, level.statistics[0])


def _above(level: _Level, height: int, path: str, offset: int) -> tuple[_Level, list[bytes]]:
    """The nodes above others, written from ``offset``."""
    sizes = np.fromiter(map(len, level.keys), dtype=np.int64) + _INTERIOR_ENTRY_BYTES + len(path)
    groups = list(_groups(sizes, least=2))
    nodes = []
    prefixes = []
    statistics = []
    for rows in groups:
        below = level.statistics[rows]
        cuts = level.prefixes[rows]
        prefix = min(_prefix(level.keys, rows), int(cuts.min())) if len(groups) > 1 else 0
        part = level.extents.rows(rows)
        node = encode_interior(height, level.keys[rows], prefix, cuts, path, part, below)
        nodes.append(node)
        prefixes.append(prefix)
        statistics.append(
            TreeStatistics(
                sum(row.num_keys for row in below),
                sum(row.num_tree_bytes for row in below) + len(node),
                sum(row.num_value_bytes for row in below),
            )
        )
    firsts = [level.keys[rows.start] for rows in groups]
    return _Level(firsts, np.array(prefixes), _extents(nodes, offset), statistics), nodes


def _groups(sizes: I64, least: int = 1) -> Iterator[slice]:
    """The rows of each node."""
    ends = np.cumsum(sizes)
    start, count = 0, len(sizes)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + NODE_BYTES, side="right"))
        stop = min(max(stop, start + least), start + MOST_ENTRIES, count)
        if count - stop < least:
            stop = count  # a node above a single one would never end
        yield slice(start, stop)
        start = stop


def _prefix(keys: Sequence[bytes], rows: slice) -> int:
    """How many bytes the keys of some rows have in common."""
    return int(shared_lengths([keys[rows.start], keys[rows.stop - 1]])[1])


def _extents(nodes: Sequence[bytes], offset: int) -> Extents:
    lengths = np.fromiter(map(len, nodes), dtype=np.int64)
    return Extents(
        np.zeros(len(nodes), dtype=np.int64), offset + np.cumsum(lengths) - lengths, lengths
    )
