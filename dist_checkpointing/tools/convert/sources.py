"""What tensors are converted from: one shape for checkpoints and files of tensors."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.format.checksums import StoredPart, checksum_files, joined, read_table
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import Seal, check_config, check_files, read_seal
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.mapping.nesting import DictKey
from dist_checkpointing.mapping.nesting import Path as TreePath
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.options import ReadMode, StorageOptions
from dist_checkpointing.storage.protocol import StorageReader
from dist_checkpointing.strategies.planned import PlannedLoadStrategy
from dist_checkpointing.strategies.verification import damage_of_objects
from dist_checkpointing.tools.convert.verification import PartChecks, checks_of

STRIDED_BLOCK_BYTES = 16 * 2**20


class Source(ABC):
    """Tensors, objects and common state that can be read in part, from any thread.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
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

    def files(self) -> tuple[Path, ...]:
        """The paths that must not be written to while it is read."""
        return (self.path,)

    def check_unchanged(self) -> None:  # noqa: B027 - a hook
        """Raise CorruptCheckpointError if it is no longer what was opened."""

    def close(self) -> None:  # noqa: B027 - a hook
        """Let go of its files."""


class CheckpointSource(Source):
    """A committed checkpoint of any backend, Megatron's and torch DCP's included.

    Args:
        path: its folder.
        trusted: unpickle anything in it.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        super().__init__(path)
        self._checkpoint = Checkpoint.open(path, trusted=trusted)
        self._checks: PartChecks | None = None

    @property
    def kind(self) -> str:
        name, version = self._checkpoint.backend
        return f"checkpoint, {name} {version}"

    @property
    def index(self) -> Index:
        return self._checkpoint.index if self._planned is None else self._planned[2]

    @cached_property
    def objects(self) -> Mapping[str, Ints]:
        return {key: tuple(found.shape) for key, found in self._checkpoint.objects.items()}

    @property
    def common(self) -> dict[Any, Any]:
        return self._checkpoint.common

    def object_cell(self, key: str, cell: Ints) -> Any:
        return self._checkpoint.objects[key][cell]

    @cached_property
    def _planned(self) -> tuple[PlannedLoadStrategy, StorageReader, Index] | None:
        strategy = self._checkpoint.reads.sharded
        if not isinstance(strategy, PlannedLoadStrategy):
            return None
        strategy = copy.copy(strategy)
        # Threads are the caller's, and pages of a mapped file would count as memory in use.
        strategy.options = StorageOptions(
            threads=1, buffer_bytes=STRIDED_BLOCK_BYTES, read_mode=ReadMode.PREAD
        )
        reader = strategy.make_reader(self.path)
        reader.is_kept = True
        # Its own index, in which a reader may have noted more than there is in ours.
        return strategy, reader, reader.read_metadata()

    def checksums(self, keys: Collection[str]) -> PartChecks | None:
        seal = read_seal(self.path)
        if seal is not None and not seal.is_open:
            findings = self._damaged_files(seal)
            if findings:
                raise CorruptCheckpointError("the source is not what was saved", findings)
        return checks_of(self.path, self.index, keys)

    def _damaged_files(self, seal: Seal) -> list[Finding]:
        """What is wrong with common state, objects, and all that describes the tensors."""
        names = [file.name for file in seal.files.values() if file.digest is not None]
        findings = [*check_config(seal, self.path), *check_files(seal, self.path, names)]
        if findings or self._planned is None or not self._planned[2].objects:
            return findings
        _, reader, index = self._planned
        reader.set_up_storage_reader(index, rank=0, world_size=1)
        tables = [read_table(path) for path in checksum_files(self.path)]
        cells = [(key, cell) for key, handle in self._checkpoint.objects.items() for cell in handle]
        return damage_of_objects(cells, joined(tables).objects, reader)

    def verify_with(self, checks: PartChecks) -> None:
        self._checks = checks

    def read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        values = self._read(wanted)
        if self._checks is not None:
            self._checks.compare(wanted, values, self._read, self._location)
        return values

    def _read(self, wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        if self._planned is None:
            return self._checkpoint.read(wanted)
        strategy, reader, index = self._planned
        leaves = [_leaf(index, key, box) for key, box in wanted]
        paths: dict[TreePath, ShardedBase] = {
            (DictKey(number),): leaf for number, leaf in enumerate(leaves)
        }
        read(paths, index, strategy.planner, reader, SingleProcess())
        self.check_unchanged()
        return [leaf.data for leaf in leaves if leaf.data is not None]

    def _location(self, part: StoredPart) -> str:
        """Where a part lies, as exactly as that is known."""
        number = next(
            (
                number
                for number, chunk in enumerate(self._checkpoint[part.key].iter_chunks())
                if chunk.box.intersect(part.box) is not None
                and part.flat_range in (None, chunk.flat_range)
            ),
            None,
        )
        if number is None:
            return str(self.path)
        return self._checkpoint[part.key].location(number)

    def check_unchanged(self) -> None:
        if not self._checkpoint.is_committed:
            finding = Finding("deleted or overwritten", path=str(self.path), remedy="Start again.")
            message = "the checkpoint changed while it was converted"
            raise CorruptCheckpointError(message, [finding])


def _leaf(index: Index, key: str, box: Box) -> ShardedTensor:
    stored = index[key]
    data = torch.empty(box.shape, dtype=stored.dtype.torch)
    return ShardedTensor(key, data, data.dtype, box.shape, stored.global_shape, box.offset, None)


def require(condition: object, message: str, finding: Finding) -> None:
    """Raise CheckpointingException unless the condition holds."""
    if not condition:
        raise CheckpointingException(message, [finding])
