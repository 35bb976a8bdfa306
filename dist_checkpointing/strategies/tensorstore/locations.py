"""Where in its data files a database keeps the value of each key.

TensorStore tells it itself (``ts.ocdbt.dump``), node by node of its tree. One look at the nodes
costs far less than one read a key, and lets values be read by many, in part, and in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.strategies.raw_chunks import Extent
from dist_checkpointing.strategies.tensorstore.database import MANIFEST_NAME

_MAX_HEIGHT = 64


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
    base = ts.KvStore.open({"driver": "file", "path": f"{checkpoint_dir}/"}).result()
    wanted = sorted(key.encode() for key in keys)
    known: dict[str, str] = {}
    found: dict[str, Extent | bytes] = {}
    try:
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
        if "location" not in root:
            return {}  # nothing in it
        entries = _entries(
            base, root["location"], b"", wanted, _MAX_HEIGHT, with_neighbours=with_neighbours
        )
        for key, entry in entries:
            value = entry.get("inline_value")
            if value is None:
                found[key] = _extent(entry["indirect_value"], checkpoint_dir, known)
            else:
                found[key] = bytes(value)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        path = str(checkpoint_dir / MANIFEST_NAME)
        finding = Finding(f"{type(error).__name__}: {error}", path=path)
        raise CorruptCheckpointError("the database cannot be read", [finding]) from error
    return found


def _entries(
    base: Any,
    node: str,
    prefix: bytes,
    wanted: Sequence[bytes],
    most_height: int,
    *,
    with_neighbours: bool,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The wanted entries below a node; ``wanted`` are sorted and lie in its range."""
    content = ts.ocdbt.dump(base, node).result()
    entries, height = content["entries"], content["height"]
    if height > most_height:
        raise ValueError(f"node {node} is no part of a tree")
    if height == 0:
        asked_for = set(wanted)
        for entry in entries:
            key = prefix + entry["key"]
            if with_neighbours or key in asked_for:
                yield key.decode(), entry
        return
    firsts = [prefix + entry["key"] for entry in entries]
    bounds = [bisect_left(wanted, first) for first in firsts] + [len(wanted)]
    for entry, begin, end in zip(entries, bounds, bounds[1:], strict=False):
        if begin < end:
            below = prefix + entry["subtree_common_prefix"]
            yield from _entries(
                base,
                entry["location"],
                below,
                wanted[begin:end],
                height - 1,
                with_neighbours=with_neighbours,
            )


def _extent(location: str, checkpoint_dir: Path, known: dict[str, str]) -> Extent:
    """What ``value:<folder>:<file>:<offset>:<length>`` says; the names are percent-encoded."""
    kind, folder, name, offset, length = location.split(":")
    place = f"{folder}:{name}"
    if place not in known:
        relative = PurePosixPath(unquote(folder) + unquote(name))
        if kind != "value" or relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"a value lies at {location}")
        known[place] = str(checkpoint_dir / relative)
    return Extent(known[place], int(offset), int(length))
