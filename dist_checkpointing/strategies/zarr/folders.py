"""What both zarr formats share: an array is a folder of chunk files, handled in threads."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import checksum
from dist_checkpointing.format.claims import (
    MOST_COMPRESSION,
    Backing,
    Claim,
    require_backing,
    size_of_files,
)
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.protocol import (
    ChunkPlace,
    StorageReader,
    StorageWriter,
    WriteResult,
    done,
)
from dist_checkpointing.strategies.raw_chunks import (
    ChunkRead,
    Extent,
    fill,
    in_threads,
    read_chunks,
)
from dist_checkpointing.strategies.zarr.chunk_files import read_decoded
from dist_checkpointing.strategies.zarr.unpacking import Codec


@dataclass(frozen=True, slots=True)
class FileContent:
    """A small file that describes an array or group: path relative to the checkpoint, bytes."""

    name: str
    data: bytes


class ZarrFolderWriter(StorageWriter):
    """Writes chunk files and the files that describe the arrays."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._rank, self._world_size = 0, 1

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @abstractmethod
    def describe_array(self, tensor: StoredTensor) -> Iterable[FileContent]:
        """The files that say what the tensor's arrays are."""

    @abstractmethod
    def chunk_folder(self, tensor: StoredTensor, item: WriteItem) -> Path:
        """The folder of the array that an item belongs to."""

    @abstractmethod
    def write_item(self, tensor: StoredTensor, item: WriteItem, data: torch.Tensor) -> list[Path]:
        """Write the chunk files (or parts of them) of an item; returns their paths."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        index = plan.index
        assert index is not None
        # Any rank can describe any array, so each takes its share, also of those without chunks.
        keys = list(index)[self._rank :: self._world_size]
        described = [file for key in keys for file in self.describe_array(index[key])]
        items = [(index[item.index.fqn], item) for item in plan.items]
        folders = {self.checkpoint_dir / Path(file.name).parent for file in described}
        folders |= {self.chunk_folder(tensor, item) for tensor, item in items}
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)

        def describe(file: FileContent) -> Path:
            path = self.checkpoint_dir / file.name
            path.write_bytes(file.data)
            return path

        def write(task: tuple[StoredTensor, WriteItem]) -> tuple[WriteResult, list[Path]]:
            tensor, item = task
            data = planner.get_data(item)
            assert isinstance(data, torch.Tensor)
            digest, size = None, data.numel() * tensor.dtype.itemsize
            if self.options.checksum is Checksum.XXH3:
                data = data.detach().to("cpu").contiguous()
                digest = checksum(dtypes.as_numpy(data))
            paths = self.write_item(tensor, item, data)
            self.report(size)
            files = tuple(
                SealedFile(path.relative_to(self.checkpoint_dir).as_posix(), path.stat().st_size)
                for path in paths
            )
            return WriteResult(item.index, size, checksum=digest, files=files), paths

        threads = self.options.threads
        files = in_threads(describe, described, threads)
        written = in_threads(write, items, threads)
        files += [path for _, paths in written for path in paths]
        if self.options.durability is Durability.FSYNC:
            in_threads(local.fsync_file, files, threads)
            local.fsync_folders(files, self.checkpoint_dir)
        sealed = tuple(SealedFile.of_bytes(file.name, file.data) for file in described)
        nodes = WriteResult(MetadataIndex(""), 0, files=sealed)
        return done([*(result for result, _ in written), nodes])


class ZarrFolderReader(StorageReader):
    """Reads windows of chunk files, straight into the destination where that is possible."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._index = Index.of([])

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del rank, world_size
        self._index = metadata

    @abstractmethod
    def chunk_path(self, tensor: StoredTensor, chunk: MetadataIndex) -> Path:
        """The file of a stored chunk or piece."""

    def location(self, chunk: MetadataIndex) -> str:
        return str(self.chunk_path(self._index[chunk.fqn], chunk))

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        is_encoded = self.codec() is not None
        places: list[ChunkPlace | None] = []
        for chunk in chunks:
            tensor = self._index[chunk.fqn]
            path = self.chunk_path(tensor, chunk)
            num_bytes = stored_elements(tensor, chunk) * tensor.dtype.itemsize
            if is_encoded:
                num_bytes = path.stat().st_size if path.is_file() else 0
            name = path.relative_to(self.checkpoint_dir).as_posix()
            places.append(ChunkPlace(name, num_bytes, is_encoded))
        return places

    @abstractmethod
    def array_folder(self, key: str) -> Path:
        """The folder that holds everything of a tensor."""

    def require_stored(self, claims: Sequence[Claim], index: Index) -> None:
        growth = 1 if index.codec is None else MOST_COMPRESSION

        def files_of(claim: Claim) -> Backing:
            num_bytes, num_files = size_of_files(self.array_folder(claim.key))
            return Backing(num_bytes * growth, num_files, self.claimed_in(claim.key))

        require_backing(claims, files_of)

    def codec(self) -> Codec | None:
        """How the chunk files are encoded."""
        return None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        codec = self.codec()
        if codec is None:
            reads = [self._raw_read(item) for item in plan.items]
            maps_files = self.options.maps_files(self.checkpoint_dir)
            read_chunks(reads, planner, self.options, maps_files=maps_files, report=self.report)
            return done(None)
        by_chunk: dict[tuple[str, Ints | None, int | None], list[ReadItem]] = {}
        for item in plan.items:
            chunk = item.storage_index
            by_chunk.setdefault((chunk.fqn, chunk.offset, chunk.index), []).append(item)

        def read_chunk(items: Sequence[ReadItem]) -> None:
            chunk = items[0].storage_index
            tensor = self._index[chunk.fqn]
            count = stored_elements(tensor, chunk)
            path = self.chunk_path(tensor, chunk)
            values = read_decoded(path, codec, tensor.dtype, count, tensor.key)
            for item in items:
                self.report(fill(item, tensor.dtype, values, planner))

        in_threads(read_chunk, list(by_chunk.values()), self.options.threads)
        return done(None)

    def _raw_read(self, item: ReadItem) -> ChunkRead:
        chunk = item.storage_index
        tensor = self._index[chunk.fqn]
        num_bytes = stored_elements(tensor, chunk) * tensor.dtype.itemsize
        path = str(self.chunk_path(tensor, chunk))
        return ChunkRead(item, Extent(path, 0, num_bytes, num_bytes), tensor.dtype)


def stored_elements(tensor: StoredTensor, chunk: MetadataIndex) -> int:
    """Number of elements in the file of a chunk (full size, also at the edge) or piece."""
    if tensor.pieces is None:
        assert tensor.chunk_shape is not None
        return math.prod(tensor.chunk_shape)
    row = chunk.index
    start, stop = tensor.pieces.flat[row].tolist()
    return math.prod(tensor.pieces.shapes[row].tolist()) if start < 0 else stop - start
