"""OCDBT, tree: looking keys up, and making the tree of a new database."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import OpenFile, WrongSizeError, open_file
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import (
    I64,
    INLINE,
    MANIFEST_NAME,
    MOST_BODY_BYTES,
    MOST_ENTRIES,
    NODE_BYTES,
    Malformed,
    Node,
    NodeRef,
    decode_node,
    encode_node,
    shared_lengths,
)

ABSENT: Final = -2
_MOST_GROWTH: Final = 1 << 10
_ROOM: Final = 1 << 27
"""Nodes may take so many times their size on disk in memory, and so many bytes beside that."""
_LEAST_NODE_BYTES: Final = 1 << 15
"""What a node counts for at least: reading it takes time, too."""
_FEW: Final = 16
"""A lookup costs as much as reading this many keys of the whole tree."""


@dataclass(frozen=True, slots=True)
class Values:
    """Where values are, as columns.

    Attributes:
        files: Paths relative to the database.
        extents: ``[3, rows]``: position in ``files``, first byte, number of bytes. Of a value in
            the tree itself the first is ``INLINE``, and the second a position in ``inline``; of a
            key that the database does not have the first is ``ABSENT``.
        inline: Values in the tree.
    """

    files: Sequence[str]
    extents: I64
    inline: Sequence[bytes] = ()

    def rows(self, rows: I64) -> Values:
        return Values(self.files, self.extents[:, rows], self.inline)


Rows = I64 | slice


def _values(count: int, parts: Iterable[tuple[Node, Rows, Rows]]) -> Values:
    """Where so many values are: of each leaf, the rows that values at some positions of it fill."""
    files: dict[str, int] = {}
    inline: list[bytes] = []
    extents = np.full((3, count), ABSENT, dtype=np.int64)
    for leaf, rows, positions in parts:
        numbers = [files.setdefault(path, len(files)) for path in leaf.files]
        file, offset, length = leaf.extents[:, positions]
        # The last of the numbers is that of -1.
        extents[0, rows] = np.array([*numbers, INLINE])[file]
        inside = np.flatnonzero(file == INLINE)
        chosen = [leaf.inline[number] for number in offset[inside].tolist()]
        if chosen:
            offset = offset.copy()
            offset[inside] = np.arange(len(inline), len(inline) + len(chosen))
            inline += chosen
        extents[1, rows] = offset
        extents[2, rows] = length
    return Values(list(files), extents, inline)


class Tree:
    """The tree of keys of the newest version of a database, as it is when this is made.

    Several threads may ask. With ``keeps_nodes`` a node that was read is remembered.

    Attributes:
        num_keys: Number of its keys.
        files: Relative paths of the files whose nodes were read.

    Raises:
        CorruptCheckpointError: from all methods, if the database is damaged.
    """

    def __init__(self, folder: Location, *, keeps_nodes: bool = False) -> None:
        self._folder = folder
        self._keeps_nodes = keeps_nodes
        self._lock = threading.Lock()
        self._room = _ROOM
        self._seen: set[tuple[str, int]] = set()
        self.files: set[str] = set()
        # Files of a store that stay open, with the nodes that were read ahead.
        self._open: dict[str, OpenFile] = {}
        self._root = root = _read_manifest(folder / MANIFEST_NAME)
        self._tree_bytes = 0 if root is None else root.num_tree_bytes
        self.num_keys: int = 0 if root is None else root.num_keys

    def all(self) -> tuple[list[bytes], Values]:
        """Every key, sorted, and where its value is."""
        keys: list[bytes] = []
        parts = []
        for leaf in self._ordered_leaves():
            parts.append((leaf, slice(len(keys), len(keys) + len(leaf.keys)), slice(None)))
            keys += leaf.keys
        return keys, _values(len(keys), parts)

    def find(self, wanted: Sequence[bytes]) -> Values:
        """Where the values of some keys are."""
        if len(wanted) * _FEW <= self.num_keys:
            entries = [(row, self._entry(key)) for row, key in enumerate(wanted)]
            known = ((row, *entry) for row, entry in entries if entry is not None)
            return _values(len(wanted), ((n, np.array([r]), np.array([at])) for r, n, at in known))
        # Of many keys every leaf is looked through.
        number = dict(zip(wanted, range(len(wanted)), strict=True))
        values = _values(len(wanted), self._parts(number))
        if len(number) == len(wanted):
            return values
        # Some keys are asked for several times.
        return values.rows(np.fromiter(map(number.__getitem__, wanted), np.int64, len(wanted)))

    def _parts(self, number: Mapping[bytes, int]) -> Iterator[tuple[Node, I64, I64]]:
        """All leaves, with the numbers of those of their keys that have one."""
        for leaf in self._ordered_leaves():
            rows = np.fromiter(map(number.get, leaf.keys, repeat(-1)), np.int64, len(leaf.keys))
            positions = np.flatnonzero(rows >= 0)
            yield leaf, rows[positions], positions

    def find_outside(self, key: bytes) -> tuple[str, int, int] | None:
        """File, first byte and length of a value; None if it is absent or in the tree itself."""
        entry = self._entry(key)
        if entry is None:
            return None
        leaf, position = entry
        file, offset, length = leaf.extents[:, position].tolist()
        return None if file == INLINE else (leaf.files[file], offset, length)

    def _entry(self, key: bytes) -> tuple[Node, int] | None:
        """The leaf that has a key, and its position there."""
        ref = self._root
        while ref is not None:
            node = ref.node or self._node(ref)
            position = bisect_right(node.keys, key) - 1
            if position < 0:
                break
            if not node.children:
                return (node, position) if node.keys[position] == key else None
            ref = node.children[position]
        return None

    def _ordered_leaves(self) -> Iterator[Node]:
        """All leaves, in the order of their keys, one after the other."""
        last = b""
        waiting = [] if self._root is None else [self._root]
        while waiting:
            ref = waiting.pop()
            node = ref.node or self._node(ref)
            if node.children:
                waiting += reversed(node.children)
                continue
            if last and last >= node.keys[0]:
                raise _corrupt("the keys of its nodes overlap", self._folder / MANIFEST_NAME)
            last = node.keys[-1]
            yield node

    def _node(self, ref: NodeRef) -> Node:
        """A node, which is read once by all threads if it is remembered."""
        if not self._keeps_nodes:
            return self._read(ref)
        with self._lock:
            ref.node = ref.node or self._read(ref)
            return ref.node

    def _read(self, ref: NodeRef) -> Node:
        try:
            node = decode_node(self._record(ref), ref)
            # The same bytes may be reached many times, and grow each time.
            if (ref.path, ref.offset) not in self._seen:
                self._seen.add((ref.path, ref.offset))
                self._room += ref.length * _MOST_GROWTH
            self._room -= max(node.num_bytes, _LEAST_NODE_BYTES)
            if self._room < 0:
                raise Malformed("the nodes are far larger in memory than on disk")
        except Malformed as error:
            problem = f"a node of {ref.length} bytes from {ref.offset} is damaged: {error}"
            raise _corrupt(problem, self._folder / ref.path) from error
        self.files.add(ref.path)
        return node

    def _record(self, ref: NodeRef) -> bytes:
        name, end = ref.path, ref.offset + ref.length
        if ref.length > MOST_BODY_BYTES:
            raise Malformed(f"it has {ref.length} bytes")
        try:
            with self._open.get(name) or open_file(self._folder, name) as file:
                file.require(end, is_all=False)
                if file.descriptor < 0 and name not in self._open:
                    # The first node to be read is the root, which is written after all others.
                    begin = max(0, end - self._tree_bytes)
                    file.expect(begin, end - begin)
                    self._open[name] = file
                return file.view(ref.offset, ref.length).tobytes()
        except WrongSizeError as error:
            raise Malformed(f"its file ends at {error.found}, before it") from error
        except EOFError as error:
            raise Malformed("its file became shorter") from error
        except OSError as error:
            if error.errno in local_folder.NOT_THERE:
                raise Malformed("its file is missing") from error
            raise


def _read_manifest(path: Location) -> NodeRef | None:
    """Where the tree of the newest version begins; None if it is empty."""
    try:
        return ocdbt_nodes.decode_manifest(location.read_bytes(path, MOST_BODY_BYTES))
    except FileNotFoundError as error:
        raise _corrupt("missing", path) from error
    except Malformed as error:
        raise _corrupt(f"the manifest is damaged: {error}", path) from error


def _corrupt(problem: str, path: Location) -> CorruptCheckpointError:
    finding = Finding(
        problem, path=str(path), remedy="Restore the file, or use another checkpoint."
    )
    return CorruptCheckpointError("the database cannot be read", [finding])


_ENTRY_BYTES = (32, 56)
"""How large TensorStore takes an entry of a leaf, and of another node, for, beside its key and the
path of a file."""


def encode_tree(
    keys: Sequence[bytes], files: Sequence[str], extents: I64, path: str, offset: int = 0
) -> tuple[list[bytes], NodeRef | None]:
    """The nodes of a tree of sorted keys, whose values lie at ``extents`` (see ``Values``).

    The nodes will lie one after the other in the file at ``path``, the first at ``offset``.

    Returns:
        The nodes, and what the manifest says of the last one; nothing and None without keys.
    """
    nodes: list[bytes] = []
    if not keys:
        return nodes, None
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    # How much of each key all keys below share; and its extent, and what lies below it: keys, bytes
    # of nodes, bytes of values.
    zeros, height, prefixes = np.zeros_like(lengths), 0, lengths
    entries = np.array([*extents, zeros + 1, zeros, extents[2]])
    while True:
        shared = shared_lengths(keys)
        path_sizes = np.fromiter(map(len, files), dtype=np.int64)
        sizes = lengths + path_sizes[entries[0]] + _ENTRY_BYTES[height > 0]
        groups = list(_groups(sizes, 2 if height else 1))
        above = []
        for rows in groups:
            cut, part = 0, entries[:, rows]
            if len(groups) > 1:
                ends = shared_lengths([keys[rows.start], keys[rows.stop - 1]])
                cut = min(int(ends[1]), int(prefixes[rows].min()))
            node = encode_node(keys[rows], shared[rows], cut, files, part, height, prefixes[rows])
            num_keys, num_tree_bytes, num_value_bytes = part[3:].sum(axis=1).tolist()
            below = (num_keys, num_tree_bytes + len(node), num_value_bytes)
            nodes.append(node)
            above.append((int(lengths[rows.start]), cut, 0, offset, len(node), *below))
            offset += len(node)
        if len(groups) == 1:
            return nodes, NodeRef(path, "", height, *above[0][3:])
        keys, files, height = [keys[rows.start] for rows in groups], [path], height + 1
        table = np.array(above).T
        lengths, prefixes, entries = table[0], table[1], table[2:]


def _groups(sizes: I64, least: int) -> Iterator[slice]:
    ends = sizes.cumsum()
    start, count = 0, len(sizes)
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = int(ends.searchsorted(before + NODE_BYTES, side="right"))
        stop = min(max(stop, start + least), start + MOST_ENTRIES, count)
        if count - stop < least:
            stop = count  # a node above a single one would never end
        yield slice(start, stop)
        start = stop
