"""("zarr", 1): zarr v2 arrays, byte for byte as Megatron-Core <= 0.15 writes and reads them.

A regular shard is exactly one chunk file. There is no index file: the folders are the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import when_visible
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import check_raw_key
from dist_checkpointing.format.geometry import ints_from_json
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.leftovers import noted_removal
from dist_checkpointing.format.seal import known_files
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.chunking import WholeShardLayout
from dist_checkpointing.storage.interface import WriteResult
from dist_checkpointing.strategies.base import PlannedSaveStrategy
from dist_checkpointing.strategies.zarr.chunk_files import (
    FileContent,
    ZarrFolderLoadStrategy,
    ZarrFolderReader,
    ZarrFolderWriter,
)
from dist_checkpointing.strategies.zarr_metadata import ChunkNames
from dist_checkpointing.threads import in_threads

_METADATA_NAME = ".zarray"
_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_MAX_METADATA_BYTES = 1 << 20


class ZarrV2Reader(ZarrFolderReader):
    """Reads zarr v2 arrays as Megatron writes them."""

    names: ClassVar[ChunkNames] = ChunkNames(list, lambda index: ".".join(map(str, index)) or "0")

    def read_metadata(self) -> Index:
        root = self.checkpoint_dir
        damaged: list[Finding] = []
        going = noted_removal(root)

        def parse(key: str) -> StoredTensor | None:
            try:
                return _parse(root / key, key)
            except CorruptCheckpointError as error:
                damaged.extend(error.findings)
                return None

        is_known = known_files(root)
        # Megatron leaves lock folders behind that look like arrays and are none.
        found = location.folders_with(root, _METADATA_NAME, ".sync")
        keys = [k for k in found if k not in going and is_known(f"{k}/{_METADATA_NAME}")]
        parsed = in_threads(parse, keys, self.files.limits.run_threads)
        if damaged:
            raise CorruptCheckpointError("arrays have no readable metadata", damaged)
        return Index.of(sorted(filter(None, parsed), key=lambda tensor: tensor.key))

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return [f"{key}/{_METADATA_NAME}" for key in wanted]


class ZarrV2Writer(ZarrFolderWriter):
    """Writes zarr v2 arrays in folders named by the key."""

    layout: WholeShardLayout = WholeShardLayout()
    keeps_fingerprints: ClassVar[bool] = False
    reader_type: ClassVar[type[ZarrV2Reader]] = ZarrV2Reader

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        for key in index:
            check_raw_key(key)
        _check_nested_keys(index)
        return [CHECKSUMS_NAME, *index]

    def describe(self, index: Index, rows: slice) -> Iterable[FileContent]:
        for key in index.keys_column[rows]:
            tensor = index[key]
            content = {
                "chunks": list(tensor.grid.chunk_shape),
                "compressor": None,
                "dtype": tensor.dtype.zarr_v2,
                "fill_value": None,
                "filters": None,
                "order": "C",
                "shape": list(tensor.global_shape),
                "zarr_format": 2,
            }
            yield f"{key}/{_METADATA_NAME}", json.dumps(content, indent=4).encode()

    def finish(self, metadata: Index, results: Iterable[Iterable[WriteResult]]) -> None:
        """Nothing to add: each array describes itself."""


def _check_nested_keys(index: Index) -> None:
    """Refuse keys whose folder would be a chunk file of another key."""
    findings = []
    for key in index:
        parts = key.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in index and _CHUNK_NAME.fullmatch(parts[depth]):
                findings.append(
                    Finding(
                        f"its folder would be a chunk file of {above!r}",
                        key,
                        remedy="Rename one of the two keys.",
                    )
                )
    if findings:
        raise InvalidShardingError("two keys want the same file", findings)


def _parse(folder: Location, key: str) -> StoredTensor:
    path = folder / _METADATA_NAME
    with local_folder.parsing("arrays have no readable metadata", path, key):
        content = when_visible(lambda: location.read_json(path, _MAX_METADATA_BYTES))
        shape = tuple(ints_from_json(content["shape"]))
        chunks = tuple(ints_from_json(content["chunks"]))
        if len(shape) != len(chunks) or 0 in chunks:
            raise ValueError(f"shape {shape} with chunks {chunks}")
        dtype_name = content["dtype"]
    findings = [
        Finding(f"{name} is not supported", key, expected=expected, found=found, path=str(path))
        for name, (expected, *others) in _REQUIRED.items()
        if (found := content.get(name)) not in (expected, *others)
    ]
    if findings:
        raise UnsupportedFormatError("an array is stored in a way Megatron never does", findings)
    dtype = tensor_memory.from_zarr_v2(dtype_name, key, str(path))
    return StoredTensor(key, dtype, shape, chunks)


_REQUIRED: dict[str, tuple[Any, ...]] = {
    "zarr_format": (2,),
    "compressor": (None,),
    "filters": (None, []),
    "order": ("C",),
    "dimension_separator": (".", None),
}
"""Options of an array -> the value that Megatron writes, and others that mean the same."""


class ZarrSaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("zarr", 1).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", ZarrSaveShardedStrategy())
    """

    writer_type: ClassVar[type[ZarrV2Writer]] = ZarrV2Writer
    writes: ClassVar[tuple[str, int]] = ("zarr", 1)


class ZarrLoadShardedStrategy(ZarrFolderLoadStrategy):
    """Loads ("zarr", 1).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", ("zarr", 1))
        >>> loaded = load(state, "ckpt", ZarrLoadShardedStrategy())
    """

    reader_type: ClassVar[type[ZarrV2Reader]] = ZarrV2Reader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("zarr", 1)})
    file_names: ClassVar[re.Pattern[str]] = re.compile(rf"\.zarray|{_CHUNK_NAME.pattern}")

    def folders_of(self, tensor: StoredTensor) -> Iterable[str]:
        return [tensor.key]

    def hide(self, root: Path, kept: Index, removed: Mapping[str, Iterable[str]]) -> None:
        # They are not listed since the removal was noted, all at once.
        folders = [root / key for key in removed if local_folder.is_real_folder(root / key, root)]
        # Readers that know nothing of removals must never see an array without its chunks.
        for folder in folders:
            (folder / _METADATA_NAME).unlink(missing_ok=True)
            local_folder.fsync_folder(folder)
