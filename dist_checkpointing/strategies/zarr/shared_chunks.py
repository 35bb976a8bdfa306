"""Chunk files that need not be written, since the base has the same ones and they are shared."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.filesystem.hard_links import share_file
from dist_checkpointing.format.checksums import columns_of, digest_of_array
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.options import BaseCheck, StorageOptions
from dist_checkpointing.strategies.base_parts import BaseParts, PlanDigests, open_base
from dist_checkpointing.strategies.zarr.chunk_files import read_decoded
from dist_checkpointing.strategies.zarr.codecs import Codec
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)

ChunkNames = Callable[[ShardTable, Index], Sequence[str | None]]
"""File that each row of a table fills by itself; None for a row that writes parts of files."""


def share_chunks(
    folder: Path,
    reader: StorageReader,
    plan: SavePlan,
    names_of: ChunkNames,
    digests: PlanDigests,
    options: StorageOptions,
    codec: tuple[str | None, Codec | None],
) -> dict[int, SealedFile]:
    """Share the chunk files of a base that hold rows of a plan. Not collective.

    The folders of all chunk files exist. Nothing is shared if the base is damaged or gone, which is
    logged.
    """
    assert plan.index is not None
    base = reader.checkpoint_dir
    try:
        parts = open_base(reader, plan.table)
        if parts is None or parts.index.codec != codec[0]:
            return {}
        sources = _sources(parts, plan.table, plan.index, names_of)
        rows = np.array(list(sources), dtype=np.int64)
        digests.add(rows)
        is_same = (digests.columns[rows] == parts.digests[rows]).all(axis=1)
        same = rows[is_same].tolist()
        if options.base_check is BaseCheck.CONTENTS and same:
            stored = in_threads(
                lambda row: _digest_in_base(parts, plan, row, sources[row], codec[1]),
                same,
                options.threads,
            )
            is_good = (columns_of(stored) == digests.columns[same]).all(axis=1)
            same = np.array(same, dtype=np.int64)[is_good].tolist()
        names = names_of(plan.table, plan.index)
        targets = {row: name for row in same if (name := names[row]) is not None}
        return _shared(
            folder, parts, {row: (sources[row], targets[row]) for row in targets}, options
        )
    except (CheckpointingException, OSError) as error:
        logger.warning("nothing is shared with %s, which cannot be used: %s", base, error)
        return {}


def _sources(
    base: BaseParts, table: ShardTable, index: Index, names_of: ChunkNames
) -> dict[int, SealedFile]:
    """The rows that fill a chunk file of the same shape in the base, and that file."""
    rows = np.flatnonzero(base.same_box)
    names = names_of(table.take(rows), base.index)
    found = {}
    for row, name in zip(rows.tolist(), names, strict=True):
        key = table.key(row)
        # A chunk at the edge of a tensor is padded to the shape of a chunk.
        sealed = None if name is None else base.seal.files.get(name)
        own, theirs = (i.chunk_shape(key) for i in (index, base.index))
        if sealed is not None and tuple(own or ()) == tuple(theirs or ()):
            found[row] = sealed
    return found


def _digest_in_base(
    base: BaseParts, plan: SavePlan, row: int, source: SealedFile, codec: Codec | None
) -> bytes:
    """The digest of the values that a chunk file of the base has now."""
    table, path = plan.table, base.folder / source.name
    key, size, box = table.key(row), int(table.itemsizes[row]), table.box(row)
    chunk = base.index.chunk_shape(key)
    whole = int(table.num_bytes[row]) if chunk is None else math.prod(chunk) * size
    raw = np.fromfile(path, np.uint8) if codec is None else read_decoded(path, codec, whole, key)
    if raw.nbytes == whole > table.num_bytes[row]:
        values = raw.view(f"V{size}").reshape(tuple(chunk or ()))
        raw = values[tuple(map(slice, box.shape))].copy()
    return digest_of_array(raw)


def _shared(
    folder: Path,
    base: BaseParts,
    files: dict[int, tuple[SealedFile, str]],
    options: StorageOptions,
) -> dict[int, SealedFile]:
    def share(row: int) -> SealedFile | None:
        source, name = files[row]
        size = share_file(base.folder / source.name, folder / name)
        if size is not None and size != source.num_bytes:
            logger.warning(
                "%s/%s has another size than when it was saved", base.folder, source.name
            )
            (folder / name).unlink()
        return SealedFile(name, size) if size == source.num_bytes else None

    rows = list(files)
    if not rows:
        return {}
    shared = {row: file for row in rows[:1] if (file := share(row)) is not None}
    if not shared and base.is_in_place():
        logger.warning("files of %s cannot be shared here, and are written", base.folder)
        return {}
    found = in_threads(share, rows[1:], options.threads)
    shared |= {row: file for row, file in zip(rows[1:], found, strict=True) if file is not None}
    if not base.is_in_place():
        # Another save may have put other chunks in their places.
        for file in shared.values():
            (folder / file.name).unlink()
        logger.warning("nothing is shared with %s, which was deleted meanwhile", base.folder)
        return {}
    num_bytes = sum(file.num_bytes for file in shared.values())
    logger.info("%d bytes in %d files are shared with the base", num_bytes, len(shared))
    return shared
