"""Reads safetensors files: one, or a folder of them as Hugging Face lays it out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.tools.convert.safetensors_format import (
    INDEX_SUFFIX,
    SUFFIX,
    Entry,
    read_header,
)
from dist_checkpointing.tools.convert.sources import Source, read_box

_MAX_INDEX_BYTES = 1 << 30


class SafetensorsSource(Source):
    """Safetensors files. The texts in their headers are its common state.

    Args:
        path: a file, an ``...index.json``, or a folder with an index or any safetensors files.

    Raises:
        CorruptCheckpointError: if a file is damaged, or files and index differ.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files, weight_map = _files(path)
        self._descriptors: dict[Path, int] = {}
        self._entries: dict[str, tuple[Entry, Path]] = {}
        self._texts: dict[str, str] = {}
        findings = []
        for file in self._files:
            header = read_header(file)
            self._texts |= header.metadata
            for entry in header.entries:
                if entry.key in self._entries:
                    findings.append(Finding("is in two files", entry.key, path=str(file)))
                self._entries[entry.key] = entry, file
        findings += [
            Finding("is not in the file that the index names", key, path=name)
            for key, name in weight_map.items()
            if key not in self._entries or self._entries[key][1].name != name
        ]
        if findings:
            raise CorruptCheckpointError("the files do not fit together", findings)
        self._index = Index.of(_stored(entry) for _, (entry, _) in sorted(self._entries.items()))
        for file in self._files:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def kind(self) -> str:
        count = len(self._files)
        return f"safetensors, {count} file{'s' if count != 1 else ''}"

    @property
    def index(self) -> Index:
        return self._index

    @property
    def common(self) -> dict[Any, Any]:
        # Says what wrote the file, which will not be true of the next one.
        return {name: text for name, text in self._texts.items() if name != "format"}

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        tensors = []
        for key, box in wanted:
            entry, file = self._entries[key]
            descriptor = self._descriptors[file]
            tensors.append(
                read_box(descriptor, entry.start, entry.shape, entry.dtype.torch, box, file)
            )
        return tensors

    def files(self) -> tuple[Path, ...]:
        return (self.path, *self._files)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _stored(entry: Entry) -> StoredTensor:
    chunk = tuple(max(1, extent) for extent in entry.shape)
    return StoredTensor(entry.key, entry.dtype, entry.shape, chunk)


def holds_safetensors(folder: Path) -> bool:
    """Whether a folder looks like one of safetensors files."""
    return any(folder.glob(f"*{SUFFIX}")) or any(folder.glob(f"*{INDEX_SUFFIX}"))


def _files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files, and which tensor the index says is in which."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
        if len(indices) > 1:
            listed = ", ".join(index.name for index in indices)
            finding = Finding("several indices", path=str(path), found=listed)
            raise CheckpointingException("name the index to convert", [finding])
        if not indices:
            return sorted(path.glob(f"*{SUFFIX}")), {}
        path = indices[0]
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], {}
    try:
        content = local.parse_json(local.read_bytes(path, _MAX_INDEX_BYTES))
        weight_map = dict(content["weight_map"])
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file outside its folder")
    except (json.JSONDecodeError, ValueError, KeyError, TypeError) as error:
        finding = Finding(f"{type(error).__name__}: {error}", path=str(path))
        raise CorruptCheckpointError("the index cannot be read", [finding]) from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        findings = [Finding("missing", path=str(path.parent / name)) for name in missing]
        raise CorruptCheckpointError("the index names files that are not there", findings)
    return [path.parent / name for name in names], weight_map
