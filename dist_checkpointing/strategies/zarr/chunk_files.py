"""Folders of chunk files of both versions: written, read, compressed, shared with a base."""

from __future__ import annotations

import itertools
import os
import re
import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final

import numcodecs
import numpy as np
import numpy.typing as npt
import torch
from numcodecs.abc import Codec

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import file_writer, local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import bytes_of, columns_of, digest_of
from dist_checkpointing.format.geometry import Box, Ints, Window, padded, values_of_part
from dist_checkpointing.format.index import (
    MOST_COMPRESSION,
    Index,
    StatedSize,
    StoredTensor,
    require_backing,
    size_of_files,
)
from dist_checkpointing.format.leftovers import (
    REMOVAL_NAME,
    PlannedRemoval,
    note_removal,
    noted_removal,
)
from dist_checkpointing.format.seal import SealedFile, shared_name
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex, SavePlan, SavePlanner
from dist_checkpointing.planning.load_plan import reads_of, stored_bytes
from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable
from dist_checkpointing.storage.interface import (
    ChunkPlace,
    StorageReader,
    StorageWriter,
    WriteResults,
    done,
)
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.staging import StagingBuffers, is_on_gpu
from dist_checkpointing.strategies import chunk_reads, incremental
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.data_files import write_window
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import zstd_content_bytes
from dist_checkpointing.strategies.zarr_metadata import CODECS, ChunkNames, chunk_keys, padded_chunk
from dist_checkpointing.threads import in_threads

Array = npt.NDArray[Any]


_GZIP_WINDOW: Final = 31
_BLOSC_HEADER_BYTES: Final = 16


def unpacked(codec: Codec, data: bytes, num_bytes: int) -> Any:
    """The bytes of a chunk, which must be so many.

    Raises:
        ValueError: if it unpacks to anything else; says so before it has unpacked more.
    """
    if codec.codec_id == "gzip":
        return _gunzipped(data, num_bytes)
    said = zstd_content_bytes(data) if codec.codec_id == "zstd" else _blosc_size(data)
    if said != num_bytes or (said := len(content := codec.decode(data))) != num_bytes:
        raise ValueError(f"it unpacks to {said} bytes, expected {num_bytes}")
    return content


def _gunzipped(data: bytes, num_bytes: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = stream.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(content) != num_bytes or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not unpack to {num_bytes} bytes")
    return content


def _blosc_size(data: bytes) -> int:
    """What the header of a Blosc chunk says: bytes 4 to 8. Bytes 12 to 16 are its own size.

    Blosc believes that, and reads past the end of a chunk that was cut off.
    """
    if len(data) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for Blosc")
    expected = int.from_bytes(data[12:_BLOSC_HEADER_BYTES], "little")
    if expected != len(data):
        raise ValueError(f"Blosc expects {expected} bytes and there are {len(data)}")
    return int.from_bytes(data[4:8], "little")


def make_codec(name: str | None) -> Codec | None:
    """The codec with this zarr v3 name; None for raw bytes."""
    if name is None:
        return None
    if name not in CODECS:
        finding = Finding("unknown codec", expected=", ".join(CODECS), found=repr(name))
        raise UnsupportedFormatError("cannot store or read chunks this way", [finding])
    own = {"shuffle": numcodecs.Blosc.SHUFFLE} if name == "blosc" else {}
    return numcodecs.get_codec({"id": name} | CODECS[name] | own)


def chunk_array(data: torch.Tensor, chunk_shape: Ints) -> Array:
    """The C-contiguous array to store for a chunk; padded with zeros where the tensor ends."""
    array = tensor_memory.as_numpy(data.detach().to("cpu"))
    if array.shape != chunk_shape:
        return padded_chunk(array, chunk_shape)
    return np.ascontiguousarray(array).reshape(chunk_shape)


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
    """
    window = Window(0, chunk_shape, box)
    num_bytes = window.array_size * array.itemsize
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, num_bytes)
        write_window(descriptor, 0, window, array)
    finally:
        os.close(descriptor)
    return num_bytes


def read_decoded(codec: Codec, path: Location, num_bytes: int, key: str) -> Array:
    """The bytes of the values of a compressed chunk."""
    corrupt = partial(chunk_reads.damaged, str(path), key)
    try:
        encoded = location.read_bytes(path, 2 * num_bytes + 2**20)
    except FileNotFoundError as error:
        raise corrupt("a chunk is missing") from error
    try:
        return np.frombuffer(unpacked(codec, encoded, num_bytes), np.uint8)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise corrupt(f"a chunk cannot be decoded: {error}") from error


FileContent = tuple[str, bytes]
"""Path, relative to the checkpoint, and bytes of a small file that describes an array or group."""


class ZarrFolderWriter(StorageWriter):
    """Writes chunk files and the files that describe the arrays.

    Attributes:
        codec_name: How chunks are compressed; None for raw bytes.
        reader_type: What reads a base of this format.
    """

    gathers_results: ClassVar[bool] = False
    shares_files: ClassVar[bool] = True
    reader_type: ClassVar[type[ZarrFolderReader]]

    codec_name: str | None = None

    @abstractmethod
    def describe(self, index: Index, rows: slice) -> Iterable[FileContent]:
        """The files that say what the arrays of some tensors are."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        index, table, options = plan.index, plan.table, self.options
        assert index is not None
        # Any rank can describe any array, so each takes its share, also of those without chunks.
        described = [*self.describe(index, slice(self.rank, None, self.world_size))]
        names = chunk_keys(table, index, self.reader_type.names)
        is_whole = _fill_chunks(table, index)
        paths = itertools.chain((name for name, _ in described), names)
        for folder in sorted({path.rpartition("/")[0] for path in paths}):
            location.make_folder(self.checkpoint_dir / folder)
        data_of, sizes = planner.data_of(plan), table.num_bytes
        with_checksums = options.checksum is Checksum.XXH3
        digests = incremental.PlanDigests(table, data_of, options)
        codec = make_codec(self.codec_name)
        shared, _ = incremental.share_parts(
            self,
            self.reader_type,
            table,
            digests,
            lambda base: self._files_in_base(base, table, index, names, is_whole),
            reuses_names=True,
        )
        # A chunk at an edge is stored at full size.
        chunks = index.chunk_shapes.prod(axis=1) * index.itemsizes_of(index)
        largest = max(int(sizes.max(initial=1)), int(chunks.max(initial=1)))
        threads = file_writer.files_at_a_time(
            self.checkpoint_dir, options.threads, largest, options.buffer_bytes
        )
        most_bytes, of_thread = options.buffer_bytes // threads, threading.local()

        def on_cpu(data: torch.Tensor) -> torch.Tensor:
            if data.nbytes > most_bytes:
                return data.to("cpu")
            if not hasattr(of_thread, "buffers"):
                of_thread.buffers = StagingBuffers()
                of_thread.buffers.acquire()
            copied: list[torch.Tensor] = of_thread.buffers.fill([data.nbytes], [data])
            return copied[0]

        def write(row: int) -> list[SealedFile]:
            data = data_of(row)
            assert isinstance(data, torch.Tensor)
            if is_on_gpu(data):
                data = on_cpu(data.detach())
            if with_checksums:
                data = data.detach().to("cpu").contiguous()
                values = bytes_of(tensor_memory.as_numpy(data))
                digests.columns[row] = columns_of([digest_of(values, len(values))])
            if is_whole[row]:
                array = chunk_array(data, tuple(index.chunk_shape(table.key(row)) or data.shape))
                written = [write_chunk(self.checkpoint_dir, names[row], array, codec)]
            else:
                written = self._write_parts(table, row, index[table.key(row)], data)
            self.report(int(sizes[row]))
            return written

        in_threads(lambda file: file_writer.put(self.checkpoint_dir, *file), described, threads)
        files = [*(SealedFile.of_bytes(*file) for file in described), *shared.files]
        rows = np.setdiff1d(np.arange(len(table)), shared.rows).tolist()
        files += itertools.chain.from_iterable(in_threads(write, rows, threads))
        if options.durability is Durability.FSYNC:
            root, made = self.checkpoint_dir, [file.name for file in files]
            in_threads(lambda name: location.fsync_file(root / name), made, options.threads)
            # Rank 0 commits, which makes its own names durable.
            location.fsync_folders(made, root, to_root=self.rank > 0)
        uppers, checksums = digests.columns.T if with_checksums else (None, None)
        sealed = tuple(files)
        return done(WriteResults(table, sizes, checksums=checksums, files=sealed, uppers=uppers))

    def _write_parts(
        self, table: ShardTable, row: int, tensor: StoredTensor, data: torch.Tensor
    ) -> list[SealedFile]:
        """Write a row that is not a whole chunk into all chunk files that it meets."""
        files, grid, (folder,) = [], tensor.grid, self.reader_type.names.folders([tensor.key])
        for box, values in values_of_part(table.box(row), table.flat_range(row), data):
            for index, common in grid.intersecting(box):
                own, name = grid.box(index), f"{folder}/{self.reader_type.names.chunk(index)}"
                part = values[common.relative_to(box.offset).slices()]
                if common == own:
                    array = chunk_array(part, grid.chunk_shape)
                    files.append(write_chunk(self.checkpoint_dir, name, array, None))
                    continue
                if self.attempt:
                    name = shared_name(name, self.attempt)
                path, array = f"{self.checkpoint_dir}/{name}", chunk_array(part, common.shape)
                size = write_part(path, array, grid.chunk_shape, common.relative_to(own.offset))
                files.append(SealedFile(name, size))
        return files

    def _files_in_base(
        self,
        base: incremental.BaseParts,
        table: ShardTable,
        index: Index,
        names: Sequence[str],
        is_whole: Bools,
    ) -> incremental.Candidates:
        """The rows that fill a chunk file of the same shape in the base, and that file."""

        def chunk(stored: Index, row: int) -> Ints:
            # A chunk at the edge of a tensor is padded to the shape of a chunk.
            return tuple(stored.chunk_shape(table.key(row)) or ())

        is_readable, stored = base.index.codec == self.codec_name, base.seal.files
        rows = [
            row
            for row in np.flatnonzero(base.same_box & is_whole & is_readable).tolist()
            if names[row] in stored and chunk(index, row) == chunk(base.index, row)
        ]
        files = tuple(stored[names[row]] for row in rows)
        extents = np.zeros((len(rows), 3), dtype=np.int64)
        extents[:, 0], extents[:, 2] = np.arange(len(rows)), [file.num_bytes for file in files]
        return incremental.Candidates(np.array(rows, dtype=np.int64), files, extents)


def _fill_chunks(table: ShardTable, index: Index) -> Bools:
    """Which rows are a whole chunk as stored, or a piece, and so have a file of their own."""
    number, width = index.rows_of(table.names)[table.keys], table.shapes.shape[1]
    chunks = padded(index.chunk_shapes, width, 1)[number, :width]
    ends = padded(index.global_shapes, width, 1)[number, :width] - table.offsets
    is_chunk = (table.flat[:, 0] < 0) & ~(table.offsets % chunks).any(axis=1)
    is_chunk &= (table.shapes == np.minimum(chunks, ends)).all(axis=1)
    return is_chunk | ~index.has_grid[number]


class ZarrFolderReader(StorageReader):
    """Reads windows of chunk files, straight into the destination where that is possible."""

    names: ClassVar[ChunkNames] = ChunkNames()

    def read_box(
        self, tensor: StoredTensor, box: Box, memory: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        found = chunk_reads.chunk_with(tensor, box)
        if found is None or self._index.codec is not None:
            return None
        (folder,) = self.names.folders([tensor.key])
        window = Window(0, tensor.grid.chunk_shape, found[1])
        name = f"{folder}/{self.names.chunk(found[0])}"
        return chunk_reads.read_single(
            self.files, name, 0, window, tensor.dtype, memory, is_all=True
        )

    def location(self, chunk: MetadataIndex) -> str:
        (name,) = chunk_keys(reads_of([chunk], self._index), self._index, self.names)
        return str(self.checkpoint_dir / name)

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        table = reads_of(chunks, self._index)
        names, sizes = chunk_keys(table, self._index, self.names), stored_bytes(table, self._index)
        if self._index.codec is None:
            return list(map(ChunkPlace, names, sizes.tolist()))
        return [ChunkPlace(name, self.files.size_of(name) or 0, True) for name in names]

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        growth = 1 if index.codec is None else MOST_COMPRESSION

        def files_of(stated: StatedSize) -> tuple[int, int, str]:
            (folder,) = self.names.folders([stated.key])
            num_bytes, num_files = size_of_files(self.checkpoint_dir / folder)
            return num_bytes * growth, num_files, self.claimed_in(stated.key)

        require_backing(claims, files_of)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        codec, table = make_codec(self._index.codec), plan.table
        names = chunk_keys(table, self._index, self.names)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        files = np.fromiter(map(numbers.__getitem__, names), dtype=np.int64, count=len(names))
        sizes = stored_bytes(table, self._index)
        filler = chunk_reads.Filler(plan, planner, self._index, self.files)
        if codec is None:
            starts = np.zeros_like(files)
            rows = np.arange(len(table))
            reads = chunk_reads.ChunkReads(rows, [*numbers], files, starts, sizes, fill_files=True)
            chunk_reads.read_chunks(reads, filler, self.files, report=self.report)
            return done(None)
        order = np.argsort(files, kind="stable")
        of_files = np.split(order, np.flatnonzero(np.diff(files[order])) + 1) if len(order) else []

        def read_file(rows: Int64s) -> None:
            first = int(rows[0])
            place = self.checkpoint_dir / names[first]
            values = read_decoded(codec, place, int(sizes[first]), table.key(first))
            for row in rows.tolist():
                self.report(filler.fill(row, values))

        # Each has a whole chunk in memory, before and after it is decoded.
        limits, largest = self.files.limits, 2 * int(sizes.max(initial=1))
        fitting = limits.threads * limits.most_bytes // largest
        threads = max(self.options.threads, min(limits.threads, fitting))
        in_threads(read_file, of_files, threads)
        return done(None)


class ZarrFolderLoadStrategy(PlannedLoadStrategy):
    """Loads arrays that are folders of chunk files, and removes them.

    Attributes:
        file_names: Matches the names of the files of an array. Others in its folder stay: a
            ShardedObject, or another tensor, may live in a folder below.
    """

    reader_type: ClassVar[type[ZarrFolderReader]]
    file_names: ClassVar[re.Pattern[str]]

    @abstractmethod
    def folders_of(self, tensor: StoredTensor) -> Iterable[str]:
        """The folders, relative to the checkpoint, in which the files of a tensor lie."""

    def stored_and_removed(
        self, root: Path, key_prefix: str
    ) -> tuple[Index, dict[str, tuple[str, ...]]]:
        """What is stored, and the folders of the tensors to remove.

        Among these are the tensors that a removal cut off has left.
        """
        index = self.reader_type(root).read_metadata()
        removed = {key: names for key, names in noted_removal(root).items() if key not in index}
        for key in index:
            if key.startswith(key_prefix):
                removed[key] = tuple(self.folders_of(index[key]))
        return index, removed

    def files_of(self, root: Path, removed: Mapping[str, Iterable[str]]) -> Iterator[str]:
        """The files of tensors to remove."""
        for folder in itertools.chain.from_iterable(removed.values()):
            if local_folder.is_real_folder(root / folder, root):
                for name in location.names_in(root / folder):
                    if self.file_names.fullmatch(name) and (root / folder / name).is_file():
                        yield f"{folder}/{name}"

    @abstractmethod
    def hide(self, root: Path, kept: Index, removed: Mapping[str, Iterable[str]]) -> None:
        """Make the checkpoint hold only what is ``kept``, durably, before files are deleted."""

    def remove_sharded_tensors(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> None:
        root = Path(checkpoint_dir)
        index, removed = self.stored_and_removed(root, key_prefix)
        if not removed and not noted_removal(root):
            return
        note_removal(root, removed)
        self.hide(root, index.without(removed), removed)
        location.remove_all(self.files_of(root, removed), root)
        for folder in sorted(root / name for names in removed.values() for name in names)[::-1]:
            if local_folder.is_real_folder(folder, root) and not any(folder.iterdir()):
                local_folder.remove(folder, root)
        location.remove_all([REMOVAL_NAME], root)

    def plan_removal(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> PlannedRemoval:
        root = Path(checkpoint_dir)
        index, removed = self.stored_and_removed(root, key_prefix)
        files = tuple(self.files_of(root, removed))
        keys = tuple(key for key in index if key in removed)
        return PlannedRemoval(keys, files, is_unfinished=bool(noted_removal(root)))
