"""Arrays of zarr v3 that another program wrote, read by TensorStore."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np

from dist_checkpointing.errors import CheckpointNotFoundError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import MOST_COMPRESSION, Index, StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import LoadPlan, LoadPlanner, ReadItem
from dist_checkpointing.storage.interface import StorageReader, done
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.chunk_reads import Extent, damaged, read_extent
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import MANIFEST_NAME
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import ABSENT, Tree
from dist_checkpointing.strategies.zarr_metadata import METADATA_NAME, padded_chunk
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
_MOST_BYTES: Final = 1 << 34
"""Of a file in an object store, which is read whole."""


class DatabaseReader(StorageReader):
    """Reads zarr v3 arrays that another program wrote: TensorStore finds and decodes their chunks.

    Where no chunk is stored, there is the fill value.
    """

    growth: ClassVar[int] = MOST_COMPRESSION

    @cached_property
    def _store(self) -> Any:
        """All files of the database, as TensorStore has them; not those of an object store."""
        import tensorstore  # noqa: PLC0415 - for no other checkpoint

        place: dict[str, Any] = {"driver": "file", "path": f"{self.checkpoint_dir.absolute()}/"}
        if self._tree is not None:
            place = {"driver": "ocdbt", "base": place}
        return tensorstore.KvStore.open(place).result()

    @cached_property
    def _tree(self) -> Tree | None:
        is_ocdbt = location.is_file(self.checkpoint_dir / MANIFEST_NAME)
        return Tree(self.checkpoint_dir, keeps_nodes=True) if is_ocdbt else None

    def _value(self, name: str) -> bytes | None:
        """What has a name in the database; None if nothing has."""
        if self._tree is None:
            with suppress(FileNotFoundError):
                return location.read_bytes(self.checkpoint_dir / name, _MOST_BYTES)
            return None
        values = self._tree.find([name.encode()])
        file, offset, length = values.extents[:, 0].tolist()
        if file < 0:
            return None if file == ABSENT else values.inline[offset]
        return read_extent(Extent(self.checkpoint_dir, values.files[file], offset, length), name)

    def _array(self, key: str, box: Box | None = None) -> Any:
        """An array. In an object store, which TensorStore does not reach the way we do, only the
        file of the chunk at ``box`` can be read.
        """
        import tensorstore  # noqa: PLC0415

        prefix, folder = f"{key}/", cast("Location", self.checkpoint_dir)
        described = self._value(prefix + METADATA_NAME)
        if described is None:
            prefix, described = "", self._value(METADATA_NAME) or b""
        if isinstance(folder, Path):
            kvstore = self._store + prefix
        else:
            kvstore = tensorstore.KvStore.open({"driver": "memory"}).result()
            kvstore[METADATA_NAME] = described
            name = "" if box is None else _file_name(local_folder.parse_json(described), box)
            if name and (data := self._value(prefix + name)) is not None:
                kvstore[name] = data
        return tensorstore.open({"driver": "zarr3"}, kvstore=kvstore, read=True).result()

    def rebuild_index(self) -> Index:
        with local_folder.parsing("the database cannot be read", self.checkpoint_dir):
            names: Iterable[str] = location.files_below(self.checkpoint_dir)
            if self._tree is not None:
                names = map(bytes.decode, self._tree.all()[0])
            nodes = [name for name in names if f"/{name}".endswith(f"/{METADATA_NAME}")]
            found = in_threads(self._tensor, nodes, self.options.threads)
            index = Index.of(filter(None, found))
            return Index.from_json(index.to_json(), str(self.checkpoint_dir))

    def _tensor(self, name: str) -> StoredTensor | None:
        """What a ``zarr.json`` describes; None for a group, and for values that torch lacks."""
        node = local_folder.parse_json(self._value(name) or b"")
        key = name.removesuffix(METADATA_NAME)[:-1] or self.checkpoint_dir.absolute().name
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
        # Of shards it is a part that is read by itself, where files are not read whole.
        layout, folder = self._array(key).chunk_layout, cast("Location", self.checkpoint_dir)
        chunk = layout.read_chunk if isinstance(folder, Path) else layout.write_chunk
        extents = zip(chunk.shape, shape, strict=True)
        return StoredTensor(key, dtype, shape, tuple(max(1, min(pair)) for pair in extents))

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return []

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        in_threads(partial(self._read, planner), plan.items, self.options.threads)
        return done(None)

    def _read(self, planner: LoadPlanner, item: ReadItem) -> None:
        chunk, window = item.storage_index, item.storage
        grid, dtype = self._index[chunk.fqn].grid, self._index[chunk.fqn].dtype
        box = grid.box(grid.index_at(chunk.offset or ()))
        try:
            values = np.asarray(self._array(chunk.fqn, box)[box.slices()].read().result())
        except Exception as error:
            raise damaged(self.location(chunk), chunk.fqn, f"TensorStore: {error}") from error
        # A window may be a run of the chunk, which ends at the edge of its grid here.
        flat = padded_chunk(values, grid.chunk_shape).reshape(-1).view(dtype.bits)
        part = flat[window.start : window.start + window.array_size].reshape(window.shape)
        part = np.ascontiguousarray(part[window.box.slices()]).reshape(item.lengths)
        planner.apply_tensor(item, tensor_memory.as_tensor(part, dtype.torch))
        self.report(part.nbytes)


def _file_name(described: Any, box: Box) -> str:
    """Name of the file with the chunk at a box, by the specification of zarr v3."""
    encoding = described["chunk_key_encoding"]
    shape = described["chunk_grid"]["configuration"]["chunk_shape"]
    is_default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    numbers = [str(start // extent) for start, extent in zip(box.offset, shape, strict=True)]
    return str(separator.join(["c", *numbers] if is_default else numbers or ["0"]))


class DatabaseLoadShardedStrategy(PlannedLoadStrategy):
    """Loads zarr v3 arrays that another program wrote, in an OCDBT database or in folders."""

    reader_type: ClassVar[type[DatabaseReader]] = DatabaseReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("database", 1)})
