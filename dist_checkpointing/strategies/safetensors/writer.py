"""Every rank writes what it has to its place in the files of a model."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, ClassVar, Final

import numpy as np
import torch

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.format.dtypes import FLOATING
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.foreign_formats import MODEL_INDEX_NAME
from dist_checkpointing.format.geometry import Box, Window, split_rows, values_of_part
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile, shared_name
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.storage.staging import HostBlocks
from dist_checkpointing.strategies.data_files import write_window
from dist_checkpointing.strategies.safetensors import model_files
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
_MOST_BUFFER_BYTES: Final = 2**25
"""For copies, of all threads together; more does not make them faster."""
_TEXT_BYTES: Final = 2**16
"""Room in a header for texts that rank 0 alone knows, while the others write behind it."""

TENSORS_ONLY: Final = (
    "Save the model alone: interop.shard_state_dict(model.state_dict()); save the rest of the "
    "training run with another backend."
)


class SafetensorsWriter(StorageWriter):
    """Writes the parts of this rank to their places in the files of a model.

    Attributes:
        dtype: To which floating-point values are cast; None for their own.
        extra_files: Other files of the model, by name.
        texts: What the common state adds to the headers.
    """

    layout: RowBlockLayout = RowBlockLayout(keeps_ranges=False)
    gathers_results: ClassVar[bool] = False
    keeps_cuts: ClassVar[bool] = False
    casts: ClassVar[bool] = True
    keeps_fingerprints: ClassVar[bool] = False
    dtype: torch.dtype | None = None
    extra_files: Mapping[str, bytes] = {}
    texts: Mapping[str, str] = {}

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        self._require_storable(index)
        if of_optimizer := [key for key in index if is_of_optimizer(key)]:
            logger.warning(
                "no program that reads a model expects the state of an optimizer, such as %r: save "
                "model.state_dict() alone",
                of_optimizer[0],
            )
        names = [file.name for file in self._files(index, {})]
        # A save that gives up takes the last of them first.
        return names if self.is_one_file else [*names, *self.extra_files, MODEL_INDEX_NAME]

    def _files(
        self, index: Index, texts: Mapping[str, str], room: int = 0
    ) -> list[model_files.ModelFile]:
        most_bytes = sys.maxsize if self.is_one_file else self.options.data_file_bytes
        return model_files.plan_files(self._rows(index), texts, most_bytes, room=room)

    def _require_storable(self, index: Index) -> None:
        findings = [
            Finding("the format holds tensors only", key, remedy=TENSORS_ONLY)
            for key in index.objects
        ]
        findings += [
            Finding("safetensors files have no such dtype", key, found=dtype.name)
            for key, dtype, _ in self._rows(index)
            if dtype.name not in model_files.CODE_OF_DTYPE
        ]
        if model_files.METADATA_KEY in index:
            reserved = "safetensors keeps texts under this name"
            findings.append(Finding(reserved, model_files.METADATA_KEY))
        findings += [
            Finding("no name of a file beside a model", found=name)
            for name in self.extra_files
            if not model_files.is_model_file(name)
        ]
        UnsupportedFormatError.raise_if(findings, "the state cannot be saved as safetensors")

    def _rows(self, index: Index) -> list[model_files.TensorRow]:
        """The tensors as they are stored."""
        cast = None if self.dtype is None else tensor_memory.from_torch(self.dtype)
        rows = ((key, index[key].dtype, index[key].global_shape) for key in index)
        return [(k, cast if cast and d.name in FLOATING else d, shape) for k, d, shape in rows]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        table, index, data_of = plan.table, plan.index, planner.data_of(plan)
        assert index is not None
        files = self._files(index, self.texts, _TEXT_BYTES if self.world_size > 1 else 0)
        file_of = {key: number for number, file in enumerate(files) for key in file.starts}
        numbers = [file_of.get(name, -1) for name in table.names]
        written = {*map(numbers.__getitem__, table.keys.tolist())}
        if self.rank == 0:
            written |= {*range(len(files))}
        names = [shared_name(f.name, self.attempt) if self.attempt else f.name for f in files]
        with ExitStack() as stack:
            opened = {n: self._opened(names[n], files[n], stack) for n in sorted(written)}
            threads = self.options.threads
            dtypes = {key: dtype.torch for key, dtype, _ in self._rows(index)}
            most_bytes = min(self.options.buffer_bytes, _MOST_BUFFER_BYTES) // threads

            failures: list[BaseException] = []

            def write(rows: Int64s) -> None:
                try:
                    for row, box, values in _converted(rows, table, data_of, dtypes, most_bytes):
                        if failures:
                            return
                        key, array = table.key(row), tensor_memory.as_numpy(values)
                        file, window = file_of[key], Window(0, table.global_shape(row), box)
                        write_window(opened[file], files[file].starts[key], window, array)
                        self.report(values.numel() * index[key].dtype.itemsize)
                except BaseException as error:
                    failures.append(error)
                    raise

            # The kernel lets one thread at a time write a file: ranks begin at different ones, and
            # threads too.
            order = np.roll(np.arange(len(table)), -self.rank * len(table) // self.world_size)
            ends = table.num_bytes[order].cumsum()
            cuts = ends.searchsorted(np.arange(1, threads) * table.num_bytes.sum() // threads)
            in_threads(write, np.split(order, cuts), threads)
            if self.options.durability is Durability.FSYNC:
                in_threads(os.fsync, [*opened.values()], self.options.threads)
        sealed = [SealedFile(names[number], files[number].num_bytes) for number in sorted(written)]
        return done(WriteResults(table, table.num_bytes, files=tuple(sealed)))

    def _opened(self, name: str, file: model_files.ModelFile, stack: ExitStack) -> int:
        """A descriptor of a file in its final size; rank 0 writes the header."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(f"{self.checkpoint_dir}/{name}", flags, 0o666)
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, file.num_bytes)
        is_durable = self.options.durability is Durability.FSYNC
        if not is_durable and file_writer.makes_room(self.checkpoint_dir):  # see ``DataFiles``
            os.posix_fallocate(descriptor, 0, file.num_bytes)
        if self.rank == 0:
            header = np.frombuffer(file.header, np.uint8)
            write_window(descriptor, 0, Window(0, header.shape, Box.whole(header.shape)), header)
        return descriptor

    def finish(
        self, metadata: Index, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile]:
        files = self._files(metadata, {})
        if self.is_one_file:
            self.commit_file = files[0].name, None
            return []
        names = {key: file.name for file in files for key in file.starts}
        sizes = (dtype.itemsize * math.prod(shape) for _, dtype, shape in self._rows(metadata))
        content = {
            "metadata": {"total_size": sum(sizes)},
            "weight_map": dict(sorted(names.items())),
        }
        self.commit_file = MODEL_INDEX_NAME, json.dumps(content, indent=2).encode() + b"\n"
        for name, data in self.extra_files.items():
            file_writer.put(self.checkpoint_dir, name, data, self.options.durability)
        return [SealedFile.of_bytes(*file) for file in self.extra_files.items()]


def _converted(
    rows: Int64s,
    table: ShardTable,
    data_of: Callable[[int], Any],
    dtypes: Mapping[str, torch.dtype],
    most_bytes: int,
) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """The values of rows, a block at a time, as they are stored: with its row and its box.

    They are those of the tensor itself, or in memory that is used again for the next block.
    """
    blocks, places = HostBlocks(most_bytes, lambda: None), list[tuple[int, Box]]()
    buffer = torch.empty(blocks.block_bytes, dtype=torch.uint8)

    def parts() -> Iterator[torch.Tensor]:
        for row in rows.tolist():
            data: torch.Tensor = data_of(row)
            most = blocks.block_bytes // max(data.itemsize, dtypes[table.key(row)].itemsize)
            for box, values in values_of_part(table.box(row), table.flat_range(row), data.detach()):
                for part in split_rows(Box.whole(box.shape), most):
                    places.append((row, part.moved(box.offset)))
                    yield values[part.slices()]

    for number, block in blocks.of(parts()):
        row, box = places[number]
        dtype = dtypes[table.key(row)]
        if block.dtype == dtype and tensor_memory.is_plain_memory(block):
            yield row, box, block
        else:
            memory = buffer[: block.numel() * dtype.itemsize].view(dtype)
            yield row, box, memory.view(block.shape).copy_(block)
