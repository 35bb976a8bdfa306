"""Reads boxes from the database at the root of a checkpoint, straight into the destination."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.planning import LoadItemType, LoadPlan, LoadPlanner, MetadataIndex, ReadItem
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
from dist_checkpointing.strategies.tensorstore import database, keys
from dist_checkpointing.strategies.tensorstore.locations import Places, locate


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
        with paused_collector():
            reads = self._located(plan, planner)
        maps_files = self.options.maps_files(self.checkpoint_dir)
        read_chunks(reads, planner, self.options, maps_files=maps_files, report=self.report)
        return done(None)

    def _located(self, plan: LoadPlan, planner: LoadPlanner) -> list[ChunkRead]:
        """Where the chunks lie; objects, and what the tree itself holds, are filled right away."""
        wanted = [(item, self._key(item.storage_index)) for item in plan.items]
        places = self._places_of({key for _, key in wanted})
        reads = []
        for item, key in wanted:
            place = places.get(key)
            if place is None:
                raise self._corrupt(
                    item, "a chunk is missing", path=f"{self.checkpoint_dir}: {key}"
                )
            if item.type is LoadItemType.BYTE_IO:
                self._read_object(item, key, place, planner)
                continue
            tensor = self._index[item.storage_index.fqn]
            self._check_size(item, tensor, key, place)
            if isinstance(place, Extent):
                reads.append(ChunkRead(item, place, tensor.dtype))
            else:
                values = np.frombuffer(place, dtype=tensor.dtype.bits)
                self.report(fill(item, tensor.dtype, values, planner))
        return reads

    def _places_of(self, keys: set[str]) -> Mapping[str, Extent | bytes]:
        if not keys:
            return {}
        return self._places.of(keys) if self.is_kept else locate(self.checkpoint_dir, keys)

    def _part(self, chunk: MetadataIndex) -> tuple[StoredTensor, Box, tuple[int, int] | None]:
        tensor = self._index[chunk.fqn]
        assert chunk.offset is not None
        if tensor.pieces is None:
            return tensor, tensor.grid.box(tensor.grid.index_at(chunk.offset)), None
        assert chunk.index is not None
        return tensor, *tensor.pieces[chunk.index]

    def _key(self, chunk: MetadataIndex) -> str:
        if chunk.fqn in self._index.objects:
            assert chunk.offset is not None
            return keys.object_key(chunk.fqn, chunk.offset, self._index.objects[chunk.fqn])
        return keys.chunk_key(*self._part(chunk))

    def _check_size(
        self, item: ReadItem, tensor: StoredTensor, key: str, place: Extent | bytes
    ) -> None:
        if tensor.chunk_shape is not None:
            count = math.prod(tensor.chunk_shape)
        else:
            _, box, flat = self._part(item.storage_index)
            count = box.num_elements if flat is None else flat[1] - flat[0]
        expected = count * tensor.dtype.itemsize
        found = place.num_bytes if isinstance(place, Extent) else len(place)
        if found != expected:
            raise self._corrupt(
                item,
                "a chunk has the wrong size",
                expected=f"{expected} bytes",
                found=found,
                path=place.path if isinstance(place, Extent) else f"{self.checkpoint_dir}: {key}",
            )

    def _read_object(
        self, item: ReadItem, key: str, place: Extent | bytes, planner: LoadPlanner
    ) -> None:
        fqn = item.storage_index.fqn
        data = read_extent(place, fqn) if isinstance(place, Extent) else place
        where = f"{self.checkpoint_dir}: {key}"
        planner.apply_bytes(item, deserialize(data, where, trusted=self.trusted))

    def _corrupt(self, item: ReadItem, problem: str, **details: Any) -> CorruptCheckpointError:
        finding = Finding(problem, item.storage_index.fqn, **details)
        return CorruptCheckpointError("the checkpoint is damaged", [finding])
