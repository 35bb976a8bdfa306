"""Reads files of torch.save without loading them: tensors are looked up in the mapped file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

import torch

from dist_checkpointing.errors import Finding
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.mapping.nesting import MISSING, DictKey, flatten, unflatten_part
from dist_checkpointing.mapping.nesting import Path as TreePath
from dist_checkpointing.strategies.safe_pickle import deserialize_file
from dist_checkpointing.tools.convert.sources import Source, read_box, require

COMMON_KEY: Final = "__common__"
"""Where a file that was converted from a checkpoint keeps the common state."""

OBJECTS_KEY: Final = "__objects__"
"""Likewise, of the sharded objects: ``{key: {cell: value}}``."""

_ONLY_KEY = "tensor"


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A range of addresses, and where in the file it begins."""

    start: int
    stop: int
    offset: int


def mappings_of(path: Path) -> list[_Mapping]:
    """Where in the memory of this process a file is mapped."""
    found = path.stat()
    file = (f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", str(found.st_ino))
    name = os.path.realpath(path)
    mappings = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, _, offset, device, inode, *rest = line.split(None, 5)
        # A stacked file system shows another device and inode here than to stat.
        if (device, inode) == file or rest == [name]:
            start, stop = (int(number, 16) for number in addresses.split("-"))
            mappings.append(_Mapping(start, stop, int(offset, 16)))
    return mappings


def place_in_file(tensor: torch.Tensor, mappings: Sequence[_Mapping]) -> int | None:
    """Where in a mapped file the values of a tensor lie in C order; None if they do not."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    address = tensor.data_ptr()
    for mapping in mappings:
        if mapping.start <= address and address + tensor.nbytes <= mapping.stop:
            return address - mapping.start + mapping.offset
    return None


class TorchFileSource(Source):
    """A file of torch.save: its tensors by path, joined by dots; the rest is common state.

    Args:
        path: the file.
        trusted: unpickle anything in it.
        most_bytes: size of a file that may be loaded as a whole, if it must.

    Attributes:
        cells: the sharded objects, cell by cell.

    Raises:
        UnsupportedFormatError: if it holds more than plain data and is not trusted.
        CorruptCheckpointError: if it is damaged.
    """

    def __init__(self, path: Path, *, trusted: bool = False, most_bytes: int) -> None:
        super().__init__(path)
        is_mapped = is_zipfile(path)
        size = path.stat().st_size
        require(
            is_mapped or size <= most_bytes,
            "the file is of before PyTorch 1.6 and can only be read as a whole",
            Finding(
                "larger than the memory budget",
                expected=f"at most {most_bytes} bytes",
                found=size,
                remedy="Load it and torch.save it again, or allow more memory.",
            ),
        )
        content = deserialize_file(path, trusted=trusted, maps_file=is_mapped)
        self.cells: dict[str, dict[Ints, Any]] = {}
        self._tensors, self._common = self._sorted_out(content)
        mappings = mappings_of(path) if is_mapped else []
        self._places = {key: place_in_file(t, mappings) for key, t in self._tensors.items()}
        self._index = Index.of(_stored(key, t) for key, t in sorted(self._tensors.items()))
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _sorted_out(self, content: Any) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
        common: dict[Any, Any] = {}
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
            self.cells = content[OBJECTS_KEY]
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
        return tensors, common | ({} if plain is MISSING else plain)

    @property
    def kind(self) -> str:
        return "torch.save file"

    @property
    def index(self) -> Index:
        return self._index

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

    def place(self, key: str) -> int | None:
        """Where in the file the values of a tensor lie in C order; None if they do not."""
        return self._places[key]

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        return [self._read(key, box) for key, box in wanted]

    def _read(self, key: str, box: Box) -> torch.Tensor:
        tensor, place = self._tensors[key], self._places[key]
        if place is None:  # a view of another tensor, or a file that could not be mapped
            return tensor[box.slices()].clone(memory_format=torch.contiguous_format)
        shape = tuple(tensor.shape)
        return read_box(self._descriptor, place, shape, tensor.dtype, box, self.path)

    def close(self) -> None:
        self._tensors.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
    """Whether a leaf is a tensor with a dtype of ours; others stay in the common state."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return any(leaf.dtype is row.torch for row in dtypes.DTYPES) and not leaf.is_meta


def _stored(key: str, tensor: torch.Tensor) -> StoredTensor:
    shape = tuple(tensor.shape)
    chunk = tuple(max(1, extent) for extent in shape)
    return StoredTensor(key, dtypes.from_torch(tensor.dtype), shape, chunk)
