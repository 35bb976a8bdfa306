"""Files of safetensors and torch.save, looked into as if they were a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.partial_reads import PartialReads
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.mapping import StateDict
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.tools.convert import open_source
from dist_checkpointing.tools.convert.convert import SAFETENSORS, TORCH
from dist_checkpointing.tools.convert.file_targets import loadable, texts_for_safetensors
from dist_checkpointing.tools.convert.sources import Source
from dist_checkpointing.tools.convert.torch_file import TorchFileSource


def open_files(path: Path, *, trusted: bool = False) -> Checkpoint:
    """Open what ``convert`` converts from; ``backend`` is then what its ``to`` calls the format.

    Raises:
        CheckpointNotFoundError: if it is no such file.
        CheckpointingException: if it cannot be read.
    """
    source = open_source(path, trusted=trusted)
    name = TORCH if isinstance(source, TorchFileSource) else SAFETENSORS
    return _Files(source, CheckpointingConfig(name), _SourceReads(source, name, trusted=trusted))


def held_by(backend: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """What of a common state a format can hold: all of it, unless it is one of plain files."""
    if backend == SAFETENSORS:
        return dict(texts_for_safetensors(dict(common)))
    return loadable(dict(common))[0] if backend == TORCH else dict(common)


class _Files(Checkpoint):
    def __init__(self, source: Source, config: CheckpointingConfig, reads: _SourceReads) -> None:
        super().__init__(source.path, config, 0, trusted=reads.is_trusted)
        self._source = source
        self.__dict__["reads"] = reads  # fills the cached property

    def require_unchanged(self) -> None:
        self._source.check_unchanged()


class _SourceReads(PartialReads):
    """Reads single boxes of files that ``convert`` converts from."""

    def __init__(self, source: Source, name: str, *, trusted: bool) -> None:
        super().__init__(source.path, CheckpointingConfig(name), trusted=trusted)
        self.is_trusted = trusted
        self._source = source

    def index(self) -> Index:
        return self._source.index

    def boxes(
        self,
        index: Index,  # noqa: ARG002 - as in the base
        wanted: Sequence[tuple[StoredTensor, Box]],
    ) -> list[torch.Tensor]:
        return self._source.read([(stored.key, box) for stored, box in wanted])

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing: what opens the files has checked that."""

    def files(
        self,
        index: Index,  # noqa: ARG002 - as in the base
        chunks: Sequence[MetadataIndex],
    ) -> list[str | None]:
        return [None] * len(chunks)

    def location(self, index: Index, key: str, box: Box, number: int) -> str:  # noqa: ARG002
        return str(self._source.file_of(key))

    def object_grids(self, index: Index) -> Mapping[str, Ints]:  # noqa: ARG002
        return self._source.objects

    def object_cell(self, index: Index, key: str, shape: Ints, cell: Ints) -> Any:  # noqa: ARG002
        return self._source.object_cell(key, cell)

    def common(self) -> StateDict:
        return self._source.common
