"""Writes .distcp files, a few a rank, and ``.metadata``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch.serialization import get_crc32_options

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, checksum_of_bytes
from dist_checkpointing.format.geometry import Box, Ints, values_of_part
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.torch_dist.contents import unique_keys
from dist_checkpointing.strategies.torch_dist.data_files import DataFile, file_name
from dist_checkpointing.strategies.torch_dist.flattened import (
    common_box_shape,
    flattened_chunk,
    flattened_size,
)
from dist_checkpointing.strategies.torch_dist.metadata import DcpMetadata, DcpTensor, Place
from dist_checkpointing.strategies.torch_dist.metadata_pickle import to_pickle

_MIN_FILE_BYTES = 32 * 2**20
_MOST_FILES = 8
"""Of one rank. Rank 0 names the files of all ranks before they are written, and does not know how
many threads another rank has."""

Row = tuple[str, Ints | None, Ints | None, Place]
"""What a rank wrote: key, offsets and sizes of a chunk (None for a value), and where it is."""

Chunk = tuple[tuple[Ints, Ints], torch.Tensor]
"""Offsets and sizes of a chunk as DCP counts them, and its values in that shape."""


class TorchDistWriter(StorageWriter):
    """Writes what plain torch DCP and Megatron-Core read.

    Attributes:
        separation_hint: Tensors whose keys begin with this get data files of their own.
    """

    # A chunk is a shard, however large it is.
    layout: RowBlockLayout = RowBlockLayout(max_chunk_bytes=1 << 62)
    keeps_fingerprints: ClassVar[bool] = False
    uses_object_stores: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self.separation_hint: str | None = None
        self._rank = 0
        self._with_crc = get_crc32_options()  # which other threads may not see

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        clashes = [key for key in unique_keys(index) if key in index]
        if clashes:
            raise InvalidShardingError(
                "keys of the state dict clash",
                [
                    Finding(
                        "is also the name of a cell of a ShardedObject", key, remedy="Rename it."
                    )
                    for key in clashes
                ],
            )
        names = [
            file_name(rank, number, prefix)
            for prefix in dict.fromkeys(("", self.separation_hint or ""))
            for rank in range(world_size)
            for number in range(_MOST_FILES)
        ]
        return [DCP_METADATA_NAME, CHECKSUMS_NAME, *names]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        del world_size
        self._rank = rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        index, table = plan.index, plan.table
        assert index is not None
        data_of, is_object = planner.data_of(plan), table.is_object.tolist()
        keys = set(table.take(~table.is_object).key_column)
        flattened = {key: common_box_shape(index[key]) is not None for key in keys}
        parts = self._files_of(table)
        buffer_bytes = max(1, self.options.buffer_bytes // max(1, len(parts)))
        sizes = np.zeros(len(table), dtype=np.int64)
        checksums = np.zeros(len(table), dtype=np.uint64)
        with_checksums = self.options.checksum is Checksum.XXH3

        is_cancelled = False

        def write(file: DataFile, row: int) -> list[Row]:
            if is_cancelled:
                raise InterruptedError("the save was cancelled")
            data = data_of(row)
            if is_object[row]:
                # Megatron keeps a list of all cells of this name on the rank.
                value = serialize([data], f"the ShardedObject {table.key(row)!r}")
                place = file.add_bytes(value)
                sizes[row], checksums[row] = place.length, checksum_of_bytes(value)
                cell = ShardedObject(
                    table.key(row), None, table.global_shape(row), table.box(row).offset
                )
                return [(cell.unique_key, None, None, place)]
            assert isinstance(data, torch.Tensor)
            hasher = xxhash.xxh3_64() if with_checksums else None
            key, box, flat = table.key(row), table.box(row), table.flat_range(row)
            written: list[Row] = [
                (key, offsets, shape, file.add_tensor(values, shape, hasher))
                for (offsets, shape), values in _chunks(box, flat, data, as_one=flattened[key])
            ]
            sizes[row] = sum(place.length for *_, place in written)
            if hasher is not None:
                checksums[row] = hasher.intdigest()
            self.report(data.nbytes)
            return written

        def fill(name: str) -> tuple[list[Row], SealedFile]:
            own, path = parts[name], self.checkpoint_dir / name
            is_durable = self.options.durability is Durability.FSYNC
            file = DataFile(path, with_crc=self._with_crc, buffer_bytes=buffer_bytes)
            try:
                rows = [written for row in own for written in write(file, row)]
                return rows, file.close(is_durable=is_durable)
            except BaseException:
                file.give_up()
                raise

        with ThreadPoolExecutor(max(1, len(parts)), "distcp") as pool:
            try:
                filled = list(pool.map(fill, parts))
            except BaseException:
                is_cancelled = True  # the others stop at their next value
                raise
        rows = [row for own, _ in filled for row in own]
        # Rank 0 commits, which makes its own names durable.
        if self._rank and self.options.durability is Durability.FSYNC and parts:
            location.fsync_folder(self.checkpoint_dir)
        files = tuple(file for _, file in filled)
        checked = None if with_checksums else table.is_object
        return done(WriteResults(table, sizes, checksums, checked, files, rows))

    def _files_of(self, table: ShardTable) -> dict[str, list[int]]:
        """The rows in each file of this rank, by name."""
        threads, hint = min(self.options.threads, _MOST_FILES), self.separation_hint
        if not hint:
            parts = _split(table, np.arange(len(table)), threads)
            return {file_name(self._rank, number): part for number, part in enumerate(parts)}
        begins = np.array([name.startswith(hint) for name in table.names], dtype=np.bool_)
        # Objects are not removed by prefix, and would keep the file.
        apart = begins[table.keys] & ~table.is_object
        return {
            file_name(self._rank, number, prefix): part
            for prefix, rows in (("", ~apart), (hint, apart))
            for number, part in enumerate(_split(table, np.flatnonzero(rows), threads))
        }

    def finish(
        self, metadata: Index, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile] | None:
        chunks: dict[str, list[tuple[Ints, Ints]]] = {key: [] for key in metadata}
        values: list[str] = []
        places: dict[tuple[str, Ints | None], Place] = {}
        rows: Iterator[Any] = (
            row for of_rank in results for result in of_rank for row in _rows(result)
        )
        for key, offsets, sizes, place in rows:
            places[key, offsets] = place
            if offsets is None:
                values.append(key)
            else:
                chunks[key].append((offsets, sizes))
        tensors = {key: _dcp_tensor(metadata, key, chunks[key]) for key in metadata}
        content = to_pickle(DcpMetadata(tensors, tuple(values), places))
        path = self.checkpoint_dir / DCP_METADATA_NAME
        location.write_content(path, content, self.options.durability)
        return [SealedFile.of_bytes(DCP_METADATA_NAME, content)]


def _rows(result: WriteResult) -> list[Row]:
    assert isinstance(result.storage_data, list)
    return result.storage_data


def _dcp_tensor(index: Index, key: str, chunks: list[tuple[Ints, Ints]]) -> DcpTensor:
    stored = index[key]
    box_shape, shape = common_box_shape(stored), stored.global_shape
    size = shape if box_shape is None else flattened_size(shape, box_shape)
    whole = None if box_shape is None else shape
    return DcpTensor(stored.dtype.torch, size, tuple(chunks), whole)


def _split(table: ShardTable, rows: Int64s, threads: int) -> list[list[int]]:
    """Some rows of one rank in one file, or in several of about the same number of bytes."""
    if not len(rows):
        return []
    sizes = table.num_bytes[rows].tolist()
    count = max(1, min(threads, sum(sizes) // _MIN_FILE_BYTES))
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for row, size in zip(rows.tolist(), sizes, strict=True):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += size
    return [part for part in parts if part]


def _chunks(
    box: Box, flat: tuple[int, int] | None, data: torch.Tensor, *, as_one: bool
) -> Iterator[Chunk]:
    """A part of a tensor as DCP will know it.

    Args:
        box: of the part.
        flat: if given, the part is only this range of the flattened box.
        data: its values.
        as_one: whether its tensor is stored flattened, if it is; else a flattened range becomes
            the boxes that it consists of, which every reader of DCP understands.
    """
    if flat is None:
        yield (box.offset, box.shape), data
    elif as_one:
        chunk = flattened_chunk(box, flat)
        yield chunk, data.view(chunk[1])
    else:
        for part, values in values_of_part(box, flat, data):
            yield (part.offset, part.shape), values
