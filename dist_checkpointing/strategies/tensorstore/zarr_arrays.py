"""Reads the zarr formats through TensorStore's own zarr drivers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.claims import Claim
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex, ReadItem
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.protocol import StorageReader, done
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.raw_chunks import in_threads
from dist_checkpointing.strategies.tensorstore import database
from dist_checkpointing.strategies.zarr.folders import ZarrFolderReader
from dist_checkpointing.strategies.zarr.v2 import ZarrV2Reader
from dist_checkpointing.strategies.zarr.v3 import ZarrV3Reader


class ZarrArraysReader(StorageReader):
    """Reads boxes of zarr arrays; TensorStore finds, decodes and copies the chunks.

    Args:
        folders: knows the names of that format.
        driver: "zarr" or "zarr3".
    """

    def __init__(self, folders: ZarrFolderReader, driver: str) -> None:
        super().__init__(folders.checkpoint_dir)
        self._folders = folders
        self._driver = driver

    def location(self, chunk: MetadataIndex) -> str:
        return self._folders.location(chunk)

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return self._folders.describing_names(wanted)

    def require_stored(self, claims: Sequence[Claim], index: Index) -> None:
        self._folders.require_stored(claims, index)

    def read_metadata(self) -> Index:
        return self._folders.read_metadata()

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        self._folders.set_up_storage_reader(metadata, rank=rank, world_size=world_size)
        self._index = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        context = database.make_context(self.options, self.checkpoint_dir)

        def read(item: ReadItem) -> None:
            tensor = self._index[item.storage_index.fqn]
            try:
                array = self._open(item.storage_index, context)
                self._read_item(array, tensor, item, planner)
            except ValueError as error:
                database.raise_io_error(error)
                where = self.location(item.storage_index)
                finding = Finding(f"cannot be read: {error}", tensor.key, path=where)
                raise CorruptCheckpointError("the checkpoint is damaged", [finding]) from error
            self.report(item.dest.box.num_elements * tensor.dtype.itemsize)

        in_threads(read, plan.items, self.options.threads)
        return done(None)

    def _open(self, chunk: MetadataIndex, context: Any) -> Any:
        folder = self._folders.chunk_path(chunk).parent
        spec = {
            "driver": self._driver,
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "fill_missing_data_reads": False,
        }
        return ts.open(spec, open=True, context=context).result()

    def _read_item(
        self, array: Any, tensor: StoredTensor, item: ReadItem, planner: LoadPlanner
    ) -> None:
        destination = planner.acquire_tensor(item)
        bits = dtypes.fillable(destination, tensor.dtype.torch)
        in_place = bits is not None
        if bits is None:
            bits = np.empty(item.lengths, dtype=tensor.dtype.bits)
        target = bits.view(tensor.dtype.numpy)
        window = item.storage
        if tensor.pieces is None:
            chunk = item.storage_index.offset
            assert chunk is not None
            offset = tuple(a + b for a, b in zip(chunk, window.box.offset, strict=True))
            ts.array(target).write(array[Box(offset, item.lengths).slices()]).result()
        elif array.rank == len(item.lengths) and window.start == 0 and array.shape == window.shape:
            ts.array(target).write(array[window.box.slices()]).result()
        else:
            # A range of a flattened shard is a 1-D array, in which the box lies as in a larger one.
            values = array[window.start : window.start + window.array_size].read().result()
            target[...] = values.reshape(window.shape)[window.box.slices()]
        planner.apply_tensor(
            item, destination if in_place else dtypes.as_tensor(bits, tensor.dtype.torch)
        )


_FORMATS: dict[int, tuple[type[ZarrFolderReader], str]] = {
    1: (ZarrV2Reader, "zarr"),
    2: (ZarrV3Reader, "zarr3"),
}


class ZarrArraysLoadShardedStrategy(PlannedLoadStrategy):
    """Loads ("zarr", 1) or ("zarr", 2) through TensorStore.

    Args:
        version: of the backend "zarr".
        planner: used instead of DefaultLoadPlanner.
        comm: the ranks that load together when ``load`` is called directly.
        options: knobs of the I/O.
    """

    reads = frozenset(("zarr", version) for version in _FORMATS)

    def __init__(
        self,
        version: int,
        *,
        planner: LoadPlanner | None = None,
        comm: Comm | None = None,
        options: StorageOptions | None = None,
    ) -> None:
        super().__init__(planner=planner, comm=comm, options=options)
        self._folder_reader, self._driver = _FORMATS[version]

    def make_reader(self, checkpoint_dir: Path) -> ZarrArraysReader:
        reader = ZarrArraysReader(self._folder_reader(checkpoint_dir), self._driver)
        reader.options = self.options
        return reader
