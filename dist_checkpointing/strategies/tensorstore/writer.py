"""Writes values into data files of this rank; rank 0 writes the tree that says where they are."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.index import INDEX_NAME, Index, write_index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.strategies.base_parts import PlanDigests
from dist_checkpointing.strategies.tensorstore import keys
from dist_checkpointing.strategies.tensorstore.data_files import LARGE_BYTES, DataFiles
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import Extents
from dist_checkpointing.strategies.tensorstore.row_writer import RowWriter
from dist_checkpointing.strategies.tensorstore.shared_values import SharedValues, share_values
from dist_checkpointing.strategies.tensorstore.sparse_files import settle
from dist_checkpointing.strategies.tensorstore.tree_file import (
    StoredValues,
    merged_values,
    write_tree,
)
from dist_checkpointing.threads import paused_collector

_MOST_THREADS = 2
_LEAST_BYTES_A_THREAD = 64 * 2**20


class TensorStoreWriter(StorageWriter):
    """Writes zarr v3 arrays and objects as one OCDBT database."""

    layout: RowBlockLayout = RowBlockLayout()
    shares_files: ClassVar[bool] = True
    uses_object_stores: ClassVar[bool] = True

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del index, world_size
        return [INDEX_NAME, CHECKSUMS_NAME, *keys.CREATED_NAMES]

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        table, index = plan.table, plan.index
        assert index is not None
        if not len(table):
            return done([])
        known, reused = PlanDigests(plan, planner, self.options), SharedValues.none()
        if self.base is not None:
            is_alone = self._world_size == 1
            reused = share_values(self, self.base, plan, known, is_alone=is_alone)
            self.report(int(table.num_bytes[reused.rows].sum()))
        with paused_collector():
            row_keys = keys.keys_to_write(table, index)
            key_lengths = np.fromiter(map(len, row_keys), dtype=np.uint16)
            joined_keys = b"".join(row_keys)
            del row_keys
            shares = list(self._shares(table, reused))
        most_pending = max(1, self.options.buffer_bytes // max(1, len(shares)))
        has_checksums = self.options.checksum is Checksum.XXH3
        rows = RowWriter(plan, planner, known, has_checksums=has_checksums)

        is_cancelled = False

        def report(num_bytes: int) -> None:
            if is_cancelled:
                raise InterruptedError("the save was cancelled")
            self.report(num_bytes)

        def write(share: _Share) -> tuple[DataFiles, list[SealedFile]]:
            folder = f"{keys.DATA_FOLDER}/{keys.DATA_GROUPS[share.group]}"
            location.make_folder(self.checkpoint_dir / folder)
            stem = f"{folder}/{self._rank}.{share.number}-{uuid.uuid4().hex[:8]}"
            files = DataFiles(self.checkpoint_dir, stem, self.options, most_pending, report)
            try:
                rows.write(share.rows, files, most_pending)
                return files, files.finish()
            except BaseException:
                files.give_up()
                raise

        with ThreadPoolExecutor(min(_MOST_THREADS, self.options.threads), "data-files") as pool:
            try:
                # A thread costs more than a small share.
                written = list((pool.map if len(shares) > 1 else map)(write, shares))
            except BaseException:
                is_cancelled = True  # the others stop at what they write next
                raise
        extents = Extents(*np.empty((3, len(table)), dtype=np.int64))
        names: list[str] = []
        for share, (files, _) in zip(shares, written, strict=True):
            extents.file[share.rows] = np.array(files.file) + len(names)
            extents.offset[share.rows], extents.length[share.rows] = files.offset, files.length
            names += files.names
        extents.file[reused.rows] = reused.extents.file + len(names)
        extents.offset[reused.rows] = reused.extents.offset
        extents.length[reused.rows] = reused.extents.length
        names += [file.name for file in reused.files]
        results = WriteResults(
            table,
            extents.length,
            rows.digests[:, 1],
            None if rows.has_checksums else table.is_object,
            tuple(file for _, sealed in written for file in sealed),
            StoredValues(tuple(names), joined_keys, key_lengths, extents, reused.files),
            rows.digests[:, 0] if rows.has_checksums else None,
        )
        return done(results)  # type: ignore[arg-type]

    def _shares(self, table: ShardTable, reused: SharedValues) -> Iterator[_Share]:
        """The work, of each data group on one thread, or on several of about the same bytes."""
        # What has not changed may stay so: in files of its own it can be shared the next time.
        age = np.zeros(len(table), dtype=np.int64)
        age[reused.steady], age[reused.rows] = 1, 2
        groups = np.array([keys.group_of(name) for name in table.names])[table.keys]
        # A removal keeps objects: they must not hold on to the files of an optimizer's tensors.
        groups[table.is_object] = keys.DATA_GROUPS.index("model")
        sizes = table.num_bytes
        kinds = 3 * groups + age
        for kind in np.unique(kinds[age < 2]).tolist():
            group, own = kind // 3, kinds == kind
            small = np.flatnonzero(own & (sizes < LARGE_BYTES))
            large = np.flatnonzero(own & (sizes >= LARGE_BYTES))
            count = min(_MOST_THREADS, self.options.threads // 2)
            count = max(1, min(count, int(sizes[large].sum()) // _LEAST_BYTES_A_THREAD))
            shares: list[list[int]] = [[] for _ in range(count)]
            loads = [0] * count
            for row, size in zip(large.tolist(), sizes[large].tolist(), strict=True):
                least = loads.index(min(loads))
                shares[least].append(row)
                loads[least] += size
            for number, rows in enumerate(shares):
                # Large values first: these begin at the beginning of a page more often.
                last = small.tolist() if number == 0 else []
                yield _Share(group, number, np.array(rows + last, dtype=np.int64))

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> list[SealedFile]:
        stored = [result.storage_data for of_rank in results for result in of_rank]
        parts = [values for values in stored if isinstance(values, StoredValues)]
        durability, folder = self.options.durability, self.checkpoint_dir
        files_of_base: list[SealedFile] = []
        if self.base is not None:
            parts, files_of_base = settle(folder, parts, self.options)
        if durability is Durability.FSYNC:
            files = [folder / name for values in parts for name in values.files]
            location.fsync_folders(files, folder)
        with paused_collector():
            tree = write_tree(folder, *merged_values(parts, metadata), durability)
        return [*files_of_base, *tree, write_index(metadata, folder, durability)]


@dataclass(frozen=True, slots=True)
class _Share:
    """What one thread writes.

    Attributes:
        group: Data group that all of it belongs to.
        number: Number of the share in its group.
        rows: Rows of the plan.
    """

    group: int
    number: int
    rows: Int64s
