"""Writes values into data files of this rank; rank 0 writes the tree that says where they are."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, compress, groupby, islice
from operator import eq, itemgetter
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import local
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.digests import NO_DIGEST, Digest, columns_of, digest_of
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import INDEX_NAME, Index, write_index
from dist_checkpointing.format.ocdbt.nodes import Extents
from dist_checkpointing.format.ocdbt.tree_reader import INLINE
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.host_blocks import HostBlocks, is_on_gpu
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.protocol import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.strategies.base_parts import PlanDigests
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.tensorstore import keys
from dist_checkpointing.strategies.tensorstore.data_files import LARGE_BYTES, Array, DataFiles
from dist_checkpointing.strategies.tensorstore.shared_values import SharedValues, share_values
from dist_checkpointing.strategies.tensorstore.sparse_files import Stored, settle
from dist_checkpointing.strategies.tensorstore.tree_file import write_tree

_MOST_THREADS = 2
_LEAST_BYTES_A_THREAD = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Where values are, as columns.

    Attributes:
        files: relative paths of data files.
        keys: keys in the database, joined.
        key_lengths: bytes of each.
        extents: of the values; ``file`` is a position in ``files``.
        shared: those of the files that are shared with the base.
    """

    files: tuple[str, ...]
    keys: bytes
    key_lengths: npt.NDArray[np.uint16]
    extents: Extents
    shared: tuple[SealedFile, ...] = ()

    def key_list(self) -> list[bytes]:
        """The keys one by one."""
        stops = np.cumsum(self.key_lengths, dtype=np.int64).tolist()
        starts = [0, *stops[:-1]]
        return [self.keys[start:stop] for start, stop in zip(starts, stops, strict=True)]


class TensorStoreWriter(StorageWriter):
    """Writes zarr v3 arrays and objects as one OCDBT database."""

    gathers_results: ClassVar[bool] = True
    shares_files: ClassVar[bool] = True

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
            shares = list(self._shares(table, reused))
        most_pending = max(1, self.options.buffer_bytes // max(1, len(shares)))
        has_checksums = self.options.checksum is Checksum.XXH3
        rows = _Rows(plan, planner, index, known, has_checksums=has_checksums)

        def write(share: _Share) -> tuple[DataFiles, list[SealedFile]]:
            folder = Path(keys.DATA_FOLDER, keys.DATA_GROUPS[share.group])
            (self.checkpoint_dir / folder).mkdir(parents=True, exist_ok=True)
            stem = str(folder / f"{self._rank}.{share.number}-{uuid.uuid4().hex[:8]}")
            files = DataFiles(self.checkpoint_dir, stem, self.options, most_pending, self.report)
            try:
                rows.write(share.rows, files, most_pending)
                return files, files.finish()
            except BaseException:
                files.give_up()
                raise

        with ThreadPoolExecutor(min(_MOST_THREADS, self.options.threads), "data-files") as pool:
            written = list(pool.map(write, shares))
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
        lengths = np.fromiter(map(len, row_keys), dtype=np.uint16)
        results = WriteResults(
            table,
            extents.length,
            rows.digests[:, 1],
            None if rows.has_checksums else table.is_object,
            tuple(file for _, sealed in written for file in sealed),
            StoredValues(tuple(names), b"".join(row_keys), lengths, extents, reused.files),
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
        shared = {file.name: file for values in parts for file in values.shared}
        files_of_base: list[SealedFile] = []
        if self.base is not None:
            places = [Stored(values.files, values.extents) for values in parts]
            places, files_of_base = settle(folder, places, shared, self.options)
            parts = [
                replace(values, files=place.files, extents=place.extents)
                for values, place in zip(parts, places, strict=True)
            ]
        if durability is Durability.FSYNC:
            files = [folder / name for values in parts for name in values.files]
            local.fsync_folders(files, folder)
        with paused_collector():
            write_tree(folder, *_joined(parts, metadata), durability)
        write_index(metadata, folder, durability)
        return files_of_base


@dataclass(frozen=True, slots=True)
class _Share:
    """What one thread writes.

    Attributes:
        group: data group that all of it belongs to.
        number: of the share in its group.
        rows: of the plan.
    """

    group: int
    number: int
    rows: Int64s


class _Rows:
    """Writes the values of rows of a plan to data files.

    Attributes:
        digests: ``[rows, 2]``, upper halves and checksums of the rows that were written, and of
            those that were known.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        index: Index,
        known: PlanDigests,
        *,
        has_checksums: bool,
    ) -> None:
        table = plan.table
        self.has_checksums = has_checksums
        self.digests = known.columns
        # What a planner makes once more may be something else.
        self._known = None if planner.makes_data or not known.known.any() else known
        self._table = table
        self._index = index
        self._data_of = planner.data_of(plan)
        self._is_object = table.is_object.tolist()
        self._is_edge = _edges(table, index).tolist()

    def write(self, rows: Int64s, files: DataFiles, most_bytes: int) -> None:
        """Write some rows; several threads may do so.

        Args:
            rows: to write.
            files: get the values.
            most_bytes: memory for copies of tensors on GPUs.
        """
        data_of, is_object, put = self._data_of, self._is_object, self._put
        digests: list[bytes] = []
        left = iter(rows.tolist())
        for row in left:
            data = data_of(row)
            if is_object[row]:
                digests.append(self._put_object(row, data, files))
                continue
            assert isinstance(data, torch.Tensor)
            array = _in_place(data)
            if array is None:
                self._write_copies(row, data, left, files, digests, most_bytes)
                break
            digests.append(put(row, array, files))
        self.digests[rows] = columns_of(digests)

    def _put_object(self, row: int, data: object, files: DataFiles) -> bytes:
        value = serialize(data, f"the ShardedObject {self._table.key(row)!r}")
        files.put(value, len(value), 0)
        return digest_of(value, len(value))

    def _put(self, row: int, array: Array, files: DataFiles) -> bytes:
        """Add a chunk and give its digest."""
        size, is_edge = array.nbytes, self._is_edge[row]
        known = NO_DIGEST if not self.has_checksums else None
        if known is None and self._known is not None:
            known = self._known.digest(row)
        if size >= LARGE_BYTES and not is_edge:
            if known is not None:
                files.put_large(array, size, None)
                return known
            digest = Digest()
            files.put_large(array, size, digest)
            return digest.digest()
        checksum = known or digest_of(array, size)
        if is_edge:
            array = self._padded(row, array)
        if array.nbytes >= LARGE_BYTES:
            files.put_large(array, size, None)
        else:
            files.put(array, array.nbytes, size)
        return checksum

    def _write_copies(
        self,
        first: int,
        data: torch.Tensor,
        left: Iterator[int],
        files: DataFiles,
        digests: list[bytes],
        most_bytes: int,
    ) -> None:
        """Write the first of some rows that is not in place, and those that are left.

        Of tensors on GPUs the next block is copied while one is written.
        """
        asked: deque[tuple[int, object]] = deque()

        def tensors() -> Iterator[torch.Tensor]:
            asked.append((first, data))
            yield data
            for row in left:
                given = self._data_of(row)
                asked.append((row, given))
                yield given if isinstance(given, torch.Tensor) else torch.empty(0)

        copies = HostBlocks(most_bytes, files.flush).of(tensors())
        for _, numbered in groupby(copies, key=itemgetter(0)):
            row, given = asked.popleft()
            blocks = (block for _, block in numbered)
            if self._is_object[row]:
                next(blocks)
                digests.append(self._put_object(row, given, files))
                continue
            assert isinstance(given, torch.Tensor)
            if not is_on_gpu(given) or given.nbytes < LARGE_BYTES or self._is_edge[row]:
                array = _together(given, blocks)
                digests.append(self._put(row, array, files))
                continue
            digest = Digest() if self.has_checksums else None
            files.begin_large(given.nbytes)
            for block in blocks:
                files.put_block(_contiguous(block), block.nbytes, digest)
            digests.append(NO_DIGEST if digest is None else digest.digest())

    def _padded(self, row: int, array: Array) -> Array:
        """A chunk at the edge of a tensor in its full size."""
        chunk = self._index.chunk_shape(self._table.key(row))
        assert chunk is not None
        whole = np.zeros(tuple(chunk), dtype=array.dtype)
        whole[tuple(map(slice, array.shape))] = array
        return whole


def _together(data: torch.Tensor, blocks: Iterator[torch.Tensor]) -> Array:
    """The bits of a tensor that comes in blocks of rows; in the memory of the only block."""
    first = _contiguous(next(blocks))
    if first.nbytes == data.nbytes:
        return first.reshape(tuple(data.shape))
    whole = np.empty(tuple(data.shape), dtype=first.dtype)
    flat, start = whole.reshape(-1), 0
    for part in chain([first], map(_contiguous, blocks)):
        flat[start : start + part.size] = part.reshape(-1)
        start += part.size
    return whole


def _in_place(data: torch.Tensor) -> Array | None:
    """The bits of a tensor in C order; None if they must be copied from elsewhere first."""
    if data.requires_grad:
        data = data.detach()
    return dtypes.fillable(data.contiguous(), data.dtype)


def _contiguous(data: torch.Tensor) -> Array:
    """The bits of a tensor on the CPU in C order, in its own memory where that is possible."""
    array = dtypes.as_numpy(data.detach().resolve_conj().resolve_neg().contiguous())
    # The memory of a dtype that numpy does not have itself can only be handed on as integers.
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


def _edges(table: ShardTable, index: Index) -> npt.NDArray[np.bool_]:
    """Which rows are chunks that stick out of their tensor."""
    number = index.rows_of(table.names)[table.keys]
    is_edge = number >= 0
    if is_edge.any():
        full = index.chunk_shapes.prod(axis=1)[number]
        is_edge &= index.has_grid[number] & (table.shapes.prod(axis=1) < full)
    return is_edge


def _joined(
    parts: Sequence[StoredValues], index: Index
) -> tuple[list[bytes], list[str], Extents, list[bytes]]:
    """The values of all ranks and the descriptions of all arrays, see ``write_tree``."""
    described, numbers, texts = keys.descriptions(index)
    names = list(map(str.encode, described))
    number = np.array(numbers, dtype=np.int64)
    columns = [(np.full_like(number, INLINE), number, np.zeros_like(number))]
    number_of: dict[str, int] = {}
    for part in parts:
        names += part.key_list()
        # Ranks may share the same file of a base.
        numbers = [number_of.setdefault(name, len(number_of)) for name in part.files]
        extents = part.extents
        file = np.array(numbers, dtype=np.int64)[extents.file]
        columns.append((file, extents.offset, extents.length))
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[row] for row in order]
    for twice in compress(ordered, map(eq, ordered, islice(ordered, 1, None))):
        finding = Finding("it would be stored twice", twice.decode())
        raise InvalidShardingError("two values have one place", [finding])
    joined = Extents(*map(np.concatenate, zip(*columns, strict=True)))
    rows = np.array(order, dtype=np.int64)
    return ordered, list(number_of), joined.rows(rows), [text.encode() for text in texts]
