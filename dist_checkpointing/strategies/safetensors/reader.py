"""Reads boxes of tensors out of the files of a model, straight into the destination."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index, StatedSize, StoredTensor
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex
from dist_checkpointing.planning.load_plan import stored_bytes
from dist_checkpointing.storage.interface import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies.chunk_reads import ChunkReads, Filler, read_chunks, read_single
from dist_checkpointing.strategies.safetensors import model_files
from dist_checkpointing.threads import in_threads


class SafetensorsReader(StorageReader):
    """Reads safetensors files: each tensor is one chunk, read as that of any backend."""

    has_checksums: ClassVar[bool] = False
    _index: Index = Index.of([])

    def reset(self, checkpoint_id: Any) -> None:
        self._source = checkpoint_id
        self.checkpoint_dir: Any = checkpoint_id
        if not location.is_folder(checkpoint_id):
            self.checkpoint_dir = checkpoint_id.parent

    def set_up_storage_reader(self, metadata: Index, **_: object) -> None:
        self._index = metadata

    @cached_property
    def texts(self) -> dict[str, str]:
        """The texts in the headers, but for what says which program wrote the file."""
        texts = {name: text for found, _ in self._headers.values() for name, text in found.items()}
        texts.pop("format", None)
        return texts

    @cached_property
    def _headers(self) -> dict[str, tuple[dict[str, str], dict[str, model_files.StoredValue]]]:
        """What the header of each file says."""
        model = model_files.ModelFolder.of(self._source)
        found = in_threads(self._header, model.names, self.files.limits.run_threads)
        headers = dict(zip(model.names, found, strict=True))
        files: dict[str, str] = {}
        findings = []
        for name, (_, tensors) in headers.items():
            for key in tensors:
                if key in files:
                    findings.append(Finding("is in two files", key, path=f"{model.folder}/{name}"))
                files[key] = name
        findings += [
            Finding("is not in the file that the index names", key, path=name)
            for key, name in model.weight_map.items()
            if files.get(key) != name
        ]
        CorruptCheckpointError.raise_if(findings, "the files do not fit together")
        return headers

    def _header(self, name: str) -> tuple[dict[str, str], dict[str, model_files.StoredValue]]:
        path = f"{self.checkpoint_dir}/{name}"
        damage = local_folder.parsing("not a safetensors file", path, remedy="Fetch it again.")
        with damage, self.files.open(name) as file:
            num_bytes = self.files.size_of(name) or 0
            try:
                (length,) = struct.unpack("<Q", file.view(0, 8).tobytes())
                if length > min(model_files.MAX_HEADER_BYTES, num_bytes - 8):
                    raise ValueError(f"its header cannot have {length} bytes")
                text = file.view(8, length).tobytes()
                return model_files.parse_header(text, 8 + length, num_bytes)
            except EOFError as error:
                raise ValueError("the file is truncated") from error

    @cached_property
    def _names(self) -> list[str]:
        return [*self._headers]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """The number of the file of each key, and where its values begin."""
        return {
            key: (number, value.start)
            for number, (_, tensors) in enumerate(self._headers.values())
            for key, value in tensors.items()
        }

    def read_metadata(self) -> Index:
        tensors = (tensor for _, tensors in self._headers.values() for tensor in tensors.items())
        rows = (StoredTensor.undivided(key, v.dtype, v.shape) for key, v in sorted(tensors))
        return Index.of(rows)

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Nothing: the headers have been compared with the sizes of the files."""

    def read_box(
        self, tensor: StoredTensor, box: Box, memory: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        if 0 in box.shape:
            return None
        number, start = self._places[tensor.key]
        window = Window(0, tensor.global_shape, box)
        return read_single(self.files, self._names[number], start, window, tensor.dtype, memory)

    def location(self, chunk: MetadataIndex) -> str:
        number, start = self._places[chunk.fqn]
        stored = self._index[chunk.fqn]
        name = self._names[number]
        return f"{self.checkpoint_dir}/{name}, {stored.num_bytes} bytes from {start}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        return [
            ChunkPlace(self._names[self._places[chunk.fqn][0]], self._index[chunk.fqn].num_bytes)
            for chunk in chunks
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        table = plan.table
        places = np.array([self._places.get(name, (0, 0)) for name in table.names]).reshape(-1, 2)
        files, starts = places[table.keys].T
        filler = Filler(plan, planner, self._index, self.files)
        sizes = stored_bytes(table, self._index)
        reads = ChunkReads(np.arange(len(table)), self._names, files, starts, sizes)
        read_chunks(reads, filler, self.files, report=self.report)
        return done(None)
