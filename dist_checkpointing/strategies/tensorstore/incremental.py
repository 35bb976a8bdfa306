"""Values shared with a base checkpoint, and data files of it that are too little used.

A value may be any range of bytes in a file: also some rows of a chunk of the base.

Only rank 0 knows how much of a file all ranks use.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.local_folder import copy_range
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.incremental import BaseParts, Candidates
from dist_checkpointing.strategies.tensorstore import database
from dist_checkpointing.strategies.tensorstore.database import DATA_FOLDER
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Tree, Values

logger: logging.Logger = logging.getLogger(__name__)

_ANY, _NOWHERE = -1, -2


def values_in_base(base: BaseParts, table: ShardTable, index: Index) -> Candidates:
    """Where values of the same box lie in the base, and values in which others may lie."""
    may_be_nested = ~table.is_object & (table.flat[:, 0] < 0) & (table.num_bytes > 0)
    asked = np.flatnonzero(base.same_box | base.same_dtype & may_be_nested).tolist()
    places = [(row, *_place(base, table, index, row)) for row in asked]
    rows, begins, expected = np.array(places, dtype=np.int64).reshape(-1, 3).T
    is_nested = ~base.same_box[rows]
    values = Tree(base.folder).find(database.row_keys(table.take(rows), base.index))
    file, offset, length = values.extents
    in_data = [name if name.startswith(f"{DATA_FOLDER}/") else "" for name in values.files]
    files = tuple(base.seal.files[name] for name in in_data if name in base.seal.files)
    number_of = {sealed.name: number for number, sealed in enumerate(files)}
    # The last two are those of -1 and -2: of what does not lie in a file.
    number_in_files = [*(number_of.get(name, -1) for name in in_data), -1, -1]
    number = np.array(number_in_files, dtype=np.int64)[file]
    ends = np.array([*(sealed.num_bytes for sealed in files), 0], dtype=np.int64)
    is_good = (number >= 0) & (length > 0) & (offset + length <= ends[number])
    is_good &= (expected == _ANY) | (expected == length)
    lengths = np.where(is_nested, table.num_bytes[rows], length)
    extents = np.stack([number, offset + begins, lengths], axis=1)
    return Candidates(rows, files, extents, is_nested).take(is_good)


def _place(base: BaseParts, table: ShardTable, index: Index, row: int) -> tuple[int, int]:
    """First byte of a row in a value of the base, and bytes that this value must have."""
    key, box = table.key(row), table.box(row)
    if table.is_object[row]:
        return 0, _ANY
    stored, wanted = base.index.chunk_shape(key), index.chunk_shape(key)
    is_padded = wanted is not None and math.prod(wanted) != box.num_elements
    itemsize, chunk = index.dtype_of(key).itemsize, tuple(stored or ())
    if base.same_box[row]:
        if wanted is None or not is_padded:
            return 0, int(table.num_bytes[row])
        # At the edge of a tensor it is padded, and the padding depends on the chunk.
        return 0, math.prod(wanted) * itemsize if tuple(wanted) == chunk else _NOWHERE
    # It may lie in one piece in a larger chunk.
    if is_padded or len(chunk) != len(box.shape):
        return 0, _NOWHERE
    first = tuple(o % c for o, c in zip(box.offset, chunk, strict=True))
    window = Window(0, chunk, Box(first, box.shape))
    run = window.contiguous_range() if Box.whole(chunk).contains(window.box) else None
    return (0, _NOWHERE) if run is None else (run[0] * itemsize, window.array_size * itemsize)


_COPIED_BYTES: Final = 2**24


def keep_shared(
    folder: Path, values: Values, shared: Mapping[str, SealedFile], options: StorageOptions
) -> tuple[Values, list[SealedFile]]:
    """Decide which shared files stay, and make these durable.

    What is used of the others is copied to new files. Returns all values, some of which lie
    elsewhere now, and the shared files that stay and the new ones.
    """
    files, (file, offset, length) = list(values.files), values.extents
    for path, names in local_folder.walked(folder / DATA_FOLDER):
        for name in names:
            # A rank shared it, and then found that it could not use it.
            if (path / name).relative_to(folder).as_posix() not in files:
                (path / name).unlink()
    is_outside, is_durable = file >= 0, options.durability is Durability.FSYNC
    used = np.bincount(file[is_outside], length[is_outside], len(files)).astype(np.int64)
    kept, copied, num_bytes = [], [], 0
    for name, sealed in sorted(shared.items()):
        number = files.index(name)
        if used[number] >= options.least_shared * sealed.num_bytes:
            kept.append(sealed)
            num_bytes += int(used[number])
            # The base may have been saved with less care.
            if is_durable:
                local_folder.fsync_file(folder / name)
            continue
        rows = np.flatnonzero(file == number)
        rows = rows[np.argsort(offset[rows], kind="stable")]
        files[number] = fresh = f"{name.rpartition('/')[0]}/used-{uuid.uuid4().hex}"
        _copy(folder / name, folder / fresh, offset[rows], length[rows], is_durable=is_durable)
        (folder / name).unlink()
        offset[rows] = np.cumsum(length[rows]) - length[rows]
        copied.append(SealedFile(fresh, int(used[number])))
    logger.info("%d bytes in %d files are shared with the base", num_bytes, len(kept))
    return Values(files, values.extents, values.inline), [*kept, *copied]


def _copy(
    source: Path, target: Path, offsets: Int64s, lengths: Int64s, *, is_durable: bool
) -> None:
    """Copy ranges of a file, sorted by their offsets, one behind the other into a new file."""
    ends = offsets + lengths
    firsts = np.flatnonzero(np.r_[True, offsets[1:] != ends[:-1]])
    lasts = np.r_[firsts[1:], len(offsets)] - 1
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", 0) as read, target.open("xb") as write:
        for begin, end in zip(offsets[firsts].tolist(), ends[lasts].tolist(), strict=True):
            if copy_range(read.fileno(), begin, end - begin, write.fileno()):
                continue
            read.seek(begin)
            while read.tell() < end:
                data = read.read(min(_COPIED_BYTES, end - read.tell()))
                if not data:
                    raise EOFError(f"the file ends at {read.tell()}")
                write.write(data)
            write.flush()
        if is_durable:
            os.fsync(write.fileno())
