"""Where in its data files a database keeps the value of each key.

TensorStore tells it itself (``ts.ocdbt.dump``), node by node of its tree. One look at the nodes
costs far less than one read a key, and lets values be read by many, in part, and in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.strategies.raw_chunks import Extent
from dist_checkpointing.strategies.tensorstore.database import MANIFEST_NAME
from dist_checkpointing.strategies.tensorstore.forks import require_threads

_MAX_HEIGHT = 64


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything in the newest version of a database.

    Attributes:
        values: where the value of each key is, or the value itself if the tree holds it.
        files: paths relative to the checkpoint of all files that hold values or nodes of the tree.
    """

    values: Mapping[str, Extent | bytes]
    files: frozenset[str]


def locate(
    checkpoint_dir: Path, keys: Collection[str], *, with_neighbours: bool = False
) -> dict[str, Extent | bytes]:
    """Where the values of ``keys`` are, or the values themselves if the tree holds them.

    Keys that the database does not have are left out.

    Args:
        checkpoint_dir: the checkpoint.
        keys: to look for.
        with_neighbours: also give all other keys of every node that had to be looked at, for a
            caller who will ask again.

    Raises:
        CorruptCheckpointError: if the database cannot be read, or points out of the checkpoint.
    """
    walk = _Walk(checkpoint_dir, with_neighbours=with_neighbours)
    return walk.values(sorted(key.encode() for key in keys))


def survey(checkpoint_dir: Path) -> Survey:
    """What the database holds, and where; nothing if there is no database.

    Raises:
        CorruptCheckpointError: as ``locate``.
    """
    if not (checkpoint_dir / MANIFEST_NAME).exists():
        return Survey({}, frozenset())
    walk = _Walk(checkpoint_dir, with_neighbours=False)
    values = walk.values(None)
    extents = [*walk.nodes, *(value for value in values.values() if isinstance(value, Extent))]
    paths = {extent.path for extent in extents}
    return Survey(values, frozenset(str(Path(p).relative_to(checkpoint_dir)) for p in paths))


class _Walk:
    """One way through the tree of keys.

    Attributes:
        nodes: where the nodes are that were looked at.
    """

    def __init__(self, checkpoint_dir: Path, *, with_neighbours: bool) -> None:
        require_threads()
        self._folder = checkpoint_dir
        self._with_neighbours = with_neighbours
        self._base = ts.KvStore.open({"driver": "file", "path": f"{checkpoint_dir}/"}).result()
        self._known: dict[str, str] = {}
        self.nodes: list[Extent] = []

    def values(self, wanted: Sequence[bytes] | None) -> dict[str, Extent | bytes]:
        """Where the values of the wanted keys are, which are sorted; of all for None."""
        found: dict[str, Extent | bytes] = {}
        try:
            root = ts.ocdbt.dump(self._base).result()["versions"][-1]["root"]
            if "location" not in root:
                return {}  # nothing in it
            for key, entry in self._entries(root["location"], b"", wanted, _MAX_HEIGHT):
                value = entry.get("inline_value")
                if value is None:
                    location = entry["indirect_value"]
                    found[key] = _extent(location, "value", self._folder, self._known)
                else:
                    found[key] = bytes(value)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            path = str(self._folder / MANIFEST_NAME)
            finding = Finding(f"{type(error).__name__}: {error}", path=path)
            raise CorruptCheckpointError("the database cannot be read", [finding]) from error
        return found

    def _entries(
        self, node: str, prefix: bytes, wanted: Sequence[bytes] | None, most_height: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The wanted entries below a node, in whose range all of ``wanted`` lie."""
        content = ts.ocdbt.dump(self._base, node).result()
        self.nodes.append(_extent(node, "btreenode", self._folder, self._known))
        entries, height = content["entries"], content["height"]
        if height > most_height:
            raise ValueError(f"node {node} is no part of a tree")
        if height == 0:
            asked_for = None if wanted is None or self._with_neighbours else set(wanted)
            for entry in entries:
                key = prefix + entry["key"]
                if asked_for is None or key in asked_for:
                    yield key.decode(), entry
            return
        firsts = [prefix + entry["key"] for entry in entries]
        bounds = [] if wanted is None else [*(bisect_left(wanted, f) for f in firsts), len(wanted)]
        for number, entry in enumerate(entries):
            below = prefix + entry["subtree_common_prefix"]
            part = None if wanted is None else wanted[bounds[number] : bounds[number + 1]]
            if part is None or part:
                yield from self._entries(entry["location"], below, part, height - 1)


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
