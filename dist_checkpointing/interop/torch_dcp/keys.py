"""DCP's names for the values of a state dict, and their paths in it.

DCP flattens: its checkpoint is a dict of names. We keep the nesting of common state. DCPWriter
writes the path of each name into ``.dckpt/dcp.json``; in checkpoints without that file, the names
follow from the nesting, by DCP's rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.strategies.torch_dist.reader import ABSENT, nested

DCP_KEYS_NAME = ".dckpt/dcp.json"
_FORMAT = "dist_checkpointing.dcp_keys"
_MAX_BYTES = 1 << 32

KeyPath = tuple[str | int, ...]
"""Steps into dicts (texts) and lists (numbers)."""


@dataclass(frozen=True, slots=True)
class DCPKeys:
    """The names of a DCP checkpoint.

    Attributes:
        paths: Path of each name in the nested state dict, of tensors and of other values.
        values: Names of the values that are not tensors.
        raw: Names of the values whose bytes ``torch.load`` does not read; stored as bytes.
    """

    paths: Mapping[str, KeyPath]
    values: tuple[str, ...]
    raw: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, names: Iterable[str], values: Iterable[str], raw: Iterable[str], planner_data: object
    ) -> DCPKeys:
        """The names of a save.

        Args:
            names: all names.
            values: names of the values that are not tensors.
            raw: names of the values with bytes in a format of their own.
            planner_data: paths by name, as DCP's default planner has them. If the planner has
                anything else here, every name becomes a key of the outermost dict.
        """
        noted = planner_data if isinstance(planner_data, Mapping) else {}
        paths = {name: _path(noted.get(name)) or (name,) for name in names}
        if not _fit_together(paths.values()):
            paths = {name: (name,) for name in paths}
        return cls(paths, tuple(values), tuple(raw))

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values at their paths; in lists, None replaces a tensor."""
        return nested({path: values.get(name, ABSENT) for name, path in self.paths.items()})

    def values_in(self, common: Any) -> dict[str, Any]:
        """The inverse of ``nest``.

        Raises:
            KeyError, IndexError, TypeError: if a value is missing.
        """
        found = {}
        for name in self.values:
            value = common
            for step in self.paths[name]:
                value = value[step]
            found[name] = value
        return found

    def write(self, folder: Path, durability: local_folder.Durability) -> None:
        """Write the file, atomically."""
        content = {
            "format": _FORMAT,
            "paths": {name: list(path) for name, path in self.paths.items()},
            "values": self.values,
            "raw": self.raw,
        }
        path = folder / DCP_KEYS_NAME
        path.parent.mkdir(exist_ok=True)
        local_folder.write_atomic(
            path, json.dumps(content, separators=(",", ":")).encode(), durability
        )

    @classmethod
    def read(cls, folder: Location) -> DCPKeys | None:
        """The names in the file of a checkpoint; None if it has no such file.

        Raises:
            CorruptCheckpointError: if the file is damaged.
        """
        path = folder / DCP_KEYS_NAME
        if not location.is_file(path):
            return None
        with local_folder.parsing("DCP's names cannot be read", path):
            content = location.read_json(path, _MAX_BYTES)
            paths = {name: _path(steps) for name, steps in content["paths"].items()}
            values, raw = (tuple(content[name]) for name in ("values", "raw"))
            if content["format"] != _FORMAT or None in paths.values():
                raise ValueError("not the names of a DCP checkpoint")
            if not paths.keys() >= {*values} >= {*raw}:
                raise ValueError("values without a path")
        return cls({name: steps for name, steps in paths.items() if steps}, values, raw)


def dcp_names_in(
    common: Mapping[Any, Any], tensors: Iterable[str]
) -> dict[str, tuple[KeyPath, Any]]:
    """Path and value of everything in common state, by the name that DCP would give it.

    Args:
        common: common state of a checkpoint that DCP has not written.
        tensors: keys of its tensors. A list that held one counts as flattened; None replaces the
            tensor there.

    Raises:
        UnsupportedFormatError: if two values have one name.
    """
    above: set[str] = set()
    for key in tensors:
        parts = key.split(".")
        above.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    found: dict[str, tuple[KeyPath, Any]] = {}
    findings = []
    for path, value in _walk(common, (), above):
        name = ".".join(map(str, path))
        if name in found:
            places = f"{found[name][0]} and {path}"
            remedy = "Load it with dist_checkpointing.load, which distinguishes them."
            findings.append(Finding("two values have this name", name, None, places, remedy=remedy))
        found[name] = path, value
    if findings:
        raise UnsupportedFormatError("in DCP, a name belongs to one value", findings)
    return found


def _walk(value: Any, path: KeyPath, above: set[str]) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _walk(child, (*path, str(key)), above)
        return
    name = ".".join(map(str, path))
    if isinstance(value, list) and _is_opened(value, name, above):
        for index, child in enumerate(value):
            if child is not None or f"{name}.{index}" not in above:
                yield from _walk(child, (*path, index), above)
        return
    yield path, value


def _is_opened(value: list[Any], name: str, above: set[str]) -> bool:
    return any(
        isinstance(child, Mapping)
        or f"{name}.{index}" in above
        or (isinstance(child, list) and _is_opened(child, f"{name}.{index}", above))
        for index, child in enumerate(value)
    )


def _path(steps: object) -> KeyPath | None:
    if not isinstance(steps, list | tuple) or not steps:
        return None
    # A number is a position in a list. A limit keeps a hostile file from asking for a huge list.
    fits = all(type(s) is str or (type(s) is int and 0 <= s < 1 << 24) for s in steps)
    return tuple(steps) if fits else None


def _fit_together(paths: Iterable[KeyPath]) -> bool:
    """Whether no path is the beginning of another, and no container is both a list and a dict."""
    leaves = list(paths)
    kinds: dict[KeyPath, type] = {(): str}  # the outermost container is a dict
    for path in leaves:
        for depth, step in enumerate(path):
            if kinds.setdefault(path[:depth], type(step)) is not type(step):
                return False
    return len(set(leaves)) == len(leaves) and not kinds.keys() & set(leaves)
