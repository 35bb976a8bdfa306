"""Files of tensors in the formats of other programs, read box by box as a checkpoint is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor

Content = TypeVar("Content")
TensorRow = tuple[str, DType, Ints]
"""Key, dtype and shape of a tensor in a file."""


class TensorFiles(ABC, Generic[Content]):
    """Mapped files that answer all that ``Checkpoint`` asks of its ``reads``. From any thread.

    Pages that were read count as memory of this process until their file is unmapped. So the files
    are mapped again after so many bytes, and the old content goes with its last reader.

    Attributes:
        backend: Name of the format, as ``convert(to=)`` takes it.
        kind: What it is, in words.
        is_mapped: False if the content is in memory, and never read again.
        path: The file or folder.
        paths: All files.
        most_bytes: Bytes to read before the files are mapped again.
    """

    backend: ClassVar[str]
    kind: str
    is_mapped = True
    _index: Index

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        self.path = path
        self.paths = tuple(paths)
        self.most_bytes: float = 32 * 2**20
        self._states = [_state(file) for file in paths]
        self._lock = threading.Lock()
        self._content: Content | None = None
        self._read_bytes = 0

    @abstractmethod
    def _open(self) -> Content:
        """Map the files."""

    @abstractmethod
    def _copy(self, content: Content, key: str, box: Box) -> torch.Tensor:
        """A new contiguous tensor with a box of a tensor in the mapped files."""

    def _mapped(self, num_bytes: int) -> Content:
        """The content from which to read the next ``num_bytes``."""
        with self._lock:
            is_used_up = self.is_mapped and self._read_bytes >= self.most_bytes
            if self._content is None or is_used_up:
                self._content = None  # not held while it is made again
                self.require_unchanged()
                self._content = self._open()
                self._read_bytes = 0
            self._read_bytes += num_bytes
            return self._content

    def index(self) -> Index:
        """The tensors."""
        return self._index

    def boxes(
        self,
        index: Index,  # noqa: ARG002 - as PartialReads
        wanted: Sequence[tuple[StoredTensor, Box]],
    ) -> list[torch.Tensor]:
        """A new contiguous CPU tensor for each box of a tensor."""
        content = self._mapped(sum(box.num_elements * row.dtype.itemsize for row, box in wanted))
        return [self._copy(content, stored.key, box) for stored, box in wanted]

    def common(self) -> dict[Any, Any]:
        """Everything that is neither a tensor nor a sharded object."""
        return {}

    def object_grids(self, index: Index) -> Mapping[str, Ints]:  # noqa: ARG002
        """The grids of the sharded objects."""
        return {}

    def object_cell(self, index: Index, key: str, shape: Ints, cell: Ints) -> Any:  # noqa: ARG002
        """The value of one cell of a sharded object."""
        raise KeyError(key)

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing: opening the files has checked it."""

    def location(self, index: Index, key: str, box: Box, number: int) -> str:  # noqa: ARG002
        """The file or folder that holds a tensor."""
        return str(self.path)

    def require_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file is no longer the one that was opened."""
        findings = [
            Finding("changed or replaced", path=str(file), remedy="Start again.")
            for file, state in zip(self.paths, self._states, strict=True)
            if _state(file) != state
        ]
        if findings:
            raise CorruptCheckpointError("a file changed while it was read", findings)


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
