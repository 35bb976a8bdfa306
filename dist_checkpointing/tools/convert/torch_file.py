"""Reads files of torch.save without loading them: slices of tensors in the mapped file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import torch

from dist_checkpointing.errors import Finding
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.nested_dicts import MISSING, DictKey, flatten, unflatten_part
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.strategies.safe_pickle import deserialize_file
from dist_checkpointing.tools.convert.sources import MappedSource, require

COMMON_KEY: Final = "__common__"
"""Where a file that was converted from a checkpoint keeps the common state."""

OBJECTS_KEY: Final = "__objects__"
"""Likewise, of the sharded objects: ``{key: {cell: value}}``."""

_ONLY_KEY = "tensor"


@dataclass(frozen=True, slots=True, eq=False)
class _FileContent:
    """What a file holds: tensors by path, sharded objects cell by cell, and the rest."""

    tensors: dict[str, torch.Tensor]
    cells: dict[str, dict[Ints, Any]]
    common: dict[Any, Any]


class TorchFileSource(MappedSource[_FileContent]):
    """A file of torch.save: its tensors by path, joined by dots; the rest is common state.

    Args:
        path: the file.
        trusted: unpickle anything in it, each time that it is mapped.
        most_bytes: size of a file that may be loaded as a whole, if it must.

    Attributes:
        cells: The sharded objects, cell by cell.

    Raises:
        UnsupportedFormatError: if it holds more than plain data and is not trusted.
        CorruptCheckpointError: if it is damaged.
    """

    def __init__(self, path: Path, *, trusted: bool = False, most_bytes: int) -> None:
        super().__init__(path, [path])
        self._is_mapped = is_zipfile(path)
        size = path.stat().st_size
        require(
            self._is_mapped or size <= most_bytes,
            "the file is of before PyTorch 1.6 and can only be read as a whole",
            Finding(
                "larger than the memory budget",
                expected=f"at most {most_bytes} bytes",
                found=size,
                remedy="Load it and torch.save it again, or allow more memory.",
            ),
        )
        self._trusted = trusted
        if not self._is_mapped:
            self.most_bytes: float = math.inf
        content = self._mapped(0)
        self.cells, self._common = content.cells, content.common
        self._index = Index.of(
            StoredTensor.undivided(key, tensor_memory.from_torch(tensor.dtype), tensor.shape)
            for key, tensor in sorted(content.tensors.items())
        )

    def _open(self) -> _FileContent:
        content = deserialize_file(
            Path(self.path), trusted=self._trusted, maps_file=self._is_mapped
        )
        common: dict[Any, Any] = {}
        cells: dict[str, dict[Ints, Any]] = {}
        if isinstance(content, torch.Tensor):
            content = {_ONLY_KEY: content}
        require(
            isinstance(content, dict),
            "not a file of tensors",
            Finding("expected a dict", found=type(content).__name__, path=str(self.path)),
        )
        if isinstance(content.get(COMMON_KEY), dict):
            common = content[COMMON_KEY]
        taken = {COMMON_KEY} if common else set()
        if _are_objects(content.get(OBJECTS_KEY)):
            cells = content[OBJECTS_KEY]
            taken.add(OBJECTS_KEY)
        own = {key: value for key, value in content.items() if key not in taken}
        leaves, skeleton = flatten(own)
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[TreePath, Any] = {}
        for path, leaf in leaves.items():
            if not can_be_stored(leaf):
                rest[path] = leaf
                continue
            key = ".".join(str(s.key if isinstance(s, DictKey) else s.index) for s in path)
            finding = Finding("two tensors have this path", key, path=str(self.path))
            require(key not in tensors, "tensors cannot be told apart", finding)
            tensors[key] = leaf.detach()
        plain = unflatten_part(skeleton, rest)
        return _FileContent(tensors, cells, common | ({} if plain is MISSING else plain))

    @property
    def kind(self) -> str:
        return "torch.save file"

    @property
    def objects(self) -> Mapping[str, Ints]:
        return {
            key: tuple(max(axis) + 1 for axis in zip(*cells, strict=True))
            for key, cells in self.cells.items()
        }

    @property
    def common(self) -> dict[Any, Any]:
        return self._common

    def object_cell(self, key: str, cell: Ints) -> Any:
        return self.cells[key][cell]

    def _copy(self, content: _FileContent, key: str, box: Box) -> torch.Tensor:
        view = content.tensors[key][box.slices()]
        return view.clone(memory_format=torch.contiguous_format)

    def limit_mapped(self, most_bytes: int) -> None:
        if self._is_mapped:
            super().limit_mapped(most_bytes)


def _are_objects(value: object) -> bool:
    """Whether a value is what ``OBJECTS_KEY`` holds: full grids of cells by key."""
    if not isinstance(value, dict):
        return False
    for key, cells in value.items():
        if not isinstance(key, str) or not isinstance(cells, dict) or not cells:
            return False
        if not all(isinstance(c, tuple) and all(type(i) is int for i in c) for c in cells):
            return False
        if len({len(cell) for cell in cells}) != 1 or min(min(c, default=0) for c in cells) < 0:
            return False
        extents = [max(axis) + 1 for axis in zip(*cells, strict=True)]
        if math.prod(extents) != len(cells):
            return False
    return True


def can_be_stored(leaf: object) -> bool:
    """Whether a leaf is a tensor that a checkpoint can hold; others stay in the common state."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return any(leaf.dtype is row.torch for row in tensor_memory.DTYPES) and not leaf.is_meta
