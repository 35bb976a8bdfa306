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


def locate(checkpoint_dir: Path, keys: Collection[str]) -> dict[str, Extent | bytes]:
    """Where the values of ``keys`` are, or the values themselves if the tree holds them.

    Keys that the database does not have are left out.

    Raises:
        CorruptCheckpointError: if the database cannot be read, or points out of the checkpoint.
    """
    return _read(checkpoint_dir, sorted(key.encode() for key in keys), [])


def survey(checkpoint_dir: Path) -> Survey:
    """What the database holds, and where; nothing if there is no database.

    Raises:
        CorruptCheckpointError: as ``locate``.
    """
    if not (checkpoint_dir / MANIFEST_NAME).exists():
        return Survey({}, frozenset())
    nodes: list[Extent] = []
    values = _read(checkpoint_dir, None, nodes)
    extents = [*nodes, *(value for value in values.values() if isinstance(value, Extent))]
    paths = {extent.path for extent in extents}
    return Survey(values, frozenset(str(Path(p).relative_to(checkpoint_dir)) for p in paths))


def _read(
    checkpoint_dir: Path, wanted: Sequence[bytes] | None, nodes: list[Extent]
) -> dict[str, Extent | bytes]:
    base = ts.KvStore.open({"driver": "file", "path": f"{checkpoint_dir}/"}).result()
    known: dict[str, str] = {}
    found: dict[str, Extent | bytes] = {}
    visited: list[str] = []
    try:
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
        if "location" not in root:
            return {}  # nothing in it
        for key, entry in _entries(base, root["location"], b"", wanted, visited, _MAX_HEIGHT):
            value = entry.get("inline_value")
            if value is None:
                found[key] = _extent(entry["indirect_value"], "value", checkpoint_dir, known)
            else:
                found[key] = bytes(value)
        nodes += [_extent(node, "btreenode", checkpoint_dir, known) for node in visited]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        path = str(checkpoint_dir / MANIFEST_NAME)
        finding = Finding(f"{type(error).__name__}: {error}", path=path)
        raise CorruptCheckpointError("the database cannot be read", [finding]) from error
    return found


def _entries(
    base: Any,
    node: str,
    prefix: bytes,
    wanted: Sequence[bytes] | None,
    visited: list[str],
    most_height: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The wanted entries below a node; ``wanted`` are sorted and lie in its range, None for all."""
    content = ts.ocdbt.dump(base, node).result()
    visited.append(node)
    entries, height = content["entries"], content["height"]
    if height > most_height:
        raise ValueError(f"node {node} is no part of a tree")
    if height == 0:
        asked_for = None if wanted is None else set(wanted)
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
            yield from _entries(base, entry["location"], below, part, visited, height - 1)


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
