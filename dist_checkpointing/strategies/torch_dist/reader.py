"""Reads boxes out of the records of .distcp files, straight into the destination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.ranged_reads import OpenFile, open_file
from dist_checkpointing.format.geometry import Ints, padded_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.planning import (
    Destinations,
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    ReadTable,
)
from dist_checkpointing.storage.interface import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.raw_chunks import damaged
from dist_checkpointing.strategies.torch_archive import BadRecord
from dist_checkpointing.strategies.torch_dist.contents import PlacedIndex, placed_index
from dist_checkpointing.strategies.torch_dist.metadata import Place, read_dcp_metadata
from dist_checkpointing.strategies.torch_dist.stored_values import (
    SMALL_BYTES,
    OpenRecord,
    RecordValues,
    read_object,
)
from dist_checkpointing.threads import in_threads

_BATCH_RECORDS = 64


class TorchDistReader(StorageReader):
    """Reads what torch DCP, Megatron-Core and TorchDistWriter write."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._index = PlacedIndex([], [], [], [])

    def read_metadata(self) -> PlacedIndex:
        return placed_index(read_dcp_metadata(self.checkpoint_dir), self.checkpoint_dir)

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del rank, world_size
        # An index that a planner has made does not say where the chunks are.
        self._index = metadata if isinstance(metadata, PlacedIndex) else self.read_metadata()

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        del wanted
        return [DCP_METADATA_NAME]

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        name = ShardedObject(key, None, self._index.objects[key], cell).unique_key
        place = self._index.place(self._index.cell_rows[name])
        try:
            with open_file(self.checkpoint_dir, place.file) as file:
                record = OpenRecord(file, place)
                return bytes(record.read(0, record.length))
        except (BadRecord, EOFError, FileNotFoundError) as error:
            raise damaged(self._where(place), key, f"cannot be read: {error}") from error

    def claimed_in(self, key: str) -> str:
        del key
        return str(self.checkpoint_dir / DCP_METADATA_NAME)

    def location(self, chunk: MetadataIndex) -> str:
        return self._where(self._index.place(self._index.row(chunk)))

    def _where(self, place: Place) -> str:
        return f"{self.checkpoint_dir / place.file}, bytes from {place.offset} on"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        found = (self._index.place(self._index.row(chunk)) for chunk in chunks)
        return [ChunkPlace(p.file, p.length, p.length <= SMALL_BYTES) for p in found]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_record: dict[int, list[int]] = {}
        for row, record in enumerate(self._index.records(plan.table).tolist()):
            by_record.setdefault(record, []).append(row)
        batches = list(self._batches(by_record))
        self._require_files({file for file, _ in batches}, by_record, plan.table)
        table = _ending_at_the_edge(plan.table, self._index)
        limits = self.files.limits
        filler = Filler(plan, planner, self._index, limits, table=table)
        destinations = planner.destinations(plan)

        def read_batch(batch: tuple[str, list[int]]) -> None:
            name, records = batch
            begin, last = (self._index.place(records[end]) for end in (0, -1))
            span = last.offset + last.length - begin.offset
            wanted = filler.num_bytes[[row for record in records for row in by_record[record]]]
            with self.files.open(name) as file:
                if len(records) > 1 or 2 * int(wanted.sum()) > span:
                    file.expect(begin.offset, span)
                for record in records:
                    self._read_record(file, record, by_record[record], filler, destinations)

        in_threads(read_batch, batches, limits.threads)
        return done(None)

    def _batches(self, rows: Iterable[int]) -> Iterator[tuple[str, list[int]]]:
        """The rows file by file, in the order in which they lie there, a few at a time."""
        places, most_gap = self._index.places, self.files.limits.gap_bytes
        batch: list[int] = []
        for row in sorted(rows, key=lambda row: tuple(places[row].tolist())):
            if batch and (
                places[row, 0] != places[batch[0], 0]
                or len(batch) == _BATCH_RECORDS
                or places[row, 2] > SMALL_BYTES
                or places[row, 1] - places[batch[-1], 1] > SMALL_BYTES + most_gap
            ):
                yield self._index.place(batch[0]).file, batch
                batch = []
            batch.append(row)
        if batch:
            yield self._index.place(batch[0]).file, batch

    def _require_files(
        self, files: set[str], by_record: dict[int, list[int]], table: ReadTable
    ) -> None:
        missing = {file for file in files if self.files.size_of(file) is None}
        if not missing:
            return
        keys: dict[str, set[str]] = {file: set() for file in missing}
        for record, rows in by_record.items():
            file = self._index.place(record).file
            if file in missing:
                keys[file].add(table.key(rows[0]))
        findings = [
            Finding("its file is missing", key, path=str(self.checkpoint_dir / file))
            for file in sorted(missing)
            for key in sorted(keys[file])
        ]
        raise CorruptCheckpointError("the checkpoint is damaged", findings)

    def _read_record(
        self,
        file: OpenFile,
        number: int,
        rows: Sequence[int],
        filler: Filler,
        destinations: Destinations,
    ) -> None:
        place, chunk = self._index.place(number), filler.table.chunk(rows[0])
        try:
            record = OpenRecord(file, place)
            if filler.table.is_object[rows[0]]:
                value = read_object(record, self._where(place), trusted=self.trusted)
                for row in rows:
                    destinations.apply_bytes(row, value)
                return
            tensor = self._index[chunk.fqn]
            values = RecordValues(record, tensor, _stored_shape(tensor, chunk))
            for row in rows:
                self.report(values.fill(row, filler))
        except (BadRecord, EOFError) as error:
            problem = f"a record cannot be read: {error}"
            raise damaged(self._where(place), chunk.fqn, problem) from error


def _ending_at_the_edge(table: ReadTable, index: Index) -> ReadTable:
    """The rows as they lie here: a plan takes the chunks at the edge of a grid for full ones."""
    rows = np.flatnonzero((table.pieces < 0) & ~table.is_object)
    shapes, _ = index.shapes_of([table.names[key] for key in table.keys[rows].tolist()])
    width = table.lengths.shape[1]
    whole = padded_rows(shapes, 1, width)[:, :width]
    ends = table.storage_shapes.copy()
    ends[rows] = np.minimum(ends[rows], whole - table.chunk_offsets[rows])
    return replace(table, storage_shapes=ends)


def _stored_shape(tensor: StoredTensor, chunk: MetadataIndex) -> Ints:
    """The shape of the array in the record of a chunk; a flattened piece is seen without axes."""
    if tensor.pieces is None:
        assert chunk.offset is not None
        return tensor.grid.box(tensor.grid.index_at(chunk.offset)).shape
    assert chunk.index is not None
    box, flat = tensor.pieces[chunk.index]
    return box.shape if flat is None else (flat[1] - flat[0],)
