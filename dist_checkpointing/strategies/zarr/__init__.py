"""("zarr", 1) and ("zarr", 2): zarr v2 as Megatron writes it, and zarr v3.

Importing this package also teaches zarr-python bfloat16 and the 8-bit floats, so that plain
``zarr.open`` reads every array written here. zarr-python 3.1 knows entry points for dtypes, but
does not load them; hence an import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from zarr.core.dtype.common import DataTypeValidationError
from zarr.core.dtype.npy.float import BaseFloat
from zarr.dtype import data_type_registry

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
from dist_checkpointing.format.file_names import check_raw_key, disk_name
from dist_checkpointing.format.geometry import ints_from_json
from dist_checkpointing.format.index import INDEX_NAME, Index, StoredTensor, write_index
from dist_checkpointing.format.leftovers import noted_removal
from dist_checkpointing.format.seal import SealedFile, known_files
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.mapping.tensor_memory import DTYPES
from dist_checkpointing.planning.chunking import RowBlockLayout, WholeShardLayout
from dist_checkpointing.storage.interface import WriteResult
from dist_checkpointing.strategies.base import PlannedSaveStrategy
from dist_checkpointing.strategies.zarr import chunk_files
from dist_checkpointing.strategies.zarr_metadata import (
    METADATA_NAME,
    ChunkNames,
    group_json,
    node_texts,
    parse,
    piece_arrays,
)
from dist_checkpointing.threads import in_threads

# Version 1, byte for byte as Megatron-Core <= 0.15 writes and reads it: a regular shard is exactly
# one chunk file, and there is no index file, because the folders are the index.

_ZARRAY = ".zarray"
_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_MAX_ZARRAY_BYTES = 1 << 20
_RENAME = "Rename one of the two keys."


class ZarrV2Reader(chunk_files.ZarrFolderReader):
    """Reads zarr v2 arrays as Megatron writes them."""

    names: ClassVar[ChunkNames] = ChunkNames(list, lambda index: ".".join(map(str, index)) or "0")

    def read_metadata(self) -> Index:
        root = self.checkpoint_dir
        damaged: list[Finding] = []
        going = noted_removal(root)

        def described(key: str) -> StoredTensor | None:
            try:
                return _described_by(root / key, key)
            except CorruptCheckpointError as error:
                damaged.extend(error.findings)
                return None

        is_known = known_files(root)
        # Megatron leaves lock folders behind that look like arrays and are none.
        found = location.folders_with(root, _ZARRAY, ".sync")
        keys = [k for k in found if k not in going and is_known(f"{k}/{_ZARRAY}")]
        parsed = in_threads(described, keys, self.files.limits.run_threads)
        CorruptCheckpointError.raise_if(damaged, "arrays have no readable metadata")
        return Index.of(sorted(filter(None, parsed), key=lambda tensor: tensor.key))

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return [f"{key}/{_ZARRAY}" for key in wanted]


class ZarrV2Writer(chunk_files.ZarrFolderWriter):
    """Writes zarr v2 arrays in folders named by the key."""

    layout: WholeShardLayout = WholeShardLayout()
    keeps_fingerprints: ClassVar[bool] = False
    reader_type: ClassVar[type[ZarrV2Reader]] = ZarrV2Reader

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        for key in index:
            check_raw_key(key)
        findings = [
            Finding(f"its folder would be a chunk file of {key[:end]!r}", key, remedy=_RENAME)
            for key in index
            for end in (place for place, char in enumerate(key) if char == "/")
            if key[:end] in index and _CHUNK_NAME.fullmatch(key[end + 1 :].partition("/")[0])
        ]
        InvalidShardingError.raise_if(findings, "two keys want the same file")
        return [CHECKSUMS_NAME, *index]

    def describe(self, index: Index, rows: slice) -> Iterable[chunk_files.FileContent]:
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
            yield f"{key}/{_ZARRAY}", json.dumps(content, indent=4).encode()

    def finish(self, metadata: Index, results: Iterable[Iterable[WriteResult]]) -> None:
        """Nothing to add: each array describes itself."""


def _described_by(folder: Location, key: str) -> StoredTensor:
    path = folder / _ZARRAY
    with local_folder.parsing("arrays have no readable metadata", path, key):
        content = when_visible(lambda: location.read_json(path, _MAX_ZARRAY_BYTES))
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
    UnsupportedFormatError.raise_if(findings, "an array is stored in a way Megatron never does")
    return StoredTensor(key, tensor_memory.from_zarr_v2(dtype_name, key, str(path)), shape, chunks)


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


class ZarrLoadShardedStrategy(chunk_files.ZarrFolderLoadStrategy):
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
            (folder / _ZARRAY).unlink(missing_ok=True)
            local_folder.fsync_folder(folder)


# Version 2. Our index file is how ranks learn what there is; ``zarr.json`` files and consolidated
# metadata are written for others, and the index can be rebuilt from them.


@dataclass(frozen=True, kw_only=True)
class _ExtendedFloat(BaseFloat[Any, Any]):
    """A float of ml_dtypes.

    It has an endianness because TensorStore wants a "bytes" codec that declares one, and
    zarr-python writes that only for dtypes with endianness.
    """

    native: ClassVar[np.dtype[Any]]

    @property
    def item_size(self) -> int:
        return self.native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != cls.native:
            raise DataTypeValidationError(f"{dtype} is not {cls.native}")
        return cls()

    def to_native_dtype(self) -> Any:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        return cls._from_json_v3(data.get("name") if isinstance(data, dict) else data)

    def to_json(self, zarr_format: int) -> Any:
        name = self._zarr_v3_name
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name


for _row in DTYPES:
    # isbuiltin is 1 for numpy's own types, which zarr-python knows.
    if _row.numpy.isbuiltin != 1:
        _class = type(
            f"{_row.name.title()}ZDType",
            (_ExtendedFloat,),
            {
                "native": _row.numpy,
                "dtype_cls": type(_row.numpy),
                "_zarr_v3_name": _row.name,
                "__module__": __name__,
            },
        )
        data_type_registry.register(_row.name, _class)


_MAX_METADATA_BYTES = 1 << 32


def _root_json(index: Index) -> bytes:
    """Consolidated metadata: everything about every array in one file."""
    texts = node_texts(index, index.codec)
    nodes = ",".join(f"{json.dumps(name.rpartition('/')[0])}:{text}" for name, text in texts)
    consolidated = {"kind": "inline", "must_understand": False, "metadata": "nodes"}
    root = group_json({}) | {"consolidated_metadata": consolidated}
    before, after = json.dumps(root, separators=(",", ":")).split('"nodes"')
    return f"{before}{{{nodes}}}{after}".encode()


class ZarrV3Reader(chunk_files.ZarrFolderReader):
    """Reads what ZarrV3Writer wrote."""

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        has_index = location.is_file(self.checkpoint_dir / INDEX_NAME)
        return super().describing_names(wanted) if has_index else [METADATA_NAME]

    def rebuild_index(self) -> Index:
        return rebuild_index(self.checkpoint_dir)


class ZarrV3Writer(chunk_files.ZarrFolderWriter):
    """Writes zarr v3 arrays, consolidated metadata and the index."""

    layout: RowBlockLayout = RowBlockLayout()
    uses_object_stores: ClassVar[bool] = True
    reader_type: ClassVar[type[ZarrV3Reader]] = ZarrV3Reader

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        return [*super().created_names(index, world_size=world_size), METADATA_NAME]

    def describe(self, index: Index, rows: slice) -> Iterable[chunk_files.FileContent]:
        for name, text in node_texts(index, self.codec_name, 2, rows):
            yield name, text.encode()

    def finish(
        self, metadata: Index, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile] | None:
        metadata = replace(metadata, codec=self.codec_name)
        durability = self.options.durability
        folder, root = self.checkpoint_dir, _root_json(metadata)
        described = SealedFile.put(folder, METADATA_NAME, root, durability)
        return [described, write_index(metadata, folder, durability)]


def rebuild_index(checkpoint_dir: Location) -> Index:
    """The index, from the consolidated metadata that is written for other tools."""
    path = checkpoint_dir / METADATA_NAME
    message = f"{INDEX_NAME} is missing and cannot be rebuilt"
    if not location.is_file(path):
        raise CorruptCheckpointError(message, [Finding("missing", path=str(path))])
    with local_folder.parsing(message, path):
        nodes = location.read_json(path, _MAX_METADATA_BYTES)["consolidated_metadata"]["metadata"]
        noted = noted_removal(checkpoint_dir).values()
        going = {name.split("/")[0] for names in noted for name in names}
        is_known, names = known_files(checkpoint_dir), {*location.names_in(checkpoint_dir)}
        others = sorted(n for n in names - going - nodes.keys() if is_known(f"{n}/{METADATA_NAME}"))
        unlisted = [n for n in others if location.is_file(checkpoint_dir / n / METADATA_NAME)]
        if unlisted:
            raise ValueError(f"it does not list these arrays: {', '.join(unlisted[:20])}")
        tensors = [parse(name, node) for name, node in nodes.items() if "/" not in name]
        arrays = (node["codecs"] for node in nodes.values() if node["node_type"] == "array")
        codecs = {next((c["name"] for c in own if c["name"] != "bytes"), None) for own in arrays}
        if len(codecs) > 1:
            raise ValueError(f"arrays with different codecs: {codecs}")
        index = replace(Index.of(tensors), codec=codecs.pop() if codecs else None)
        chunk_files.make_codec(index.codec)
        return Index.from_json(index.to_json(), str(path))  # which checks every number in it


class Zarr3SaveShardedStrategy(PlannedSaveStrategy):
    """Saves as ("zarr", 2).

    Args:
        codec: "zstd", "gzip" or "blosc" to compress chunks; None (the default) for raw bytes,
            which are faster to write and can be read in part.
        **options: see PlannedSaveStrategy.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", Zarr3SaveShardedStrategy(codec="zstd"))
    """

    writer_type: ClassVar[type[ZarrV3Writer]] = ZarrV3Writer
    writes: ClassVar[tuple[str, int]] = ("zarr", 2)

    def __init__(
        self,
        backend: str | None = None,
        version: int | None = None,
        *,
        codec: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(backend, version, **options)
        chunk_files.make_codec(codec)  # an unknown name is an error here and now
        self.writer_options: dict[str, Any] = {"codec_name": codec}


class Zarr3LoadShardedStrategy(chunk_files.ZarrFolderLoadStrategy):
    """Loads ("zarr", 2).

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", ("zarr", 2))
        >>> loaded = load(state, "ckpt", Zarr3LoadShardedStrategy())
    """

    reader_type: ClassVar[type[ZarrV3Reader]] = ZarrV3Reader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("zarr", 2)})
    file_names: ClassVar[re.Pattern[str]] = re.compile(r"zarr\.json|c(\.\d+)*")

    def folders_of(self, tensor: StoredTensor) -> Iterable[str]:
        name = disk_name(tensor.key)
        return [name, *(f"{name}/{piece}" for piece, _ in piece_arrays(tensor))]

    def hide(self, root: Path, kept: Index, removed: Mapping[str, Iterable[str]]) -> None:
        # Once no index names them the arrays are dead files; a crash before that loses nothing.
        local_folder.write_atomic(root / INDEX_NAME, kept.to_json())
        local_folder.write_atomic(root / METADATA_NAME, _root_json(kept))
