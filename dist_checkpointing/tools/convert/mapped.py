"""Files that a library maps into memory, mapped again from time to time."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index
from dist_checkpointing.tools.convert.sources import Source

Content = TypeVar("Content")


class MappedSource(Source, Generic[Content]):
    """What a library makes of mapped files, made again after so many bytes were read of it.

    Pages that were read count as memory of this process until their file is unmapped. That happens
    when the last reader of the old content has ended.

    Args:
        path: see ``Source``.
        files: the files that are mapped.

    Attributes:
        most_bytes: bytes to read before the files are mapped again.
    """

    _index: Index

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        super().__init__(path)
        self.most_bytes: float = 32 * 2**20
        self._files = tuple(files)
        self._states = [_state(file) for file in self._files]
        self._lock = threading.Lock()
        self._content: Content | None = None
        self._read_bytes = 0

    @abstractmethod
    def _open(self) -> Content:
        """Map the files."""

    @abstractmethod
    def _view(self, content: Content, key: str, box: Box) -> torch.Tensor:
        """A box of a tensor in the mapped files."""

    def _mapped(self, num_bytes: int) -> Content:
        """The content from which to read the next ``num_bytes``. From any thread."""
        with self._lock:
            if self._content is None or self._read_bytes >= self.most_bytes:
                self._content = None  # not held while it is made again
                self.check_unchanged()
                self._content = self._open()
                self._read_bytes = 0
            self._read_bytes += num_bytes
            return self._content

    @property
    def index(self) -> Index:
        return self._index

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        itemsizes = {key: self._index[key].dtype.itemsize for key, _ in wanted}
        content = self._mapped(sum(box.num_elements * itemsizes[key] for key, box in wanted))
        views = (self._view(content, key, box) for key, box in wanted)
        return [view.clone(memory_format=torch.contiguous_format) for view in views]

    def limit_mapped(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def check_unchanged(self) -> None:
        findings = [
            Finding("changed or replaced", path=str(file), remedy="Start again.")
            for file, state in zip(self._files, self._states, strict=True)
            if _state(file) != state
        ]
        if findings:
            raise CorruptCheckpointError("a file changed while it was converted", findings)

    def close(self) -> None:
        self._content = None


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
