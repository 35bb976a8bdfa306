"""What a checkpoint consists of: files, bytes, dtypes, the share of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import is_of_optimizer
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.format.seal import SEAL_NAME


@dataclass(frozen=True, slots=True)
class TensorTotal:
    """The number of some tensors, and their bytes."""

    num_tensors: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Files:
    """The number of files, and their bytes.

    Attributes:
        num_files: Number of files.
        num_bytes: Sum of their sizes.
        num_bytes_on_disk: Bytes of their disk blocks, which are fewer for files with holes.
        num_bytes_shared: Bytes of those that have a name elsewhere, as in other checkpoints.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_bytes_on_disk: int = 0
    num_bytes_shared: int = 0

    def own_text(self) -> str:
        """How much of it is shared with nothing else."""
        own = bytes_text(self.num_bytes - self.num_bytes_shared)
        return f"{own} of {bytes_text(self.num_bytes)}, the rest is shared with other checkpoints"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a checkpoint consists of.

    Attributes:
        files: All files.
        largest_files: Relative names and bytes of the largest files, largest first.
        tensors: All tensors; bytes before compression.
        by_dtype: Tensors of each element type, largest share first.
        model: Tensors of the model: all but ``optimizer``.
        optimizer: Tensors of an optimizer, see ``is_of_optimizer``.
        largest: Keys and bytes of the largest tensors.
        num_elements: Number of elements of all tensors.
        num_chunks: Number of stored chunks and pieces of all tensors.
        largest_chunk_bytes: Bytes of the largest chunk, before compression.
        facts: Facts about this backend, as text.
    """

    files: Files
    largest_files: tuple[tuple[str, int], ...]
    tensors: TensorTotal
    by_dtype: Mapping[str, TensorTotal]
    model: TensorTotal
    optimizer: TensorTotal
    largest: tuple[tuple[str, int], ...]
    num_elements: int
    num_chunks: int
    largest_chunk_bytes: int
    facts: Mapping[str, str]


def take_inventory(checkpoint: Checkpoint, *, most_listed: int = 10) -> Inventory:
    """Count what the index and the names and sizes of the files show; no values are read.

    Raises:
        CheckpointingException: if the index cannot be read.
    """
    index = checkpoint.index
    uses = location.use_below(checkpoint.folder)
    sizes = {name: use.num_bytes for name, use in uses.items()}
    shares: dict[str, TensorTotal] = {}
    by_owner = {True: TensorTotal(), False: TensorTotal()}
    num_elements = num_chunks = largest_chunk = 0
    largest: list[tuple[str, int]] = []
    for key in index:
        stored = index[key]
        shares[stored.dtype.name] = _with(shares.get(stored.dtype.name, TensorTotal()), stored)
        owner = is_of_optimizer(key)
        by_owner[owner] = _with(by_owner[owner], stored)
        num_elements += stored.num_bytes // stored.dtype.itemsize
        count, chunk_bytes = _chunks(stored)
        num_chunks += count
        largest_chunk = max(largest_chunk, chunk_bytes)
        largest.append((key, stored.num_bytes))
    biggest_files = sorted(sizes.items(), key=_by_size)
    by_size = sorted(shares.items(), key=lambda row: (-row[1].num_bytes, row[0]))
    return Inventory(
        totals(uses.values()),
        tuple(biggest_files[:most_listed]),
        TensorTotal(len(index), sum(share.num_bytes for share in by_owner.values())),
        dict(by_size),
        by_owner[False],
        by_owner[True],
        tuple(sorted(largest, key=_by_size)[:most_listed]),
        num_elements,
        num_chunks,
        largest_chunk,
        _facts(checkpoint, sizes),
    )


def _by_size(row: tuple[str, int]) -> tuple[int, str]:
    return -row[1], row[0]


def _with(share: TensorTotal, stored: StoredTensor) -> TensorTotal:
    return TensorTotal(share.num_tensors + 1, share.num_bytes + stored.num_bytes)


def _chunks(stored: StoredTensor) -> tuple[int, int]:
    """Number of chunks or pieces, and bytes of the largest one."""
    itemsize = stored.dtype.itemsize
    if stored.pieces is None:
        chunk = map(min, stored.grid.chunk_shape, stored.global_shape)
        return stored.num_parts, math.prod(chunk) * itemsize
    counts = [
        box.num_elements if flat is None else flat[1] - flat[0] for box, flat in stored.pieces
    ]
    return len(counts), max(counts, default=0) * itemsize


def count_files(folder: Location) -> Files:
    """The files below a folder."""
    return totals(location.use_below(folder).values())


def totals(uses: Collection[location.FileUse]) -> Files:
    """What some files take together."""
    return Files(
        len(uses),
        sum(use.num_bytes for use in uses),
        sum(use.num_bytes_stored for use in uses),
        sum(use.num_bytes for use in uses if use.is_shared),
    )


def _facts(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> dict[str, str]:
    backend, version = checkpoint.backend
    if backend in ("safetensors", "torch"):
        return {}
    facts = {}
    tables = [n for n in sizes if n.startswith(f"{CHECKSUMS_NAME}/") and n.endswith(".bin")]
    facts["checksums"] = f"in {_count(tables, 'table')}" if tables else "none were kept"
    facts["seal"] = "kept" if SEAL_NAME in sizes else "none was kept"
    if backend == "tensorstore":
        for group in sorted({name.split("/")[1] for name in sizes if name.startswith("data/")}):
            inside = [size for name, size in sizes.items() if name.startswith(f"data/{group}/")]
            # A removal of all of its tensors frees this.
            facts[f"group {group}"] = f"{sum(inside):,} bytes in {_count(inside, 'file')}"
    elif backend == "zarr":
        facts["format"] = f"zarr v{3 if version == 2 else 2}"
        facts["compression"] = checkpoint.index.codec or "none"
    elif backend == "torch_dist":
        data = [name for name in sizes if name.endswith(".distcp")]
        ranks = {name.split("_")[2] for name in data if name.startswith("__")}
        facts["written by"] = f"{_count(ranks, 'rank')}, {_count(data, 'data file')}"
    return facts


def _count(things: object, word: str) -> str:
    number = len(things)  # type: ignore[arg-type]
    return f"{number} {word}{'' if number == 1 else 's'}"
