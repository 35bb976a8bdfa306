"""Reads boxes from the database at the root of a checkpoint, straight into the destination."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format import element_types
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.ocdbt.manifest import MANIFEST_NAME
from dist_checkpointing.format.ocdbt.tree_reader import ABSENT, INLINE, Values
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex
from dist_checkpointing.planning.read_table import ReadTable
from dist_checkpointing.planning.shard_table import Int32s, Int64s
from dist_checkpointing.storage.protocol import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies.raw_chunks import (
    SMALL_BYTES,
    ChunkRead,
    Extent,
    fill,
    read_chunks,
    read_extent,
)
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.tensorstore import keys
from dist_checkpointing.strategies.tensorstore.places import Places


class TensorStoreReader(StorageReader):
    """Reads what TensorStoreWriter wrote."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._places = Places(checkpoint_dir)

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del rank, world_size
        self._index = metadata
        if not (metadata or metadata.objects):
            return  # nothing was saved, so no database was made
        if not local.is_file(self.checkpoint_dir / MANIFEST_NAME):
            path = str(self.checkpoint_dir / MANIFEST_NAME)
            raise CorruptCheckpointError("the database is gone", [Finding("missing", path=path)])

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        names = [*super().describing_names(wanted)]
        has_database = (self.checkpoint_dir / MANIFEST_NAME).exists()
        return [*names, MANIFEST_NAME] if has_database else names

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        name = keys.object_key(key, cell, self._index.objects[key])
        place = self._find_one(name.encode())
        if place is None:
            finding = Finding("an object is missing", key, path=f"{self.checkpoint_dir}: {name}")
            raise CorruptCheckpointError("the checkpoint is damaged", [finding])
        return read_extent(place, key) if isinstance(place, Extent) else place

    def location(self, chunk: MetadataIndex) -> str:
        (key,) = self._keys([chunk])
        place = self._find_one(key)
        if isinstance(place, Extent):
            return f"{place.path}, {place.num_bytes} bytes from {place.offset}"
        return f"{self.checkpoint_dir} (OCDBT), {key.decode()}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        values = self._find(self._keys(chunks))
        columns = (values.extents.file.tolist(), values.extents.length.tolist())
        places: list[ChunkPlace | None] = []
        for file, length in zip(*columns, strict=True):
            if file == ABSENT:
                places.append(None)
            elif file == INLINE:
                places.append(ChunkPlace(None, length, is_read_whole=True))
            else:
                # Small neighbours share a read.
                places.append(ChunkPlace(values.files[file], length, length <= SMALL_BYTES))
        return places

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with paused_collector():
            reads = self._located(plan, planner)
        maps_files = self.options.maps_files(self.checkpoint_dir)
        read_chunks(reads, planner, self.options, maps_files=maps_files, report=self.report)
        return done(None)

    def _located(self, plan: LoadPlan, planner: LoadPlanner) -> list[ChunkRead]:
        """Where the chunks lie; objects, and what the tree itself holds, are filled right away."""
        table = plan.table
        starts, sizes = self._stored(table.names, table.keys, table.pieces)
        row_keys = keys.value_keys(
            self._index, table.names, table.keys, table.ndim, table.chunk_offsets, starts
        )
        values = self._find(row_keys)
        self._check(table, row_keys, values, sizes)
        extents = values.extents
        paths = [str(self.checkpoint_dir / name) for name in values.files]
        destinations = planner.destinations(plan)
        columns = (extents.file.tolist(), extents.offset.tolist(), extents.length.tolist())
        reads = []
        for row, (file, offset, length) in enumerate(zip(*columns, strict=True)):
            place = values.inline[row] if file == INLINE else Extent(paths[file], offset, length)
            key = table.key(row)
            if table.is_object[row]:
                data = read_extent(place, key) if isinstance(place, Extent) else place
                where = f"{self.checkpoint_dir}: {row_keys[row].decode()}"
                value = deserialize(data, where, trusted=self.trusted)
                destinations.apply_bytes(row, value)
                continue
            dtype = self._index[key].dtype
            item = table.item(row)
            if isinstance(place, Extent):
                reads.append(ChunkRead(item, place, dtype))
            else:
                bits = np.frombuffer(place, dtype=dtype.bits)
                self.report(fill(item, dtype, bits, planner))
        return reads

    def _stored(
        self, names: Sequence[str], numbers: Int32s, pieces: Int64s
    ) -> tuple[Int64s, Int64s]:
        """Where flattened pieces begin (-1 for all else), and bytes that are stored.

        Args:
            names: keys of tensors and objects.
            numbers: of each row, position in ``names``.
            pieces: of each row, which piece of its tensor; -1 on a chunk grid.
        """
        index = self._index
        whole = np.zeros(len(names), dtype=np.int64)
        starts = np.full(len(numbers), -1, dtype=np.int64)
        sizes = np.zeros(len(numbers), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            name = names[number]
            if name not in index:
                continue
            chunk, table = index.chunk_shape(name), index.pieces.get(name)
            itemsize = element_types.from_name(index.dtype_name(name)).itemsize
            if chunk is not None:
                whole[number] = math.prod(chunk) * itemsize
            elif table is not None:
                rows = np.flatnonzero(numbers == number)
                flat = table.flat[pieces[rows]]
                starts[rows] = flat[:, 0]
                boxes = table.shapes[pieces[rows]].prod(axis=1)
                counts = np.where(flat[:, 0] < 0, boxes, flat[:, 1] - flat[:, 0])
                sizes[rows] = counts * itemsize
        return starts, np.where(pieces < 0, whole[numbers], sizes)

    def _check(
        self, table: ReadTable, row_keys: Sequence[bytes], values: Values, sizes: Int64s
    ) -> None:
        """Make sure that all values are there, and as large as they must be."""
        extents = values.extents
        is_absent = extents.file == ABSENT
        findings = [
            Finding(
                "a chunk is missing",
                table.key(row),
                path=f"{self.checkpoint_dir}: {row_keys[row].decode()}",
            )
            for row in np.flatnonzero(is_absent).tolist()
        ]
        wrong = ~is_absent & ~table.is_object & (extents.length != sizes)
        for row in np.flatnonzero(wrong).tolist():
            file = int(extents.file[row])
            findings.append(
                Finding(
                    "a chunk has the wrong size",
                    table.key(row),
                    expected=f"{sizes[row]} bytes",
                    found=int(extents.length[row]),
                    path=f"{self.checkpoint_dir}: {row_keys[row].decode()}"
                    if file == INLINE
                    else str(self.checkpoint_dir / values.files[file]),
                )
            )
        if findings:
            raise CorruptCheckpointError("the checkpoint is damaged", findings)

    def _keys(self, chunks: Sequence[MetadataIndex]) -> list[bytes]:
        """The keys of stored chunks, pieces and cells."""
        numbers = {name: n for n, name in enumerate(dict.fromkeys(c.fqn for c in chunks))}
        offsets = [chunk.offset or () for chunk in chunks]
        width = max(map(len, offsets), default=0)
        of_rows = np.array([numbers[chunk.fqn] for chunk in chunks], dtype=np.int32)
        pieces = np.array([-1 if c.index is None else c.index for c in chunks], dtype=np.int64)
        starts, _ = self._stored(tuple(numbers), of_rows, pieces)
        padded = [(*offset, *(0,) * (width - len(offset))) for offset in offsets]
        places = np.array(padded, dtype=np.int64).reshape(len(chunks), width)
        ndim = np.array([len(offset) for offset in offsets], dtype=np.int32)
        return keys.value_keys(self._index, tuple(numbers), of_rows, ndim, places, starts)

    def _find(self, wanted: Sequence[bytes]) -> Values:
        return self._places.find(wanted, keeps_nodes=self.is_kept)

    def _find_one(self, key: bytes) -> Extent | bytes | None:
        values = self._find([key])
        file, offset, length = (int(column[0]) for column in values.extents.columns)
        if file == ABSENT:
            return None
        if file == INLINE:
            return values.inline[0]
        return Extent(str(self.checkpoint_dir / values.files[file]), offset, length)
