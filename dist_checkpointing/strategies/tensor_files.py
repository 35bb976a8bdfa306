"""Files of tensors in the formats of other programs, read box by box as a checkpoint is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints, split_rows
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.storage.options import StorageOptions

_READERS = 4
"""So many boxes are read at a time, if each touches all that it may."""

_LEAST_BYTES = 2**16

TensorRow = tuple[str, DType, Ints]
"""Key, dtype and shape of a tensor in a file."""


class TensorFiles(ABC):
    """Mapped files that answer all that ``Checkpoint`` asks of its ``reads``. From any thread.

    Pages that were read count as memory of this process until their file is unmapped, and a column
    of a tensor touches all of its pages. So the files are mapped anew after so many bytes were
    touched.

    Attributes:
        backend: Name of the format, as ``convert(to=)`` takes it; ``kind`` says it in words.
        is_mapped: False if the content is in memory, and never read again.
        path: The file or folder; ``paths`` are all files.
        most_bytes: Bytes of the files that may be mapped at a time.
        options: Without meaning here; as that of ``PartialReads``.
        memory: Makes the tensors that are read into, as ``torch.empty`` does.
    """

    backend: ClassVar[str]
    kind: str
    is_mapped = True
    options: StorageOptions | None = None
    memory: Callable[..., torch.Tensor] = staticmethod(torch.empty)
    _index: Index

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        self._common: dict[Any, Any] = {}
        self._cells: Mapping[str, Mapping[Ints, Any]] = {}
        self._file_of: dict[str, Path] = {}
        self.path = path
        self.paths = tuple(paths)
        self.most_bytes: int = 32 * 2**20
        self._states = [_state(file) for file in paths]
        self._opened: dict[Path, Any] = {}
        self._touched_bytes = 0
        self._lock = threading.Lock()

    @abstractmethod
    def _open(self, file: Path) -> Any:
        """Map a file."""

    @abstractmethod
    def _copy(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Copy a box of a tensor out of its file."""

    def _set_index(self, rows: Iterable[TensorRow]) -> None:
        self._index = Index.of(StoredTensor.undivided(*row) for row in sorted(rows))

    def _content(self, file: Path) -> Any:
        """A file that is mapped already, or is now."""
        opened = self._opened
        if file not in opened:
            self.require_unchanged()
            opened.setdefault(file, self._open(file))
        return opened[file]

    def _touch(self, num_bytes: int) -> None:
        """Map the files anew before so many bytes of them are read, if many were read before.

        Readers hold what they have mapped until they are done, so this is half of what may be.
        """
        with self._lock:
            self._touched_bytes += num_bytes
            if self._touched_bytes > self.most_bytes // 2 and self.is_mapped:
                self._touched_bytes, self._opened = num_bytes, {}

    def index(self) -> Index:
        return self._index

    def boxes(
        self,
        index: Index,  # noqa: ARG002 - as PartialReads
        wanted: Sequence[tuple[StoredTensor, Box]],
    ) -> list[torch.Tensor]:
        """A new contiguous CPU tensor for each box of a tensor."""
        found = [self.memory(box.shape, dtype=stored.dtype.torch) for stored, box in wanted]
        most = max(self.most_bytes // _READERS, _LEAST_BYTES)
        for batch in in_batches(_parts(wanted, found, most), most):
            self._touch(sum(num_bytes for *_, num_bytes in batch))
            for key, box, out, _ in batch:
                self._copy(key, box, out)
        return found

    def common(self) -> dict[Any, Any]:
        return self._common

    def object_grids(self, index: Index) -> Mapping[str, Ints]:  # noqa: ARG002
        return {key: extents(cells) for key, cells in self._cells.items()}

    def object_cell(self, index: Index, key: str, shape: Ints, cell: Ints) -> Any:  # noqa: ARG002
        return self._cells[key][cell]

    def require_stored(  # noqa: B027 - not abstract
        self, claims: Sequence[StatedSize], index: Index
    ) -> None:
        """Nothing: opening the files has checked it."""

    def location(self, index: Index, key: str, box: Box, number: int) -> str:  # noqa: ARG002
        """The file or folder that holds a tensor."""
        return str(self._file_of.get(key, self.path))

    def require_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file is no longer the one that was opened."""
        findings = [
            Finding("changed or replaced", path=str(file), remedy="Start again.")
            for file, state in zip(self.paths, self._states, strict=True)
            if _state(file) != state
        ]
        if findings:
            raise CorruptCheckpointError("a file changed while it was read", findings)


def extents(cells: Iterable[Ints]) -> Ints:
    """The smallest grid with these cells."""
    return tuple(max(axis) + 1 for axis in zip(*cells, strict=True))


def _parts(
    wanted: Iterable[tuple[StoredTensor, Box]], found: Iterable[torch.Tensor], most_bytes: int
) -> Iterator[tuple[tuple[str, Box, torch.Tensor, int], int]]:
    """Boxes that touch at most so many bytes of a file in C order: key, box, copy and these bytes.

    A box touches whole rows, except along its first axes.
    """
    for (stored, box), out in zip(wanted, found, strict=True):
        shape, size = stored.global_shape, stored.dtype.itemsize
        cut = next((axis for axis, extent in enumerate(box.shape) if extent > 1), len(shape)) + 1
        rest = shape[cut:]
        touched = Box((*box.offset[:cut], *[0] * len(rest)), (*box.shape[:cut], *rest))
        num_bytes = touched.num_elements * size
        if num_bytes <= most_bytes:
            yield (stored.key, box, out, num_bytes), num_bytes
            continue
        for rows in split_rows(touched, most_bytes // size):
            part, num_bytes = rows.intersect(box), rows.num_elements * size
            if part is not None:
                target = out[part.relative_to(box.offset).slices()]
                yield (stored.key, part, target, num_bytes), num_bytes


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
