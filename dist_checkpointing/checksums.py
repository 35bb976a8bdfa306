"""One hash for each part that a rank wrote, kept beside the index and read only to verify.

A hash covers the values of a write item in C order, whatever the format makes of them on disk, so
one file format and one way to verify serve every backend.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from dist_checkpointing import store
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.geometry import Box

if TYPE_CHECKING:
    # It imports torch, which whoever only reads does without.
    from dist_checkpointing.catalog import ShardTable

CHECKSUMS_NAME = ".dckpt/checksums"
_COLUMNS = ("keys", "ndim", "offsets", "shapes", "flat", "digests")
_MAX_BYTES = 1 << 36


def checksum(array: npt.NDArray[Any]) -> int:
    """xxh3_64 of the elements of a C-contiguous array."""
    return checksum_of([array])


def checksum_of(blocks: Iterable[npt.NDArray[Any]]) -> int:
    """That of the C-contiguous array of which these are the blocks, one after the other."""
    digest = xxhash.xxh3_64()
    for block in blocks:
        digest.update(memoryview(block.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, with the hash of its values and the rank that wrote it.

    Both are None for a part of which nothing was noted.
    """

    key: str
    box: Box
    flat_range: tuple[int, int] | None
    digest: int | None = None
    rank: int | None = None

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        if self.flat_range is None:
            return self.box.num_elements
        return self.flat_range[1] - self.flat_range[0]


def write_checksums(
    folder: Path, rank: int, table: ShardTable, digests: Sequence[int | None]
) -> Path | None:
    """Write what one rank has to say about the rows of its table; None if it is nothing.

    Not durable by itself.
    """
    rows = np.array([row for row, digest in enumerate(digests) if digest is not None], dtype=int)
    if not len(rows):
        return None
    kept = table.take(rows)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        names=np.frombuffer(json.dumps(kept.names).encode(), dtype=np.uint8),
        keys=kept.keys,
        ndim=kept.ndim,
        offsets=kept.offsets,
        shapes=kept.shapes,
        flat=kept.flat,
        digests=np.array([digests[row] for row in rows.tolist()], dtype=np.uint64),
    )
    path = folder / CHECKSUMS_NAME / f"{rank}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def read_checksums(folder: Path) -> list[StoredPart]:
    """Everything that all ranks have said.

    Raises:
        CorruptCheckpointError: if a file is not what it should be.
    """
    return [part for path in checksum_files(folder) for part in read_checksum_file(path)]


def checksum_files(folder: Path) -> list[Path]:
    """The files of all ranks that kept checksums."""
    return sorted((folder / CHECKSUMS_NAME).glob("*.npz"))


def read_checksum_file(path: Path) -> list[StoredPart]:
    """Everything that one rank has said.

    Raises:
        CorruptCheckpointError: if the file is not what it should be.
    """
    parts: list[StoredPart] = []
    try:
        rank = int(path.stem)
        with np.load(io.BytesIO(store.read_bytes(path, _MAX_BYTES))) as content:
            names = json.loads(content["names"].tobytes())
            columns = [content[name].tolist() for name in _COLUMNS]
        for key, ndim, offset, shape, flat, digest in zip(*columns, strict=True):
            box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
            flat_range = None if flat[0] < 0 else (flat[0], flat[1])
            parts.append(StoredPart(names[key], box, flat_range, digest, rank))
    except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
        finding = Finding(f"{type(error).__name__}: {error}", path=str(path))
        raise CorruptCheckpointError("checksums cannot be read", [finding]) from error
    return parts
