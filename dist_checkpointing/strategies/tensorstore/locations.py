"""Where in its data files a database keeps the value of each key.

TensorStore tells it itself (``ts.ocdbt.dump``), node by node of its tree. One look at the nodes
costs far less than one read a key, and lets values be read by many, in part, and in place.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.strategies.raw_chunks import Extent
from dist_checkpointing.strategies.tensorstore.database import MANIFEST_NAME, raise_io_error
from dist_checkpointing.strategies.tensorstore.forks import require_threads
from dist_checkpointing.strategies.zarr_v3_nodes import METADATA_NAME

_MAX_HEIGHT = 64
_DESCRIPTION = f"/{METADATA_NAME}".encode()
"""What describes an array is for other programs, and no reader of ours asks for it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything in the newest version of a database.

    Attributes:
        values: where the value of each key is, or the value itself if the tree holds it.
        files: paths relative to the checkpoint of all files that hold values or nodes of the tree.
    """

    values: Mapping[str, Extent | bytes]
    files: frozenset[str]


class Places:
    """Where a database keeps values: every node of its tree is decoded once, when it is needed.

    TensorStore's conversion of a node to Python objects takes time and never frees all of them, so
    whoever asks again and again keeps one of these. Several threads may ask. A database that has
    changed since is looked at afresh; what lies in the folder of another save, the caller notices.

    Args:
        checkpoint_dir: the checkpoint.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self._folder = checkpoint_dir
        self._version: object = None
        self._walk: _Walk | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Places], tuple[Path]]:
        # Whoever gets a copy finds out for itself.
        return Places, (self._folder,)

    def of(self, keys: Collection[str]) -> dict[str, Extent | bytes]:
        """Like ``locate``.

        Raises:
            CorruptCheckpointError: if the database cannot be read, or points out of the checkpoint.
        """
        with self._lock:
            version = _version(self._folder)
            if self._walk is None or version != self._version:
                self._walk, self._version = _Walk(self._folder, keeps_nodes=True), version
            return self._walk.values(sorted(key.encode() for key in keys))


def locate(checkpoint_dir: Path, keys: Collection[str]) -> dict[str, Extent | bytes]:
    """Where the values of ``keys`` are, or the values themselves if the tree holds them.

    Keys that the database does not have are left out.

    Raises:
        CorruptCheckpointError: if the database cannot be read, or points out of the checkpoint.
    """
    walk = _Walk(checkpoint_dir, keeps_nodes=False)
    return walk.values(sorted(key.encode() for key in keys))


def survey(checkpoint_dir: Path) -> Survey:
    """What the database holds, and where; nothing if there is no database.

    Raises:
        CorruptCheckpointError: as ``locate``.
    """
    if not (checkpoint_dir / MANIFEST_NAME).exists():
        return Survey({}, frozenset())
    walk = _Walk(checkpoint_dir, keeps_nodes=False)
    values = walk.values(None)
    extents = [*walk.nodes, *(value for value in values.values() if isinstance(value, Extent))]
    paths = {extent.path for extent in extents}
    return Survey(values, frozenset(str(Path(p).relative_to(checkpoint_dir)) for p in paths))


def _version(checkpoint_dir: Path) -> object:
    """Equal as long as the database is the same: every change puts a new manifest in its place."""
    try:
        status = (checkpoint_dir / MANIFEST_NAME).stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A node at the bottom of the tree: where the values of its keys are."""

    values: Mapping[bytes, Extent | bytes]


@dataclass(frozen=True, slots=True)
class _Inner:
    """A node above others, which lie in the order of their keys.

    Attributes:
        firsts: the first key below each.
        below: what all keys below each begin with, and where that node is.
    """

    firsts: Sequence[bytes]
    below: Sequence[tuple[bytes, str]]
    height: int


class _Walk:
    """One way through the tree of keys.

    Args:
        checkpoint_dir: the checkpoint.
        keeps_nodes: whether nodes are remembered, with all that a reader may ask them for.

    Attributes:
        nodes: where the nodes are that were looked at.
    """

    def __init__(self, checkpoint_dir: Path, *, keeps_nodes: bool) -> None:
        require_threads()
        self._folder = checkpoint_dir
        self._kept: dict[str | None, Any] | None = {} if keeps_nodes else None
        self._known: dict[str, str] = {}
        self.nodes: list[Extent] = []

    def values(self, wanted: Sequence[bytes] | None) -> dict[str, Extent | bytes]:
        """Where the values of the wanted keys are, which are sorted; of all for None."""
        try:
            root = self._root()
            if root is None:
                return {}  # nothing in it
            entries = self._entries(root, b"", wanted, _MAX_HEIGHT)
            return {key.decode(): value for key, value in entries}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise_io_error(error)
            path = str(self._folder / MANIFEST_NAME)
            finding = Finding(f"{type(error).__name__}: {error}", path=path)
            raise CorruptCheckpointError("the database cannot be read", [finding]) from error

    def _root(self) -> str | None:
        """Where the root of the newest version is; None if there is nothing below it."""
        if self._kept is not None and None in self._kept:
            root: str | None = self._kept[None]
            return root
        root = self._dumped(None)["versions"][-1]["root"].get("location")
        if self._kept is not None:
            self._kept[None] = root
        return root

    def _dumped(self, node: str | None) -> Any:
        """What TensorStore says of a node; of the manifest for None."""
        base = ts.KvStore.open({"driver": "file", "path": f"{self._folder}/"}).result()
        return ts.ocdbt.dump(base, node).result()

    def _entries(
        self, location: str, prefix: bytes, wanted: Sequence[bytes] | None, most_height: int
    ) -> Iterator[tuple[bytes, Extent | bytes]]:
        """The wanted keys and values below a node, in whose range all of ``wanted`` lie."""
        node = None if self._kept is None else self._kept.get(location)
        if node is None:
            node = self._decoded(location, prefix, wanted, most_height)
            if self._kept is not None:
                self._kept[location] = node
        if isinstance(node, _Leaf):
            if wanted is None:
                yield from node.values.items()
                return
            for key in wanted:
                if key in node.values:
                    yield key, node.values[key]
            return
        bounds = [bisect_left(wanted, f) for f in node.firsts] if wanted is not None else []
        bounds.append(0 if wanted is None else len(wanted))
        for number, (below, place) in enumerate(node.below):
            part = None if wanted is None else wanted[bounds[number] : bounds[number + 1]]
            if part is None or part:
                yield from self._entries(place, below, part, node.height - 1)

    def _decoded(
        self, location: str, prefix: bytes, wanted: Sequence[bytes] | None, most_height: int
    ) -> _Leaf | _Inner:
        """A node; of the keys in a leaf only the wanted ones, unless nodes are kept."""
        content = self._dumped(location)
        self.nodes.append(_extent(location, "btreenode", self._folder, self._known))
        entries, height = content["entries"], content["height"]
        if height > most_height:
            raise ValueError(f"node {location} is no part of a tree")
        if height > 0:
            node: _Leaf | _Inner = _Inner(
                [prefix + entry["key"] for entry in entries],
                [(prefix + e["subtree_common_prefix"], e["location"]) for e in entries],
                height,
            )
        else:
            asked_for = None if wanted is None else frozenset(wanted)
            values: dict[bytes, Extent | bytes] = {}
            for entry in entries:
                key = prefix + entry["key"]
                if self._kept is not None:
                    is_needed = not key.endswith(_DESCRIPTION)
                else:
                    is_needed = asked_for is None or key in asked_for
                if is_needed:
                    values[key] = self._value(entry)
            node = _Leaf(values)
        # The conversion keeps a reference to the list for ever: most of what it leaks is in there.
        entries.clear()
        return node

    def _value(self, entry: Mapping[str, Any]) -> Extent | bytes:
        value = entry.get("inline_value")
        if value is not None:
            return bytes(value)
        return _extent(entry["indirect_value"], "value", self._folder, self._known)


def _extent(location: str, expected: str, checkpoint_dir: Path, known: dict[str, str]) -> Extent:
    """What ``value:<folder>:<file>:<offset>:<length>`` says; the names are percent-encoded."""
    kind, folder, name, offset, length = location.split(":")
    place = f"{folder}:{name}"
    if place not in known:
        relative = PurePosixPath(unquote(folder) + unquote(name))
        if kind != expected or relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"a {expected} lies at {location}")
        known[place] = str(checkpoint_dir / relative)
    return Extent(known[place], int(offset), int(length))
