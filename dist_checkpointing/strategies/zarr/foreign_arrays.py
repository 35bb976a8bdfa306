"""Arrays of zarr v3 that another program wrote, read by TensorStore."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from dist_checkpointing.errors import CheckpointNotFoundError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format.index import (
    MOST_COMPRESSION,
    Index,
    StatedSize,
    StoredTensor,
    require_backing,
    size_of_files,
)
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from dist_checkpointing.storage.interface import (
    StorageReader,
    done,
)
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.chunk_reads import (
    damaged,
)
from dist_checkpointing.strategies.zarr_metadata import padded_chunk
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)


class DatabaseReader(StorageReader):
    """Reads zarr v3 arrays that another program wrote: TensorStore finds and decodes their chunks.

    Where no chunk is stored, there is the fill value.
    """

    _index: Index = Index.of([])

    def set_up_storage_reader(self, metadata: Index, **_: object) -> None:
        self._index = metadata

    @cached_property
    def _store(self) -> Any:
        """All files of the database, as TensorStore has them."""
        import tensorstore  # noqa: PLC0415 - for no other checkpoint

        place: dict[str, Any] = {"driver": "file", "path": f"{self.checkpoint_dir.absolute()}/"}
        if location.is_file(self.checkpoint_dir / "manifest.ocdbt"):
            place = {"driver": "ocdbt", "base": place}
        return tensorstore.KvStore.open(place).result()

    def _array(self, key: str) -> Any:
        import tensorstore  # noqa: PLC0415

        is_root = self._store.read(f"{key}/zarr.json").result().state == "missing"
        kvstore = self._store + ("" if is_root else f"{key}/")
        return tensorstore.open({"driver": "zarr3"}, kvstore=kvstore, read=True).result()

    def rebuild_index(self) -> Index:
        with local_folder.parsing("the database cannot be read", self.checkpoint_dir):
            names = sorted(map(bytes.decode, self._store.list().result()))
            nodes = [name for name in names if f"/{name}".endswith("/zarr.json")]
            found = in_threads(self._tensor, nodes, self.options.threads)
            index = Index.of(filter(None, found))
            return Index.from_json(index.to_json(), str(self.checkpoint_dir))

    def _tensor(self, name: str) -> StoredTensor | None:
        """What a ``zarr.json`` describes; None for a group, and for values that torch lacks."""
        node = local_folder.parse_json(self._store.read(name).result().value)
        key = name.removesuffix("zarr.json")[:-1] or self.checkpoint_dir.absolute().name
        if node["node_type"] != "array":
            return None
        if node["chunk_key_encoding"].get("configuration", {}).get("separator") == ".":
            problem = "its arrays are named as ours: a save or a copy of it has not come to its end"
            finding = Finding(problem, key, path=str(self.checkpoint_dir))
            message = f"{self.checkpoint_dir} is not a distributed checkpoint"
            raise CheckpointNotFoundError(message, [finding])
        try:
            dtype, shape = tensor_memory.from_name(str(node["data_type"])), tuple(node["shape"])
        except UnsupportedFormatError:
            logger.warning("%r is left out: its values are %s", key, node["data_type"])
            return None
        # Of shards it is a part that is read by itself.
        extents = zip(self._array(key).chunk_layout.read_chunk.shape, shape, strict=True)
        return StoredTensor(key, dtype, shape, tuple(max(1, min(pair)) for pair in extents))

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        del index
        room = MOST_COMPRESSION * size_of_files(self.checkpoint_dir)[0] if claims else 0
        require_backing(claims, lambda _: (room, room, str(self.checkpoint_dir)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        in_threads(partial(self._read, planner), plan.items, self.options.threads)
        return done(None)

    def _read(self, planner: LoadPlanner, item: ReadItem) -> None:
        chunk, window = item.storage_index, item.storage
        grid, dtype = self._index[chunk.fqn].grid, self._index[chunk.fqn].dtype
        box = grid.box(grid.index_at(chunk.offset or ()))
        try:
            values = np.asarray(self._array(chunk.fqn)[box.slices()].read().result())
        except Exception as error:
            raise damaged(self.location(chunk), chunk.fqn, f"TensorStore: {error}") from error
        # A window may be a run of the chunk, which ends at the edge of its grid here.
        flat = padded_chunk(values, grid.chunk_shape).reshape(-1).view(dtype.bits)
        part = flat[window.start : window.start + window.array_size].reshape(window.shape)
        part = np.ascontiguousarray(part[window.box.slices()]).reshape(item.lengths)
        planner.apply_tensor(item, tensor_memory.as_tensor(part, dtype.torch))
        self.report(part.nbytes)


class DatabaseLoadShardedStrategy(PlannedLoadStrategy):
    """Loads zarr v3 arrays that another program wrote, in an OCDBT database or in folders."""

    reader_type: ClassVar[type[DatabaseReader]] = DatabaseReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("database", 1)})
