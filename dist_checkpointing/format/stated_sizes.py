"""What an index says of very large tensors, held against the files that are there.

A line of an index may ask for any amount of memory or work. What it says of a large tensor is
believed when the files have the bytes, and the chunks, that it speaks of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, StoredTensor

LARGE_BYTES: Final = 1 << 28
MANY_PARTS: Final = 1 << 16
"""A tensor with more bytes than ``LARGE_BYTES`` or more chunks than this is looked at, and so is a
sharded object with more cells."""

MOST_COMPRESSION: Final = 1 << 16
"""How many times larger than its file a compressed chunk may be; zeros reach half of that."""


@dataclass(frozen=True, slots=True)
class StatedSize:
    """What an index says of one tensor or object: its bytes, and its chunks, pieces or cells."""

    key: str
    num_bytes: int
    num_parts: int

    @property
    def is_large(self) -> bool:
        """Whether it is worth a look at the files."""
        return self.num_bytes > LARGE_BYTES or self.num_parts > MANY_PARTS


@dataclass(frozen=True, slots=True)
class Backing:
    """The bytes and parts that files can hold, and the path of the file that states the size."""

    num_bytes: int
    num_parts: int
    path: str


def stated_size(tensor: StoredTensor) -> StatedSize:
    return StatedSize(tensor.key, tensor.num_bytes, tensor.num_parts)


def large_tensors(index: Index, keys: Iterable[str]) -> list[StatedSize]:
    """The sizes of those of the tensors that are large."""
    return [size for size in (stated_size(index[key]) for key in keys) if size.is_large]


def large_objects(grids: Mapping[str, Ints]) -> list[StatedSize]:
    """The sizes of those of the sharded objects, by key, that have many cells."""
    stated = [StatedSize(key, 0, math.prod(shape)) for key, shape in grids.items()]
    return [size for size in stated if size.is_large]


def meets_many(tensor: StoredTensor, box: Box) -> bool:
    """Whether a box of a tensor may meet so many chunks of its grid that they are worth a look."""
    if tensor.chunk_shape is None:
        return False
    met = (n // c + 2 for n, c in zip(box.shape, tensor.chunk_shape, strict=False))
    return math.prod(met) > MANY_PARTS


def require_backing(
    stated: Iterable[StatedSize], backing_of: Callable[[StatedSize], Backing]
) -> None:
    """Refuse sizes that the files cannot hold."""
    findings = []
    for size in stated:
        backing = backing_of(size)
        if size.num_bytes > backing.num_bytes or size.num_parts > backing.num_parts:
            findings.append(
                Finding(
                    "it would not fit into the files that are there",
                    size.key,
                    expected=f"{size.num_bytes} bytes in {size.num_parts} parts",
                    found=f"room for {backing.num_bytes} bytes, {backing.num_parts} parts",
                    path=backing.path,
                    remedy="Use another checkpoint: parts are lost, or this file is damaged.",
                )
            )
    if findings:
        raise CorruptCheckpointError("the checkpoint is not as large as it says", findings)


def size_of_files(folder: Location) -> tuple[int, int]:
    """``(bytes, files)`` of all regular files below a folder; links are not followed."""
    sizes = [size for _, size in location.files_below(folder, folder) if size is not None]
    return sum(sizes), len(sizes)
