"""OCDBT, tree: looking keys up, and making the tree of a new database."""

from __future__ import annotations

import errno
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    MANIFEST_NAME,
    MOST_BODY_BYTES,
    MOST_ENTRIES,
    NODE_BYTES,
    Extents,
    FileRef,
    Malformed,
    Manifest,
    Node,
    Root,
    TreeStatistics,
    decode_node,
    encode_node,
    shared_lengths,
)

ABSENT: Final = -2
INLINE: Final = -1
_NUMBERED_NAME: Final = re.compile(r"manifest\.([0-9a-f]{16})")
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
        extents: Extents of the values; ``file`` is a position in ``files``, ``INLINE`` for a value
            in the tree itself and ``ABSENT`` for a key that the database does not have.
        inline: Row -> value in the tree.
    """

    files: Sequence[str]
    extents: Extents
    inline: Mapping[int, bytes]


@dataclass(slots=True)
class _NodeRef:
    """Where a node is, and what the node above says of it.

    Attributes:
        node: The node, and ``below`` the places of its children, where they are remembered.
    """

    file: FileRef
    offset: int
    length: int
    height: int
    prefix: bytes
    low: bytes
    high: bytes | None
    num_keys: int
    node: Node | None = None
    below: list[_NodeRef] = field(default_factory=list)


def _values(count: int, parts: Iterable[tuple[Node, I64, I64]]) -> Values:
    """Where so many values are: of each leaf, the rows that values at some positions of it fill."""
    files: dict[str, int] = {}
    inline: dict[int, bytes] = {}
    extents = Extents(*np.zeros((3, count), dtype=np.int64))
    extents.file[:] = ABSENT
    for leaf, rows, positions in parts:
        numbers = [files.setdefault(file.path, len(files)) for file in leaf.files]
        file, offset, length = leaf.extents.rows(positions)
        for at in np.flatnonzero(file == INLINE).tolist():
            inline[int(rows[at])] = leaf.inline[int(offset[at]) :][: int(length[at])]
        # The last of the numbers is that of -1.
        extents.file[rows] = np.array([*numbers, INLINE])[file]
        extents.offset[rows] = np.where(file == INLINE, 0, offset)
        extents.length[rows] = length
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
        root = _newest_root(folder)
        self._tree_bytes = 0 if root is None else root.statistics.num_tree_bytes
        self.num_keys: int = 0 if root is None else root.statistics.num_keys
        self._root: _NodeRef | None = None
        if root is not None:
            node = (root.file, root.offset, root.length, root.height)
            self._root = _NodeRef(*node, b"", b"", None, self.num_keys)

    def all(self) -> tuple[list[bytes], Values]:
        """Every key, sorted, and where its value is."""
        leaves = list(self._ordered_leaves())
        keys = [key for leaf in leaves for key in leaf.keys]
        begins = np.cumsum([0, *(len(leaf.keys) for leaf in leaves)])
        numbers = (np.arange(len(leaf.keys)) for leaf in leaves)
        parts = zip(leaves, begins, numbers, strict=False)
        return keys, _values(len(keys), ((leaf, at + own, own) for leaf, at, own in parts))

    def find(self, wanted: Sequence[bytes]) -> Values:
        """Where the values of some keys are."""
        if len(wanted) * _FEW <= self.num_keys:
            entries = [(row, *self._entry(key)) for row, key in enumerate(wanted)]
            known = ((leaf, row, at) for row, leaf, at in entries if leaf is not None)
            parts = ((leaf, np.array([row]), np.array([at])) for leaf, row, at in known)
            return _values(len(wanted), parts)
        # Of many keys every leaf is looked through.
        number = dict(zip(wanted, range(len(wanted)), strict=True))

        def parts_of_leaves() -> Iterator[tuple[Node, I64, I64]]:
            for leaf in self._ordered_leaves():
                rows = np.fromiter(map(number.get, leaf.keys, repeat(-1)), np.int64, len(leaf.keys))
                positions = np.flatnonzero(rows >= 0)
                yield leaf, rows[positions], positions

        values = _values(len(wanted), parts_of_leaves())
        if len(number) == len(wanted):
            return values
        # Some keys are asked for several times.
        source = np.fromiter(map(number.__getitem__, wanted), np.int64, len(wanted))
        inlined = values.inline
        inline = {row: inlined[at] for row, at in enumerate(source.tolist()) if at in inlined}
        return Values(values.files, values.extents.rows(source), inline)

    def find_outside(self, key: bytes) -> tuple[str, int, int] | None:
        """File, first byte and length of a value; None if it is absent or in the tree itself."""
        leaf, position = self._entry(key)
        if leaf is None or leaf.extents.file[position] == INLINE:
            return None
        file, offset, length = (int(column[position]) for column in leaf.extents)
        return leaf.files[file].path, offset, length

    def _entry(self, key: bytes) -> tuple[Node | None, int]:
        """The leaf that has a key, and its position there; None if no leaf has it."""
        ref = self._root
        while ref is not None:
            node = ref.node or self._node(ref)
            position = bisect_right(node.keys, key) - 1
            if position < 0:
                break
            if node.prefixes is None:
                return (node, position) if node.keys[position] == key else (None, 0)
            ref = ref.below[position] if ref.below else _child(ref, node, position)
        return None, 0

    def _ordered_leaves(self) -> Iterator[Node]:
        """All leaves, in the order of their keys, one after the other."""
        last = b""
        waiting = [] if self._root is None else [self._root]
        while waiting:
            ref = waiting.pop()
            node = ref.node or self._node(ref)
            if node.prefixes is not None:
                waiting += reversed(ref.below or _children(ref, node))
                continue
            if last and last >= node.keys[0]:
                raise _corrupt("the keys of its nodes overlap", self._folder / MANIFEST_NAME)
            last = node.keys[-1]
            yield node

    def _node(self, place: _NodeRef) -> Node:
        """A node, which is read once by all threads if it is remembered."""
        if not self._keeps_nodes:
            return self._read(place)
        with self._lock:
            if place.node is None:
                node = self._read(place)
                if node.prefixes is not None:
                    place.below = _children(place, node)
                place.node = node
            return place.node

    def _read(self, place: _NodeRef) -> Node:
        path = self._folder / place.file.path
        try:
            record = self._read_at(place.file.path, place.offset, place.length)
            node = decode_node(record, place.height, place.file.folder, place.prefix)
            held = len(node.keys) if node.num_keys is None else sum(node.num_keys.tolist())
            if held != place.num_keys:
                raise Malformed(f"it has {held} keys below it and not {place.num_keys}")
            if node.keys[0] < place.low or (place.high is not None and node.keys[-1] >= place.high):
                raise Malformed("its keys are not those that the node above tells")
            # The same bytes may be reached many times, and grow each time.
            if (place.file.path, place.offset) not in self._seen:
                self._seen.add((place.file.path, place.offset))
                self._room += place.length * _MOST_GROWTH
            self._room -= max(node.num_bytes, _LEAST_NODE_BYTES)
            if self._room < 0:
                raise Malformed("the nodes are far larger in memory than on disk")
        except Malformed as error:
            problem = f"a node of {place.length} bytes from {place.offset} is damaged: {error}"
            raise _corrupt(problem, path) from error
        self.files.add(place.file.path)
        return node

    def _read_at(self, name: str, offset: int, length: int) -> bytes:
        """The bytes of a node."""
        if length > MOST_BODY_BYTES:
            raise Malformed(f"it has {length} bytes")
        try:
            with self._open.get(name) or open_file(self._folder, name) as file:
                file.require(offset + length, is_all=False)
                if file.descriptor < 0 and name not in self._open:
                    # The first node to be read is the root, which is written after all others.
                    begin = max(0, offset + length - self._tree_bytes)
                    file.expect(begin, offset + length - begin)
                    self._open[name] = file
                return file.view(offset, length).tobytes()
        except WrongSizeError as error:
            raise Malformed(f"its file ends at {error.found}, before it") from error
        except EOFError as error:
            raise Malformed("its file became shorter") from error
        except OSError as error:
            if error.errno in (*local_folder.NOT_THERE, errno.ENAMETOOLONG):
                raise Malformed("its file is missing") from error
            raise


def _children(place: _NodeRef, node: Node) -> list[_NodeRef]:
    return [_child(place, node, number) for number in range(len(node.keys))]


def _child(above: _NodeRef, node: Node, number: int) -> _NodeRef:
    (file, offset, length), keys = (int(c[number]) for c in node.extents), node.keys
    assert node.prefixes is not None
    assert node.num_keys is not None
    return _NodeRef(
        node.files[file],
        offset,
        length,
        above.height - 1,
        keys[number][: int(node.prefixes[number])],
        keys[number],
        keys[number + 1] if number + 1 < len(keys) else above.high,
        int(node.num_keys[number]),
    )


def _newest_root(folder: Location) -> Root | None:
    """Where the tree of the newest version begins; None if it is empty."""
    first = _read_manifest(folder / MANIFEST_NAME)
    if first.generation:
        return first.root
    matches = [_NUMBERED_NAME.fullmatch(name) for name in location.names_in(folder)]
    generations = [int(match[1], 16) for match in matches if match is not None]
    if not generations:
        return None
    path = folder / f"manifest.{max(generations):016x}"
    newest = _read_manifest(path)
    if (newest.config, newest.generation) != (first.config, max(generations)):
        raise _corrupt("it is not the manifest that its name says", path)
    return newest.root


def _read_manifest(path: Location) -> Manifest:
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
    keys: Sequence[bytes], files: Sequence[str], extents: Extents, path: str, offset: int = 0
) -> tuple[list[bytes], Root | None]:
    """The nodes of a tree of sorted keys.

    The nodes will lie one after the other in the file at ``path``, the first at ``offset``.

    Returns:
        The nodes, and what the manifest says of the last one; nothing and None without keys.
    """
    if not keys:
        return [], None
    nodes: list[bytes] = []
    height = 0
    prefixes: I64 | None = None
    # Of each entry: keys, bytes of nodes, and bytes of values below it.
    statistics = np.zeros((len(keys), 3), dtype=np.int64)
    statistics[:, 0], statistics[:, 2] = 1, extents.length
    while True:
        added, ends, sums = [], [], []
        shared = shared_lengths(keys)
        lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
        cuts = lengths if prefixes is None else prefixes
        path_sizes = np.fromiter(map(len, files), dtype=np.int64)
        sizes = path_sizes[extents.file] + _ENTRY_BYTES[height > 0]
        groups = list(_groups(lengths + sizes, 2 if height else 1))
        for rows in groups:
            cut, part, own = 0, extents.rows(rows), statistics[rows]
            if len(groups) > 1:
                both = [keys[rows.start], keys[rows.stop - 1]]
                cut = min(int(shared_lengths(both)[1]), int(cuts[rows].min()))
            of_children = None if prefixes is None else prefixes[rows]
            node = (keys[rows], shared[rows], cut, files, part, height, of_children, own)
            added.append(encode_node(*node))
            ends.append(cut)
            sums.append(own.sum(axis=0))
            sums[-1][1] += len(added[-1])
        nodes += added
        keys = [keys[rows.start] for rows in groups]
        prefixes, statistics, files = np.array(ends), np.array(sums), [path]
        node_bytes = np.fromiter(map(len, added), dtype=np.int64)
        begins = offset + np.cumsum(node_bytes) - node_bytes
        extents = Extents(np.zeros_like(begins), begins, node_bytes)
        if len(keys) == 1:
            total = TreeStatistics(*statistics[0].tolist())
            return nodes, Root(height, FileRef(path, ""), int(begins[0]), len(added[0]), total)
        offset, height = offset + int(node_bytes.sum()), height + 1


def _groups(sizes: I64, least: int) -> Iterator[slice]:
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
