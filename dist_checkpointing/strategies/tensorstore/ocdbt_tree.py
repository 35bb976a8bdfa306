"""OCDBT, tree: looking keys up, and making the tree of a new database."""

from __future__ import annotations

import errno
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
    Interior,
    Leaf,
    Malformed,
    Manifest,
    Root,
    TreeStatistics,
    decode_node,
    encode_interior,
    encode_leaf,
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
    node: Leaf | Interior | None = None
    below: list[_NodeRef] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """The columns of ``Values`` while they grow."""

    files: dict[str, int] = field(default_factory=dict)
    inline: dict[int, bytes] = field(default_factory=dict)

    def number(self, file: FileRef) -> int:
        return self.files.setdefault(file.path, len(self.files))


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
        self._root = None
        if root is not None:
            place = (root.file, root.offset, root.length, root.height)
            self._root = _NodeRef(*place, b"", b"", None, self.num_keys)

    def all(self) -> tuple[list[bytes], Values]:
        """Every key, sorted, and where its value is."""
        keys: list[bytes] = []
        found = _Found()
        columns: list[Extents] = []
        for leaf in self._ordered_leaves():
            start = len(keys)
            keys += leaf.keys
            numbers = np.array([*map(found.number, leaf.files), INLINE])
            extents = leaf.extents
            for row in np.flatnonzero(extents.file == INLINE).tolist():
                begin = int(extents.offset[row])
                found.inline[start + row] = leaf.inline[begin : begin + int(extents.length[row])]
            # The last of the numbers is that of -1.
            columns.append(Extents(numbers[extents.file], extents.offset, extents.length))
        return keys, Values(list(found.files), _joined(columns), found.inline)

    def find(self, wanted: Sequence[bytes]) -> Values:
        """Where the values of some keys are."""
        if len(wanted) * _FEW > self.num_keys:
            return self._find_among_all(wanted)
        found = _Found()
        rows = [self._find_one(key, row, found) for row, key in enumerate(wanted)]
        file, offset, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        return Values(list(found.files), Extents(file, offset, length), found.inline)

    def _find_among_all(self, wanted: Sequence[bytes]) -> Values:
        """The same for many keys: every leaf is looked through."""
        number = dict(zip(wanted, range(len(wanted)), strict=True))
        file = np.full(len(wanted), ABSENT, dtype=np.int64)
        offset, length = np.zeros_like(file), np.zeros_like(file)
        found = _Found()
        for leaf in self._ordered_leaves():
            own = np.fromiter(map(number.get, leaf.keys, repeat(-1)), np.int64, len(leaf.keys))
            taken = np.flatnonzero(own >= 0)
            rows, extents = own[taken], leaf.extents.rows(taken)
            # The last of the numbers is that of -1.
            numbers = np.array([*map(found.number, leaf.files), INLINE])
            file[rows], length[rows] = numbers[extents.file], extents.length
            offset[rows] = np.where(extents.file == INLINE, 0, extents.offset)
            for place in np.flatnonzero(extents.file == INLINE).tolist():
                begin = int(extents.offset[place])
                value = leaf.inline[begin : begin + int(extents.length[place])]
                found.inline[int(rows[place])] = value
        inline = found.inline
        if len(number) < len(wanted):
            # Some keys are asked for several times.
            source = np.fromiter(map(number.__getitem__, wanted), np.int64, len(wanted))
            file, offset, length = file[source], offset[source], length[source]
            pairs = enumerate(source.tolist())
            inline = {row: inline[first] for row, first in pairs if first in inline}
        return Values(list(found.files), Extents(file, offset, length), inline)

    def find_outside(self, key: bytes) -> tuple[str, int, int] | None:
        """File, first byte and length of a value; None if it is absent or in the tree itself."""
        leaf, file, offset, length = self._entry(key)
        return None if leaf is None or file == INLINE else (leaf.files[file].path, offset, length)

    def _find_one(self, key: bytes, row: int, found: _Found) -> tuple[int, int, int]:
        leaf, file, offset, length = self._entry(key)
        if leaf is None:
            return ABSENT, 0, 0
        if file == INLINE:
            found.inline[row] = leaf.inline[offset : offset + length]
            return INLINE, 0, length
        return found.number(leaf.files[file]), offset, length

    def _entry(self, key: bytes) -> tuple[Leaf | None, int, int, int]:
        """The leaf that has a key, and what it says of its value; None if no leaf has it."""
        place = self._root
        while place is not None:
            node = place.node or self._node(place)
            position = bisect_right(node.keys, key) - 1
            if position < 0:
                break
            if isinstance(node, Interior):
                place = place.below[position] if place.below else _child(place, node, position)
                continue
            if node.keys[position] != key:
                break
            at = node.extents
            return node, int(at.file[position]), int(at.offset[position]), int(at.length[position])
        return None, 0, 0, 0

    def _ordered_leaves(self) -> Iterator[Leaf]:
        """All leaves, in the order of their keys, one after the other."""
        last = b""
        for leaf in self._leaves():
            if last and last >= leaf.keys[0]:
                raise _corrupt("the keys of its nodes overlap", self._folder / MANIFEST_NAME)
            last = leaf.keys[-1]
            yield leaf

    def _leaves(self) -> Iterator[Leaf]:
        waiting = [] if self._root is None else [self._root]
        while waiting:
            place = waiting.pop()
            node = place.node or self._node(place)
            if isinstance(node, Leaf):
                yield node
            else:
                waiting += reversed(place.below or _children(place, node))

    def _node(self, place: _NodeRef) -> Leaf | Interior:
        """A node, which is read once by all threads if it is remembered."""
        if not self._keeps_nodes:
            return self._read(place)
        with self._lock:
            if place.node is None:
                node = self._read(place)
                if isinstance(node, Interior):
                    place.below = _children(place, node)
                place.node = node
            return place.node

    def _read(self, place: _NodeRef) -> Leaf | Interior:
        path = self._folder / place.file.path
        try:
            record = self._read_at(place.file.path, place.offset, place.length)
            node = decode_node(record, place.height, place.file.folder, place.prefix)
            held = len(node.keys) if isinstance(node, Leaf) else sum(node.num_keys.tolist())
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


_NOTHING: Final = Extents(
    np.array([ABSENT]), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
)


def _joined(parts: Sequence[Extents]) -> Extents:
    if not parts:
        return _NOTHING.rows(slice(0))
    return Extents(*(np.concatenate(c) for c in zip(*(p.columns for p in parts), strict=True)))


def _children(place: _NodeRef, node: Interior) -> list[_NodeRef]:
    return [_child(place, node, number) for number in range(len(node.keys))]


def _child(above: _NodeRef, node: Interior, number: int) -> _NodeRef:
    extents, keys = node.extents, node.keys
    return _NodeRef(
        node.files[int(extents.file[number])],
        int(extents.offset[number]),
        int(extents.length[number]),
        above.height - 1,
        keys[number][: int(node.prefixes[number])],
        keys[number],
        keys[number + 1] if number + 1 < len(keys) else above.high,
        int(node.num_keys[number]),
    )


def _newest_root(folder: Location) -> Root | None:
    """Where the tree of the newest version begins; None if it is empty."""
    first = _read_manifest(folder / MANIFEST_NAME)
    if not first.is_numbered:
        return first.root
    matches = [_NUMBERED_NAME.fullmatch(name) for name in location.names_in(folder)]
    generations = [int(match[1], 16) for match in matches if match is not None]
    if not generations:
        return None
    path = folder / f"manifest.{max(generations):016x}"
    newest = _read_manifest(path)
    if (newest.is_numbered, newest.config, newest.generation) != (
        False,
        first.config,
        max(generations),
    ):
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
