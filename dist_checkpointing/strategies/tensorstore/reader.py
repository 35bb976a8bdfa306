"""Reads boxes from the database at the root of a checkpoint, straight into the destination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex
from dist_checkpointing.planning.read_table import reads_of, stored_elements
from dist_checkpointing.storage.protocol import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.raw_chunks import (
    SMALL_BYTES,
    ChunkReads,
    Extent,
    read_chunks,
    read_extent,
)
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.tensorstore import database, keys
from dist_checkpointing.strategies.tensorstore.locations import Places, locate
from dist_checkpointing.strategies.zarr_v3_nodes import chunk_keys_to_read


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
        if not local.is_file(self.checkpoint_dir / database.MANIFEST_NAME):
            path = str(self.checkpoint_dir / database.MANIFEST_NAME)
            raise CorruptCheckpointError("the database is gone", [Finding("missing", path=path)])

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        names = [*super().describing_names(wanted)]
        has_database = (self.checkpoint_dir / database.MANIFEST_NAME).exists()
        return [*names, database.MANIFEST_NAME] if has_database else names

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        name = keys.object_key(key, cell, self._index.objects[key])
        place = self._places_of({name}).get(name)
        if place is None:
            finding = Finding("an object is missing", key, path=f"{self.checkpoint_dir}: {name}")
            raise CorruptCheckpointError("the checkpoint is damaged", [finding])
        return read_extent(place, key) if isinstance(place, Extent) else place

    def location(self, chunk: MetadataIndex) -> str:
        key = self._key(chunk)
        place = self._places_of({key}).get(key)
        if isinstance(place, Extent):
            return f"{place.path}, {place.num_bytes} bytes from {place.offset}"
        return f"{self.checkpoint_dir} (OCDBT), {key}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        names = [self._key(chunk) for chunk in chunks]
        found = self._places_of(set(names))
        return [self._place(found.get(name)) for name in names]

    def _place(self, place: Extent | bytes | None) -> ChunkPlace | None:
        if isinstance(place, Extent):
            name = Path(place.path).relative_to(self.checkpoint_dir).as_posix()
            # Small neighbours share a read.
            return ChunkPlace(name, place.num_bytes, place.num_bytes <= SMALL_BYTES)
        return None if place is None else ChunkPlace(None, len(place), is_read_whole=True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        options = self.options
        filler = Filler(
            plan,
            planner,
            self._index,
            max(1, options.buffer_bytes // options.threads),
            maps_files=self.maps_files,
        )
        with paused_collector():
            reads = self._located(plan, planner, filler)
        read_chunks(reads, filler, options, report=self.report)
        return done(None)

    def _located(self, plan: LoadPlan, planner: LoadPlanner, filler: Filler) -> ChunkReads:
        """Where the chunks lie; objects, and what the tree itself holds, are filled right away."""
        table = plan.table
        objects = np.flatnonzero(table.is_object).tolist()
        tensors = np.flatnonzero(~table.is_object)
        chunks = table.take(tensors) if objects else table
        names = chunk_keys_to_read(chunks, self._index)
        cells = [self._key(table.chunk(row)) for row in objects]
        places = self._places_of({*names, *cells})
        destinations = planner.destinations(plan)
        for row, name in zip(objects, cells, strict=True):
            data = self._place_of(places, table.key(row), name)
            if isinstance(data, Extent):
                data = read_extent(data, table.key(row))
            where = f"{self.checkpoint_dir}: {name}"
            destinations.apply_bytes(row, deserialize(data, where, trusted=self.trusted))
        itemsizes = [
            self._index.dtype_of(name).itemsize if name in self._index else 0
            for name in table.names
        ]
        sizes = (
            stored_elements(chunks, self._index) * np.array(itemsizes, dtype=np.int64)[chunks.keys]
        )
        files: dict[str, int] = {}
        found: list[tuple[int, int, int, int]] = []
        for row, name, size in zip(tensors.tolist(), names, sizes.tolist(), strict=True):
            place = self._place_of(places, table.key(row), name)
            self._check_size(table.key(row), size, name, place)
            if isinstance(place, Extent):
                found.append((row, files.setdefault(place.path, len(files)), place.offset, size))
            else:
                self.report(filler.fill(row, np.frombuffer(place, dtype=np.uint8)))
        rows, numbers, offsets, lengths = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return ChunkReads(rows, list(files), numbers, offsets, lengths)

    def _place_of(
        self, places: Mapping[str, Extent | bytes], key: str, name: str
    ) -> Extent | bytes:
        place = places.get(name)
        if place is None:
            raise self._corrupt(key, "a chunk is missing", path=f"{self.checkpoint_dir}: {name}")
        return place

    def _places_of(self, keys: set[str]) -> Mapping[str, Extent | bytes]:
        if not keys:
            return {}
        return self._places.of(keys) if self.is_kept else locate(self.checkpoint_dir, keys)

    def _key(self, chunk: MetadataIndex) -> str:
        if chunk.fqn in self._index.objects:
            assert chunk.offset is not None
            return keys.object_key(chunk.fqn, chunk.offset, self._index.objects[chunk.fqn])
        return chunk_keys_to_read(reads_of([chunk], self._index), self._index)[0]

    def _check_size(self, key: str, expected: int, name: str, place: Extent | bytes) -> None:
        found = place.num_bytes if isinstance(place, Extent) else len(place)
        if found != expected:
            raise self._corrupt(
                key,
                "a chunk has the wrong size",
                expected=f"{expected} bytes",
                found=found,
                path=place.path if isinstance(place, Extent) else f"{self.checkpoint_dir}: {name}",
            )

    def _corrupt(self, key: str, problem: str, **details: Any) -> CorruptCheckpointError:
        finding = Finding(problem, key, **details)
        return CorruptCheckpointError("the checkpoint is damaged", [finding])
