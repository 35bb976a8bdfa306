"""Reads boxes from the database at the root of a checkpoint, straight into the destination."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import numpy as np
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local_folder, location as store
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import READ_WHOLE_BYTES
from dist_checkpointing.format import leftovers
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.geometry import Box, Ints, Window
from dist_checkpointing.format.index import INDEX_NAME, Index, StoredTensor
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex, ReadTable
from dist_checkpointing.planning.load_plan import reads_of, stored_bytes
from dist_checkpointing.storage.interface import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies import chunk_reads, zarr_metadata
from dist_checkpointing.strategies.base import LoadShardedStrategy, PlannedLoadStrategy
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import INLINE, MANIFEST_NAME
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import ABSENT, Tree, Values
from dist_checkpointing.threads import paused_collector


class NewestTree:
    """The tree of the newest version of a database; several threads may ask.

    What lies in the folder of another save, the caller notices.
    """

    def __init__(self, checkpoint_dir: Location) -> None:
        self._folder = checkpoint_dir
        self._version: object = None
        self._tree: Tree | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[NewestTree], tuple[Location]]:
        # A copy in another process finds out for itself.
        return NewestTree, (self._folder,)

    def __call__(self, *, keeps_nodes: bool) -> Tree:
        """The tree, which with ``keeps_nodes`` is remembered for the next call."""
        if not keeps_nodes:
            return Tree(self._folder)
        with self._lock:
            # Every change puts a new manifest in its place; an object of a save stays as it is.
            version = store.marks_of(self._folder, (MANIFEST_NAME,), opens=False)
            if self._tree is None or version != self._version:
                self._tree, self._version = Tree(self._folder, keeps_nodes=True), version
            return self._tree


_CELL = re.compile(r"shard_[\d.]*_([\d.]+)")


class TensorStoreReader(StorageReader):
    """Reads what TensorStoreWriter wrote."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._newest = NewestTree(checkpoint_dir)

    def rebuild_index(self) -> Index:
        path = self.checkpoint_dir / MANIFEST_NAME
        if not store.is_file(path):
            return super().rebuild_index()
        keys, values = self._newest(keeps_nodes=self.is_kept).all()
        going, tensors, grids = leftovers.noted_removal(self.checkpoint_dir), [], dict[str, Ints]()
        with local_folder.parsing(f"{INDEX_NAME} is missing and cannot be rebuilt", path):
            for row, name in enumerate(map(bytes.decode, keys)):
                folder, _, file = name.rpartition("/")
                if (cell := _CELL.fullmatch(file)) is not None:
                    if "~" in folder:
                        raise ValueError(f"the key of {folder} was shortened to make a name")
                    grids[unquote(folder)] = tuple(map(int, cell[1].split(".")))
                elif file == zarr_metadata.METADATA_NAME and "/" not in folder:
                    node = local_folder.parse_json(self._bytes(values, row, name))
                    tensors.append(zarr_metadata.parse(folder, node))
            index = Index.of((own for own in tensors if own.key not in going), grids)
            return Index.from_json(index.to_json(), str(path))  # which checks every number in it

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        names = [*super().describing_names(wanted)]
        has_database = store.is_file(self.checkpoint_dir / MANIFEST_NAME)
        return [*names, MANIFEST_NAME] if has_database else names

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        name = zarr_metadata.object_key(key, cell, self._index.objects[key])
        values = self._find([name])
        if values.extents[0, 0] == ABSENT:
            raise chunk_reads.damaged(
                f"{self.checkpoint_dir}: {name.decode()}", key, "an object is missing"
            )
        return self._bytes(values, 0, key)

    def read_box(
        self, tensor: StoredTensor, box: Box, memory: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        found = chunk_reads.chunk_with(tensor, box)
        if found is None:
            return None
        window = Window(0, tensor.grid.chunk_shape, found[1])
        key = f"{disk_name(tensor.key)}/{zarr_metadata.chunk_name(found[0])}".encode()
        place = self._newest(keeps_nodes=self.is_kept).find_outside(key)
        if place is None or place[2] != window.array_size * tensor.dtype.itemsize:
            return None
        return chunk_reads.read_single(self.files, place[0], place[1], window, tensor.dtype, memory)

    def location(self, chunk: MetadataIndex) -> str:
        (key,) = self._keys_of([chunk])
        values = self._find([key])
        if values.extents[0, 0] < 0:
            return f"{self.checkpoint_dir} (OCDBT), {key.decode()}"
        extent = self._extent(values, 0)
        return f"{extent.path}, {extent.num_bytes} bytes from {extent.offset}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        values = self._find(self._keys_of(chunks))
        places: list[ChunkPlace | None] = []
        for file, _, length in values.extents.T.tolist():
            if file == ABSENT:
                places.append(None)
            elif file == INLINE:
                places.append(ChunkPlace(None, length, is_read_whole=True))
            else:
                # Small neighbours share a read.
                places.append(ChunkPlace(values.files[file], length, length <= READ_WHOLE_BYTES))
        return places

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        table = plan.table
        if not (self._index or self._index.objects):
            return done(None)  # nothing was saved, so no database was made
        filler = chunk_reads.Filler(plan, planner, self._index, self.files)
        with paused_collector():
            keys = zarr_metadata.row_keys(table, self._index)
            values = self._find(keys)
            self._require_found(table, keys, values)
        for row in np.flatnonzero(table.is_object).tolist():
            data = self._bytes(values, row, table.key(row))
            # Not at the top: most checkpoints have no objects among the tensors.
            from dist_checkpointing.strategies.safe_pickle import deserialize  # noqa: PLC0415

            where = f"{self.checkpoint_dir}: {keys[row].decode()}"
            filler.destinations.apply_bytes(row, deserialize(data, where, trusted=self.trusted))
        file, offset, length = values.extents
        for row in np.flatnonzero((file == INLINE) & ~table.is_object).tolist():
            value = np.frombuffer(values.inline[offset[row]], dtype=np.uint8)
            self.report(filler.fill(row, value))
        rows = np.flatnonzero((file >= 0) & ~table.is_object)
        reads = chunk_reads.ChunkReads(rows, values.files, file[rows], offset[rows], length[rows])
        chunk_reads.read_chunks(reads, filler, self.files, report=self.report)
        return done(None)

    def _require_found(self, table: ReadTable, keys: Sequence[bytes], values: Values) -> None:
        """Make sure that all values are there, and the chunks as large as they must be."""
        (file, _, length), sizes = values.extents, stored_bytes(table, self._index)
        is_absent = file == ABSENT
        is_wrong = is_absent | ~table.is_object & (length != sizes)
        findings = []
        for row in np.flatnonzero(is_wrong).tolist():
            key, path = table.key(row), f"{self.checkpoint_dir}: {keys[row].decode()}"
            if is_absent[row]:
                findings.append(Finding("a chunk is missing", key, path=path))
                continue
            path = path if file[row] < 0 else self._extent(values, row).path
            expected, stored = f"{sizes[row]} bytes", int(length[row])
            problem = "a chunk has the wrong size"
            findings.append(Finding(problem, key, expected=expected, found=stored, path=path))
        CorruptCheckpointError.raise_if(findings, "the checkpoint is damaged")

    def _keys_of(self, chunks: Sequence[MetadataIndex]) -> list[bytes]:
        objects, is_object = self._index.objects, [c.fqn in self._index.objects for c in chunks]
        tensors = [chunk for chunk, is_one in zip(chunks, is_object, strict=True) if not is_one]
        keys = iter(zarr_metadata.row_keys(reads_of(tensors, self._index), self._index))
        return [
            zarr_metadata.object_key(c.fqn, c.offset or (), objects[c.fqn])
            if is_one
            else next(keys)
            for c, is_one in zip(chunks, is_object, strict=True)
        ]

    def _find(self, wanted: Sequence[bytes]) -> Values:
        return self._newest(keeps_nodes=self.is_kept).find(wanted)

    def _extent(self, values: Values, row: int) -> chunk_reads.Extent:
        file, offset, length = values.extents[:, row].tolist()
        return chunk_reads.Extent(self.checkpoint_dir, values.files[file], offset, length)

    def _bytes(self, values: Values, row: int, key: str) -> bytes:
        file, offset, _ = values.extents[:, row].tolist()
        return (
            values.inline[offset]
            if file == INLINE
            else chunk_reads.read_extent(self._extent(values, row), key)
        )


class TensorStoreLoadShardedStrategy(PlannedLoadStrategy):
    """Loads ("tensorstore", 1), and the zarr formats as their own strategies do.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", "tensorstore")
        >>> loaded = load(state, "ckpt", TensorStoreLoadShardedStrategy())
    """

    reader_type: ClassVar[type[TensorStoreReader]] = TensorStoreReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset(
        {("tensorstore", 1), ("zarr", 1), ("zarr", 2)}
    )
    can_handle_sharded_objects = True

    def for_format(self, backend: str, version: int) -> LoadShardedStrategy:
        if backend == "tensorstore":
            return self
        # Not at the top: the package zarr may be missing.
        from dist_checkpointing.strategies import zarr  # noqa: PLC0415

        kind = zarr.ZarrLoadShardedStrategy if version == 1 else zarr.Zarr3LoadShardedStrategy
        strategy = kind(planner=self.planner, comm=self.comm, options=self.options)
        strategy.trusted = self.trusted
        return strategy

    def remove_sharded_tensors(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> None:
        from dist_checkpointing.strategies.tensorstore import database  # noqa: PLC0415 - it writes

        root = Path(checkpoint_dir)
        gone, kept = _parted(root, key_prefix)
        if not gone and not leftovers.noted_removal(root):
            return
        leftovers.note_removal(root, dict.fromkeys(gone, ()))
        # Once the index does not name them they are unreachable; what follows frees their space.
        local_folder.write_atomic(root / INDEX_NAME, kept.to_json())
        database.drop_all_but(root, kept)
        store.remove_all([leftovers.REMOVAL_NAME], root)

    def plan_removal(
        self, checkpoint_dir: str | PathLike[str], key_prefix: str
    ) -> leftovers.PlannedRemoval:
        from dist_checkpointing.strategies.tensorstore import database  # noqa: PLC0415 - it writes

        root = Path(checkpoint_dir)
        gone, kept = _parted(root, key_prefix)
        is_unfinished = bool(leftovers.noted_removal(root))
        if not gone and not is_unfinished:
            return leftovers.PlannedRemoval((), ())
        _, unused, shared = database.split(root, kept)
        return leftovers.PlannedRemoval(tuple(gone), unused, shared, is_unfinished=is_unfinished)


def _parted(root: Path, key_prefix: str) -> tuple[list[str], Index]:
    """The tensors whose keys begin so, and the index without them."""
    index = TensorStoreReader(root).read_metadata()
    gone = [key for key in index if key.startswith(key_prefix)]
    return gone, index.without(gone)
