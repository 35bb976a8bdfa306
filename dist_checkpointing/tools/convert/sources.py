"""What tensors are converted from: one shape for checkpoints and files of tensors."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.verify_checkpoint import stored_objects_damage
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import (
    StoredPart,
    checksum_files,
    concatenate_tables,
    read_table,
)
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import Seal, check_config, check_files, read_seal
from dist_checkpointing.storage.options import ReadMode, StorageOptions
from dist_checkpointing.strategies.verification import stored_chunk
from dist_checkpointing.tools.convert.verification import PartChecks, checks_of

STRIDED_BLOCK_BYTES = 16 * 2**20

Content = TypeVar("Content")


class Source(ABC):
    """Tensors, objects and common state that can be read in part, from any thread.

    Attributes:
        path: Path of the source.
    """

    def __init__(self, path: Location) -> None:
        self.path = path

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, in words."""

    @property
    @abstractmethod
    def index(self) -> Index:
        """Its tensors and how each is cut."""

    @property
    def objects(self) -> Mapping[str, Ints]:
        """The grids of its sharded objects."""
        return {}

    @property
    def common(self) -> dict[Any, Any]:
        """Everything else."""
        return {}

    @abstractmethod
    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """A new contiguous CPU tensor for each box of a tensor."""

    def object_cell(self, key: str, cell: Ints) -> Any:
        """The value of one cell of a sharded object."""
        raise KeyError(f"{self.path} holds no object {key!r} with a cell {cell}")

    def checksums(self, keys: Collection[str]) -> PartChecks | None:  # noqa: ARG002 - a hook
        """What it knows of the values of some tensors; None if it keeps no checksums."""
        return None

    def verify_with(self, checks: PartChecks) -> None:  # noqa: B027 - a hook
        """Compare from now on what is read with checksums of its own."""

    def limit_mapped(self, most_bytes: int) -> None:  # noqa: B027 - a hook
        """Map files again after so many bytes were read of them."""

    def files(self) -> tuple[Location, ...]:
        """The paths that must not be written to while it is read."""
        return (self.path,)

    def file_of(self, key: str) -> Location:  # noqa: ARG002 - a hook
        """The file or folder that holds a tensor."""
        return self.path

    def check_unchanged(self) -> None:  # noqa: B027 - a hook
        """Raise CorruptCheckpointError if it is no longer what was opened."""

    def close(self) -> None:  # noqa: B027 - a hook
        """Let go of its files."""


class CheckpointSource(Source):
    """A committed checkpoint of any backend, Megatron's and torch DCP's included."""

    def __init__(self, path: Location, *, trusted: bool = False) -> None:
        super().__init__(path)
        self._checkpoint = Checkpoint.open(path, trusted=trusted)
        self._folder = self._checkpoint.folder
        # Threads are the caller's, and pages of a mapped file would count as memory in use.
        self._checkpoint.reads.options = StorageOptions(
            threads=1, buffer_bytes=STRIDED_BLOCK_BYTES, read_mode=ReadMode.PREAD
        )
        self._checks: PartChecks | None = None

    @property
    def kind(self) -> str:
        name, version = self._checkpoint.backend
        return f"checkpoint, {name} {version}"

    @property
    def index(self) -> Index:
        return self._checkpoint.index

    @cached_property
    def objects(self) -> Mapping[str, Ints]:
        return {key: tuple(found.shape) for key, found in self._checkpoint.objects.items()}

    @property
    def common(self) -> dict[Any, Any]:
        return self._checkpoint.common

    def object_cell(self, key: str, cell: Ints) -> Any:
        return self._checkpoint.objects[key][cell]

    def checksums(self, keys: Collection[str]) -> PartChecks | None:
        seal = read_seal(self._folder)
        if seal is not None and not seal.is_open:
            findings = self._damaged_files(seal)
            if findings:
                raise CorruptCheckpointError("the source is not what was saved", findings)
        return checks_of(self._folder, self.index, keys)

    def _damaged_files(self, seal: Seal) -> list[Finding]:
        """What is wrong with common state, objects, and all that describes the tensors."""
        names = [file.name for file in seal.files.values() if file.digest is not None]
        findings = [*check_config(seal, self._folder), *check_files(seal, self._folder, names)]
        if findings:
            return findings
        tables = (read_table(path) for path in checksum_files(self._folder))
        return stored_objects_damage(self._checkpoint, concatenate_tables(tables).objects)

    def verify_with(self, checks: PartChecks) -> None:
        self._checks = checks

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        values = self._checkpoint.read(wanted)
        if self._checks is not None:
            self._checks.compare(wanted, values, self._checkpoint.read, self._location)
        return values

    def _location(self, part: StoredPart) -> str:
        """Where a part lies, as exactly as that is known."""
        index = self._checkpoint.index
        number = stored_chunk(part, index).index or 0
        return self._checkpoint.reads.location(index, part.key, part.box, number)

    def check_unchanged(self) -> None:
        self._checkpoint.require_unchanged()


class MappedSource(Source, Generic[Content]):
    """What a library makes of mapped files, made again after so many bytes were read of it.

    Pages that were read count as memory of this process until their file is unmapped. That happens
    when the last reader of the old content has ended.

    Attributes:
        most_bytes: Bytes to read before the files are mapped again.
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
    def _copy(self, content: Content, key: str, box: Box) -> torch.Tensor:
        """A new contiguous tensor with a box of a tensor in the mapped files."""

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
        return [self._copy(content, key, box) for key, box in wanted]

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


def require(condition: object, message: str, finding: Finding) -> None:
    """Raise CheckpointingException unless the condition holds."""
    if not condition:
        raise CheckpointingException(message, [finding])
