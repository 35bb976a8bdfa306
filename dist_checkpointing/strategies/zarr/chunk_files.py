"""Folders of chunk files of both versions: written, read, compressed, shared with a base."""

from __future__ import annotations

import logging
import math
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.filesystem import file_writer, location
from dist_checkpointing.filesystem import location as store
from dist_checkpointing.filesystem.hard_links import share_file
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import bytes_of, columns_of, digest_of_array
from dist_checkpointing.format.geometry import Box, Ints, Window
from dist_checkpointing.format.index import (
    MOST_COMPRESSION,
    Backing,
    Index,
    StatedSize,
    StoredTensor,
    require_backing,
    size_of_files,
)
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    ReadTable,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.load_plan import reads_of, stored_bytes
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import (
    ChunkPlace,
    StorageReader,
    StorageWriter,
    WriteResults,
    done,
)
from dist_checkpointing.storage.options import BaseCheck, Checksum, Durability, StorageOptions
from dist_checkpointing.storage.staging import StagingBuffers, is_on_gpu
from dist_checkpointing.strategies.chunk_reads import ChunkReads, Filler, damaged, read_chunks
from dist_checkpointing.strategies.incremental import BaseParts, PlanDigests, open_base
from dist_checkpointing.strategies.zarr.compression import Codec, unpacked
from dist_checkpointing.threads import in_threads

Array = npt.NDArray[Any]


def chunk_array(data: torch.Tensor, chunk_shape: Ints) -> Array:
    """The C-contiguous array to store for a chunk; padded with zeros where the tensor ends."""
    array = tensor_memory.as_numpy(data.detach().to("cpu"))
    if array.shape == chunk_shape:
        return np.ascontiguousarray(array).reshape(chunk_shape)
    padded = np.zeros(chunk_shape, dtype=array.dtype)
    padded[tuple(slice(0, extent) for extent in array.shape)] = array
    return padded


def write_chunk(folder: Location, name: str, array: Array, codec: Codec | None) -> SealedFile:
    """Write a whole chunk file, which must not exist."""
    if codec is None:
        data = bytes_of(array)
    else:
        # Blosc shuffles bytes by the size of an element, and numpy must not need to know the dtype.
        elements = array.reshape(-1).view(f"V{array.itemsize}")
        data = memoryview(codec.encode(elements)).cast("B")
    return SealedFile(name, len(data), etag=file_writer.put(folder, name, data))


def write_part(path: str, array: Array, chunk_shape: Ints, box: Box) -> int:
    """Write a part of an uncompressed chunk into its place; others write the rest of the file.

    Returns the size of the file.

    Byte ranges of different writers never overlap, so no lock is needed.
    """
    window = Window(0, chunk_shape, box)
    itemsize = array.dtype.itemsize
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, window.array_size * itemsize)
        for start, run in _runs(np.ascontiguousarray(array), window):
            data = bytes_of(run)
            _write_all(descriptor, data, start * itemsize)
    finally:
        os.close(descriptor)
    return window.array_size * itemsize


def _runs(array: Array, window: Window) -> Iterator[tuple[int, Array]]:
    """The contiguous runs that the window's box consists of: (first element, its values)."""
    run = window.contiguous_range()
    if run is not None:
        yield run[0], array
        return
    box = window.box
    axis = next(a for a, extent in enumerate(box.shape) if extent > 1)
    for i in range(box.shape[axis]):
        offset = (*box.offset[:axis], box.offset[axis] + i, *box.offset[axis + 1 :])
        row = Box(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :]))
        yield from _runs(array.take([i], axis=axis), Window(window.start, window.shape, row))


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def read_decoded(path: Location, codec: Codec, num_bytes: int, key: str) -> Array:
    """The bytes of the values of a compressed chunk."""
    corrupt = partial(damaged, str(path), key)
    try:
        encoded = location.read_bytes(path, 2 * num_bytes + 2**20)
    except FileNotFoundError as error:
        raise corrupt("a chunk is missing") from error
    try:
        raw = np.frombuffer(unpacked(codec, encoded, num_bytes), dtype=np.uint8)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise corrupt(f"a chunk cannot be decoded: {error}") from error
    if raw.nbytes != num_bytes:
        raise corrupt(
            "a decoded chunk has the wrong size", expected=f"{num_bytes} bytes", found=raw.nbytes
        )
    return raw


logger: logging.Logger = logging.getLogger(__name__)
ChunkNames = Callable[[ShardTable, Index], Sequence[str | None]]
"""File that each row of a table fills by itself; None for a row that writes parts of files."""


def share_chunks(
    folder: Path,
    reader: StorageReader,
    plan: SavePlan,
    names_of: ChunkNames,
    digests: PlanDigests,
    options: StorageOptions,
    codec: tuple[str | None, Codec | None],
) -> dict[int, SealedFile]:
    """Share the chunk files of a base that hold rows of a plan. Not collective.

    The folders of all chunk files exist. Nothing is shared if the base is damaged or gone, which is
    logged.
    """
    assert plan.index is not None
    base = reader.checkpoint_dir
    try:
        parts = open_base(reader, plan.table)
        if parts is None or parts.index.codec != codec[0]:
            return {}
        sources = _sources(parts, plan.table, plan.index, names_of)
        rows = np.array(list(sources), dtype=np.int64)
        digests.add(rows)
        is_same = (digests.columns[rows] == parts.digests[rows]).all(axis=1)
        same = rows[is_same].tolist()
        if options.base_check is BaseCheck.CONTENTS and same:
            stored = in_threads(
                lambda row: _digest_in_base(parts, plan, row, sources[row], codec[1]),
                same,
                options.threads,
            )
            is_good = (columns_of(stored) == digests.columns[same]).all(axis=1)
            same = np.array(same, dtype=np.int64)[is_good].tolist()
        names = names_of(plan.table, plan.index)
        targets = {row: name for row in same if (name := names[row]) is not None}
        return _shared(
            folder, parts, {row: (sources[row], targets[row]) for row in targets}, options
        )
    except (CheckpointingException, OSError) as error:
        logger.warning("nothing is shared with %s, which cannot be used: %s", base, error)
        return {}


def _sources(
    base: BaseParts, table: ShardTable, index: Index, names_of: ChunkNames
) -> dict[int, SealedFile]:
    """The rows that fill a chunk file of the same shape in the base, and that file."""
    rows = np.flatnonzero(base.same_box)
    names = names_of(table.take(rows), base.index)
    found = {}
    for row, name in zip(rows.tolist(), names, strict=True):
        key = table.key(row)
        # A chunk at the edge of a tensor is padded to the shape of a chunk.
        sealed = None if name is None else base.seal.files.get(name)
        own, theirs = (i.chunk_shape(key) for i in (index, base.index))
        if sealed is not None and tuple(own or ()) == tuple(theirs or ()):
            found[row] = sealed
    return found


def _digest_in_base(
    base: BaseParts, plan: SavePlan, row: int, source: SealedFile, codec: Codec | None
) -> bytes:
    """The digest of the values that a chunk file of the base has now."""
    table, path = plan.table, base.folder / source.name
    key, size, box = table.key(row), int(table.itemsizes[row]), table.box(row)
    chunk = base.index.chunk_shape(key)
    whole = int(table.num_bytes[row]) if chunk is None else math.prod(chunk) * size
    raw = np.fromfile(path, np.uint8) if codec is None else read_decoded(path, codec, whole, key)
    if raw.nbytes == whole > table.num_bytes[row]:
        values = raw.view(f"V{size}").reshape(tuple(chunk or ()))
        raw = values[tuple(map(slice, box.shape))].copy()
    return digest_of_array(raw)


def _shared(
    folder: Path,
    base: BaseParts,
    files: dict[int, tuple[SealedFile, str]],
    options: StorageOptions,
) -> dict[int, SealedFile]:
    def share(row: int) -> SealedFile | None:
        source, name = files[row]
        size = share_file(base.folder / source.name, folder / name)
        if size is not None and size != source.num_bytes:
            logger.warning(
                "%s/%s has another size than when it was saved", base.folder, source.name
            )
            (folder / name).unlink()
        return SealedFile(name, size) if size == source.num_bytes else None

    rows = list(files)
    if not rows:
        return {}
    shared = {row: file for row in rows[:1] if (file := share(row)) is not None}
    if not shared and base.is_in_place():
        logger.warning("files of %s cannot be shared here, and are written", base.folder)
        return {}
    found = in_threads(share, rows[1:], options.threads)
    shared |= {row: file for row, file in zip(rows[1:], found, strict=True) if file is not None}
    if not base.is_in_place():
        # Another save may have put other chunks in their places.
        for file in shared.values():
            (folder / file.name).unlink()
        logger.warning("nothing is shared with %s, which was deleted meanwhile", base.folder)
        return {}
    num_bytes = sum(file.num_bytes for file in shared.values())
    logger.info("%d bytes in %d files are shared with the base", num_bytes, len(shared))
    return shared


FileContent = tuple[str, bytes]
"""Path, relative to the checkpoint, and bytes of a small file that describes an array or group."""


class ZarrFolderWriter(StorageWriter):
    """Writes chunk files and the files that describe the arrays."""

    gathers_results: ClassVar[bool] = False
    shares_files: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._rank, self._world_size = 0, 1
        self._codec_name: str | None = None
        self._codec: Codec | None = None

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @abstractmethod
    def describe_array(self, tensor: StoredTensor) -> Iterable[FileContent]:
        """The files that say what the tensor's arrays are."""

    @abstractmethod
    def part_writer(self, plan: SavePlan) -> Callable[[int, torch.Tensor], list[SealedFile]]:
        """What writes the chunk files (or parts of them) of a row of a plan, given its values.

        Makes the folders of all chunk files. Several threads call what it returns.
        """

    @abstractmethod
    def base_reader(self, base: Path) -> ZarrFolderReader:
        """What reads a checkpoint of this format."""

    @abstractmethod
    def chunk_files(self, table: ShardTable, index: Index) -> Sequence[str | None]:
        """File that each row of a plan fills by itself; None for a row that writes parts."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        index, table = plan.index, plan.table
        assert index is not None
        # Any rank can describe any array, so each takes its share, also of those without chunks.
        keys = list(index)[self._rank :: self._world_size]
        described = [file for key in keys for file in self.describe_array(index[key])]
        self.make_folders({name.rpartition("/")[0] for name, _ in described})
        write_part, data_of = self.part_writer(plan), planner.data_of(plan)
        sizes = table.num_bytes
        with_checksums = self.options.checksum is Checksum.XXH3
        digests = PlanDigests(plan, planner, self.options)
        shared: dict[int, SealedFile] = {}
        if self.base is not None and len(table):
            shared = share_chunks(
                self.checkpoint_dir,
                self.base_reader(self.base),
                plan,
                self.chunk_files,
                digests,
                self.options,
                (self._codec_name, self._codec),
            )
            self.report(int(sizes[list(shared)].sum()))

        def describe(file: FileContent) -> None:
            file_writer.put(self.checkpoint_dir, *file, is_new=False)

        most_bytes, of_thread = self.options.buffer_bytes // self.options.threads, threading.local()

        def on_cpu(data: torch.Tensor) -> torch.Tensor:
            if data.nbytes > most_bytes:
                return data.to("cpu")
            if not hasattr(of_thread, "buffers"):
                of_thread.buffers = StagingBuffers()
                of_thread.buffers.take()
            copied: list[torch.Tensor] = of_thread.buffers.fill([data.nbytes], [data])
            return copied[0]

        def write(row: int) -> list[SealedFile]:
            data = data_of(row)
            assert isinstance(data, torch.Tensor)
            if is_on_gpu(data):
                data = on_cpu(data.detach())
            if with_checksums:
                data = data.detach().to("cpu").contiguous()
                digests.columns[row] = columns_of([digest_of_array(tensor_memory.as_numpy(data))])
            written = write_part(row, data)
            self.report(int(sizes[row]))
            return written

        threads = self.options.threads
        in_threads(describe, described, threads)
        files = [SealedFile.of_bytes(*file) for file in described]
        files += shared.values()
        rows = [row for row in range(len(table)) if row not in shared]
        files += [file for written in in_threads(write, rows, threads) for file in written]
        if self.options.durability is Durability.FSYNC:
            paths = [self.checkpoint_dir / file.name for file in files]
            in_threads(store.fsync_file, paths, threads)
            store.fsync_folders(paths, self.checkpoint_dir)
            if self._rank:  # rank 0 commits, which makes its own names durable
                store.fsync_folder(self.checkpoint_dir)
        results = WriteResults(table, sizes, files=tuple(files))
        if with_checksums:
            uppers, checksums = digests.columns.T
            results = replace(results, checksums=checksums, uppers=uppers)
        return done(results)

    def make_folders(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            store.make_folder(self.checkpoint_dir / name)


class ZarrFolderReader(StorageReader):
    """Reads windows of chunk files, straight into the destination where that is possible."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._index = Index.of([])

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del rank, world_size
        self._index = metadata

    @abstractmethod
    def chunk_names(self, table: ReadTable) -> list[str]:
        """Paths, relative to the checkpoint, of the files of the stored chunks of all rows."""

    def location(self, chunk: MetadataIndex) -> str:
        return str(self.checkpoint_dir / self.chunk_names(reads_of([chunk], self._index))[0])

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        is_encoded = self.codec() is not None
        table = reads_of(chunks, self._index)
        sizes = stored_bytes(table, self._index).tolist()
        names = self.chunk_names(table)
        if is_encoded:
            sizes = [self.files.size_of(name) or 0 for name in names]
        return [
            ChunkPlace(name, num_bytes, is_encoded)
            for name, num_bytes in zip(names, sizes, strict=True)
        ]

    @abstractmethod
    def array_folder(self, key: str) -> Path:
        """The folder that holds everything of a tensor."""

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        growth = 1 if index.codec is None else MOST_COMPRESSION

        def files_of(stated: StatedSize) -> Backing:
            num_bytes, num_files = size_of_files(self.array_folder(stated.key))
            return Backing(num_bytes * growth, num_files, self.claimed_in(stated.key))

        require_backing(claims, files_of)

    def codec(self) -> Codec | None:
        """How the chunk files are encoded."""
        return None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        codec, table = self.codec(), plan.table
        names = self.chunk_names(table)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        files = np.fromiter(map(numbers.__getitem__, names), dtype=np.int64, count=len(names))
        sizes = stored_bytes(table, self._index)
        filler = Filler(plan, planner, self._index, self.files.limits)
        if codec is None:
            starts = np.zeros_like(files)
            rows = np.arange(len(table))
            reads = ChunkReads(rows, [*numbers], files, starts, sizes, fill_files=True)
            read_chunks(reads, filler, self.files, report=self.report)
            return done(None)
        order = np.argsort(files, kind="stable")
        of_files = np.split(order, np.flatnonzero(np.diff(files[order])) + 1) if len(order) else []

        def read_file(rows: Int64s) -> None:
            first = int(rows[0])
            place = self.checkpoint_dir / names[first]
            values = read_decoded(place, codec, int(sizes[first]), table.key(first))
            for row in rows.tolist():
                self.report(filler.fill(row, values))

        # Each has a whole chunk in memory, before and after it is decoded.
        limits, largest = self.files.limits, 2 * int(sizes.max(initial=1))
        fitting = limits.threads * limits.most_bytes // largest
        threads = max(self.options.threads, min(limits.threads, fitting))
        in_threads(read_file, of_files, threads)
        return done(None)
