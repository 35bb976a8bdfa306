"""Shared data files of which a checkpoint uses too little: what it uses is copied out of them.

Only rank 0 knows how much of a file all ranks use.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.hard_links import copy_range
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.tensorstore.keys import DATA_FOLDER
from dist_checkpointing.strategies.tensorstore.tree_file import StoredValues

logger: logging.Logger = logging.getLogger(__name__)

_COPIED_BYTES: Final = 2**24


def settle(
    folder: Path, stored: Sequence[StoredValues], options: StorageOptions
) -> tuple[list[StoredValues], list[SealedFile]]:
    """Decide which shared files stay, and make these durable; where all values lie then."""
    shared = {file.name: file for values in stored for file in values.shared}
    used: Counter[str] = Counter()
    for values in stored:
        sums = np.bincount(values.extents.file, values.extents.length, len(values.files))
        used.update(dict(zip(values.files, sums.astype(np.int64).tolist(), strict=True)))
    known = {name for values in stored for name in values.files}
    for path, names in local_folder.walked(folder / DATA_FOLDER):
        for name in names:
            # A rank shared it, and then found that it could not use it.
            if (path / name).relative_to(folder).as_posix() not in known:
                (path / name).unlink()
    left, copied = list(stored), []
    sparse = {n for n, file in shared.items() if used[n] < options.least_shared * file.num_bytes}
    for name in sorted(sparse):
        left, file = _copied_out(folder, left, name, options.durability)
        copied.append(file)
    kept = [file for name, file in shared.items() if name not in sparse]
    if options.durability is Durability.FSYNC:
        # The base may have been saved with less care.
        for file in kept:
            local_folder.fsync_file(folder / file.name)
    num_bytes = sum(used[file.name] for file in kept)
    logger.info("%d bytes in %d files are shared with the base", num_bytes, len(kept))
    return left, [*kept, *copied]


def _copied_out(
    folder: Path, stored: Sequence[StoredValues], name: str, durability: Durability
) -> tuple[list[StoredValues], SealedFile]:
    """Put a file in the place of another one that has what is used of it."""
    number_of = [{file: number for number, file in enumerate(v.files)} for v in stored]
    rows = [
        np.flatnonzero(values.extents.file == numbers.get(name, -1))
        for values, numbers in zip(stored, number_of, strict=True)
    ]
    parts = [v.extents.rows(own) for v, own in zip(stored, rows, strict=True)]
    offsets = np.concatenate([part.offset for part in parts])
    lengths = np.concatenate([part.length for part in parts])
    order = np.argsort(offsets, kind="stable")
    begins = np.empty_like(offsets)
    begins[order] = np.cumsum(lengths[order]) - lengths[order]
    fresh = f"{name.rpartition('/')[0]}/used-{uuid.uuid4().hex}"
    _copy(folder / name, folder / fresh, offsets[order], lengths[order], durability)
    (folder / name).unlink()
    moved, taken = [], 0
    for values, own in zip(stored, rows, strict=True):
        if not len(own):
            moved.append(values)
            continue
        file, offset = values.extents.file.copy(), values.extents.offset.copy()
        file[own], offset[own] = len(values.files), begins[taken : taken + len(own)]
        taken += len(own)
        extents = replace(values.extents, file=file, offset=offset)
        moved.append(replace(values, files=(*values.files, fresh), extents=extents))
    return moved, SealedFile(fresh, int(lengths.sum()))


def _copy(
    source: Path, target: Path, offsets: Int64s, lengths: Int64s, durability: Durability
) -> None:
    """Copy ranges of a file, sorted by their offsets, one behind the other into a new file."""
    ends = offsets + lengths
    firsts = np.flatnonzero(np.r_[True, offsets[1:] != ends[:-1]])
    lasts = np.r_[firsts[1:], len(offsets)] - 1
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for begin, end in zip(offsets[firsts].tolist(), ends[lasts].tolist(), strict=True):
                if not copy_range(read, begin, end - begin, write):
                    _copy_here(read, begin, end, write)
            if durability is Durability.FSYNC:
                os.fsync(write)
        finally:
            os.close(write)
    finally:
        os.close(read)


def _copy_here(read: int, begin: int, end: int, write: int) -> None:
    while begin < end:
        data = os.pread(read, min(_COPIED_BYTES, end - begin), begin)
        if not data:
            raise EOFError(f"the file ends at {begin}")
        view = memoryview(data)
        while view:
            view = view[os.write(write, view) :]
        begin += len(data)
