"""("zarr", 1): zarr v2 arrays, byte for byte as Megatron-Core <= 0.15 writes and reads them.

A regular shard is exactly one chunk file. There is no index file: the folders are the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch

from dist_checkpointing.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import check_raw_key
from dist_checkpointing.format.geometry import Box, Ints, ints_from_json, values_of_part
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.leftovers import (
    end_removal,
    leftovers,
    note_removal,
    noted_removal,
)
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import ReadTable, SavePlan
from dist_checkpointing.planning.chunking import WholeShardLayout
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.interface import WriteResult
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.zarr.chunk_files import (
    FileContent,
    ZarrFolderLoadStrategy,
    ZarrFolderReader,
    ZarrFolderWriter,
    chunk_array,
    write_chunk,
    write_part,
)
from dist_checkpointing.threads import in_threads

_METADATA_NAME = ".zarray"
_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_MAX_METADATA_BYTES = 1 << 20


def chunk_name(index: Ints) -> str:
    return ".".join(map(str, index)) or "0"


class ZarrV2Writer(ZarrFolderWriter):
    """Writes zarr v2 arrays in folders named by the key."""

    layout: WholeShardLayout = WholeShardLayout()
    keeps_fingerprints: ClassVar[bool] = False

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        del world_size
        for key in index:
            check_raw_key(key)
        _check_nested_keys(index)
        self._refuse_foreign_arrays()
        return [CHECKSUMS_NAME, *index]

    def _refuse_foreign_arrays(self) -> None:
        # In this format the folders are the index: an array of somebody else would become ours.
        if not self.checkpoint_dir.is_dir():
            return
        ours = leftovers(self.checkpoint_dir)
        # A save that has the folder clears it, and the lock, which is asked for next, says so.
        found = _array_folders(self.checkpoint_dir, local_folder.raise_unless_gone)
        foreign = [key for key in found if key not in ours]
        if foreign:
            raise CheckpointExistsError(
                f"{self.checkpoint_dir} holds arrays that no save of ours made",
                [
                    Finding("array of another program", key, remedy="Save into an empty folder.")
                    for key in foreign
                ],
            )

    def describe_array(self, tensor: StoredTensor) -> Iterable[FileContent]:
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
        yield f"{tensor.key}/{_METADATA_NAME}", json.dumps(content, indent=4).encode()

    def part_writer(self, plan: SavePlan) -> Callable[[int, torch.Tensor], list[SealedFile]]:
        index, table = plan.index, plan.table
        assert index is not None
        self.make_folders(set(table.key_column))

        def write(row: int, data: torch.Tensor) -> list[SealedFile]:
            tensor = index[table.key(row)]
            parts = _chunk_parts(tensor, table.box(row), table.flat_range(row), data)
            return [self._write_box(tensor, *part) for part in parts]

        return write

    def _write_box(
        self, tensor: StoredTensor, index: Ints, box: Box, data: torch.Tensor
    ) -> SealedFile:
        grid, own = tensor.grid, tensor.grid.box(index)
        name = f"{tensor.key}/{chunk_name(index)}"
        if box == own:
            array = chunk_array(data, grid.chunk_shape)
            return write_chunk(self.checkpoint_dir, name, array, None)
        path = f"{self.checkpoint_dir}/{name}"
        array = chunk_array(data, box.shape)
        size = write_part(path, array, grid.chunk_shape, box.relative_to(own.offset))
        return SealedFile(name, size)

    def base_reader(self, base: Path) -> ZarrFolderReader:
        return ZarrV2Reader(base)

    def chunk_files(self, table: ShardTable, index: Index) -> list[str | None]:
        names: list[str | None] = []
        for row in range(len(table)):
            key, box, grid = table.key(row), table.box(row), index[table.key(row)].grid
            number = grid.index_at(box.offset)
            # Other parts share a file with those of other ranks, which write into it.
            is_whole = table.flat_range(row) is None and grid.box(number) == box
            names.append(f"{key}/{chunk_name(number)}" if is_whole else None)
        return names

    def finish(self, metadata: Index, results: Iterable[Iterable[WriteResult]]) -> None:
        """Nothing to add: each array describes itself."""


def _chunk_parts(
    tensor: StoredTensor, whole: Box, flat: tuple[int, int] | None, data: torch.Tensor
) -> Iterator[tuple[Ints, Box, torch.Tensor]]:
    """A part of a tensor cut along the chunks it falls into: chunk index, box, values."""
    for box, values in values_of_part(whole, flat, data):
        for index, common in tensor.grid.intersecting(box):
            yield index, common, values[common.relative_to(box.offset).slices()]


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


class ZarrV2Reader(ZarrFolderReader):
    """Reads zarr v2 arrays as Megatron writes them."""

    def read_metadata(self) -> Index:
        root = self.checkpoint_dir
        damaged: list[Finding] = []
        going = noted_removal(root)

        def parse(key: str) -> list[StoredTensor]:
            try:
                return [_parse(root / key, key)]
            except CorruptCheckpointError as error:
                damaged.extend(error.findings)
                return []

        keys = [key for key in _array_folders(root) if key not in going]
        parsed = in_threads(parse, keys, self.files.limits.run_threads)
        if damaged:
            raise CorruptCheckpointError("arrays have no readable metadata", damaged)
        tensors = [tensor for tensors in parsed for tensor in tensors]
        return Index.of(sorted(tensors, key=lambda tensor: tensor.key))

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return [f"{key}/{_METADATA_NAME}" for key in wanted]

    def array_folder(self, key: str) -> Path:
        return self.checkpoint_dir / key

    def claimed_in(self, key: str) -> str:
        return str(self.array_folder(key) / _METADATA_NAME)

    def chunk_names(self, table: ReadTable) -> list[str]:
        names = []
        for row in range(len(table)):
            key, ndim = table.key(row), table.ndim[row]
            offset = tuple(table.chunk_offsets[row, :ndim].tolist())
            names.append(f"{key}/{chunk_name(self._index[key].grid.index_at(offset))}")
        return names


def _array_folders(
    root: Location, on_error: Callable[[OSError], None] | None = None
) -> Iterator[str]:
    """Keys of the folders that look like arrays. The arrays themselves are not read."""
    # Megatron leaves lock folders behind that look like arrays and are none.
    return location.folders_with(root, _METADATA_NAME, ".sync", on_error or _raise)


def _raise(error: OSError) -> None:
    # A folder that cannot be listed is no folder without arrays.
    raise error


def _parse(folder: Location, key: str) -> StoredTensor:
    path = folder / _METADATA_NAME
    with local_folder.parsing("arrays have no readable metadata", path, key):
        content = location.read_json(path, _MAX_METADATA_BYTES)
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
    try:
        dtype = tensor_memory.from_zarr_v2(dtype_name)
    except UnsupportedFormatError as error:
        findings = [replace(f, key=key, path=str(path)) for f in error.findings]
        raise UnsupportedFormatError(error.message, findings) from error
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

    def remove_sharded_tensors(self, checkpoint_dir: str | PathLike[str], key_prefix: str) -> None:
        root = Path(checkpoint_dir)
        _, removed = self.stored_and_removed(root, key_prefix)
        if not removed:
            return
        # From here on they are not listed, all at once; what follows may be cut off anywhere.
        note_removal(root, removed)
        folders = [root / key for key in removed if local_folder.is_real_folder(root / key, root)]
        # Readers that know nothing of removals must never see an array without its chunks.
        for folder in folders:
            (folder / _METADATA_NAME).unlink(missing_ok=True)
            local_folder.fsync_folder(folder)
        local_folder.remove_all(self.files_of(root, removed), root)
        for folder in filter(local_folder.is_folder, folders):
            if not any(folder.iterdir()):
                local_folder.remove(folder, root)
        end_removal(root)
