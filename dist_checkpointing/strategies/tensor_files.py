"""Files of tensors in the formats of other programs, read box by box as a checkpoint is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.format.dtypes import DType
from dist_checkpointing.format.geometry import Box, Ints, Window, split_rows, values_of_part
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import StateDict
from dist_checkpointing.planning import LoadItemType, LoadPlan, LoadPlanner, MetadataIndex, ReadItem
from dist_checkpointing.storage.interface import StorageReader, done
from dist_checkpointing.strategies.base import (
    KnownFormats,
    LoadCommonStrategy,
    PathOrStr,
    SaveCommonStrategy,
)
from dist_checkpointing.threads import in_threads

_READERS = 4
"""So many boxes are read at a time, if each touches all that it may."""

_LEAST_BYTES = 2**16

TensorRow = tuple[str, DType, Ints]
"""Key, dtype and shape of a tensor in a file."""


class TensorFiles(ABC):
    """Mapped files of tensors, objects and common state. Any thread may read.

    Pages that were read count as memory of this process until their file is unmapped, and a column
    of a tensor touches all of its pages. So the files are mapped anew after so many bytes were
    touched.

    Attributes:
        path: The file or folder; ``paths`` are all files.
        most_bytes: Bytes of the files that may be mapped at a time.
    """

    index: Index

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        self.common: dict[Any, Any] = {}
        self.cells: Mapping[str, Mapping[Ints, Any]] = {}
        self.file_of: dict[str, Path] = {}
        self.path = path
        self.paths: tuple[Path, ...] = tuple(paths)
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
        grids = {key: extents(cells) for key, cells in self.cells.items()}
        self.index = Index.of((StoredTensor.undivided(*row) for row in sorted(rows)), grids)

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
            if self._touched_bytes > self.most_bytes // 2:
                self._touched_bytes, self._opened = num_bytes, {}

    def fill(self, key: str, box: Box, out: torch.Tensor) -> None:
        """Copy a box of a tensor into a contiguous tensor on the CPU."""
        most = max(self.most_bytes // _READERS, _LEAST_BYTES)
        for part, num_bytes in _parts(self.index[key], box, most):
            self._touch(num_bytes)
            self._copy(key, part, out[part.relative_to(box.offset).slices()])

    def require_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file is no longer the one that was opened."""
        findings = [
            Finding("changed or replaced", path=str(file), remedy="Start again.")
            for file, state in zip(self.paths, self._states, strict=True)
            if _state(file) != state
        ]
        CorruptCheckpointError.raise_if(findings, "a file changed while it was read")


def extents(cells: Iterable[Ints]) -> Ints:
    """The smallest grid with these cells."""
    return tuple(max(axis) + 1 for axis in zip(*cells, strict=True))


def _parts(stored: StoredTensor, box: Box, most_bytes: int) -> Iterator[tuple[Box, int]]:
    """Boxes that touch at most so many bytes of a file in C order, and these bytes.

    A box touches whole rows, except along its first axes.
    """
    shape, size = stored.global_shape, stored.dtype.itemsize
    cut = next((axis for axis, extent in enumerate(box.shape) if extent > 1), len(shape)) + 1
    rest = shape[cut:]
    touched = Box((*box.offset[:cut], *[0] * len(rest)), (*box.shape[:cut], *rest))
    num_bytes = touched.num_elements * size
    if num_bytes <= most_bytes:
        yield box, num_bytes
        return
    for rows in split_rows(touched, most_bytes // size):
        if (part := rows.intersect(box)) is not None:
            yield part, rows.num_elements * size


class TensorFilesReader(StorageReader):
    """Reads boxes of tensors, and objects, out of ``TensorFiles``, which ``files_type`` opens."""

    has_checksums: ClassVar[bool] = False
    files_type: ClassVar[Callable[..., TensorFiles]]

    def reset(self, checkpoint_id: Any) -> None:
        # Copies of this reader share them.
        self._files = cache(lambda: self.files_type(checkpoint_id, trusted=self.trusted))

    def read_metadata(self) -> Index:
        return self._files().index

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing: opening the files has checked it."""

    def location(self, chunk: MetadataIndex) -> str:
        files = self._files()
        return str(files.file_of.get(chunk.fqn, files.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files = self._files()
        files.most_bytes = self.options.buffer_bytes

        def read(item: ReadItem) -> None:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.apply_bytes(item, files.cells[key][item.storage_index.offset or ()])
                return
            stored = files.index[key]
            for part in item.parts(max(1, files.most_bytes // stored.dtype.itemsize)):
                values = torch.empty(part.lengths, dtype=stored.dtype.torch)
                _fill_window(files, stored, part.storage, values)
                planner.apply_tensor(part, values)
                self.report(values.nbytes)

        in_threads(read, plan.items, self.options.threads)
        return done(None)


def _fill_window(
    files: TensorFiles, stored: StoredTensor, window: Window, values: torch.Tensor
) -> None:
    """Copy a window of a tensor, or of a run of its elements."""
    shape = stored.global_shape
    if window.start == 0 and window.shape == shape:
        files.fill(stored.key, window.box, values)
        return
    run = torch.empty(window.array_size, dtype=values.dtype)
    ends = (window.start, window.start + window.array_size)
    for box, part in values_of_part(Box.whole(shape), ends, run):
        files.fill(stored.key, box, part)
    values.copy_(run.reshape(window.shape)[window.box.slices()].reshape(values.shape))


class NoCommonFiles(SaveCommonStrategy):
    """Writes nothing: the files of the tensors hold the common state, as far as they can."""

    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: PathOrStr
    ) -> Sequence[SealedFile]:
        return []


class TensorFilesCommonStrategy(KnownFormats, LoadCommonStrategy):
    """Reads what files hold beside tensors and objects."""

    files_type: ClassVar[Callable[..., TensorFiles]]

    def load_common(self, checkpoint_dir: PathOrStr) -> StateDict:
        return self.files_type(as_local_folder(checkpoint_dir), trusted=self.trusted).common


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
