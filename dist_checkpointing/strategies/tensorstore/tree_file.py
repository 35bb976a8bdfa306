"""Writes the tree of a checkpoint's database: a file of nodes, and the manifest that names it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dist_checkpointing.filesystem import local
from dist_checkpointing.format.ocdbt import manifest
from dist_checkpointing.format.ocdbt.nodes import Extents
from dist_checkpointing.format.ocdbt.tree_reader import INLINE
from dist_checkpointing.format.ocdbt.tree_writer import encode_tree
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.tensorstore.keys import NODES_FOLDER


def write_tree(
    folder: Path,
    keys: Sequence[bytes],
    files: Sequence[str],
    extents: Extents,
    texts: Sequence[bytes],
    durability: Durability = Durability.FSYNC,
) -> None:
    """Make the database in ``folder`` hold these values, and no others.

    Args:
        folder: the checkpoint, in which all files are, durably.
        keys: sorted, each once.
        files: paths relative to the checkpoint.
        extents: of the values; ``file`` is a position in ``files``, or ``INLINE`` for a value whose
            position in ``texts`` is its ``offset``.
        texts: values that are not in a file yet. They are written before the nodes, each once,
            whatever the number of keys: in the tree they would be there once a key.
        durability: of what is written.
    """
    name = f"{NODES_FOLDER}/{uuid.uuid4().hex}"
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    starts = np.cumsum(sizes) - sizes
    is_text = extents.file == INLINE
    number = extents.offset[is_text]
    file, offset, length = extents.file + 1, extents.offset.copy(), extents.length.copy()
    offset[is_text], length[is_text] = starts[number], sizes[number]
    places = Extents(file, offset, length)
    nodes, root = encode_tree(keys, [name, *files], places, name, int(sizes.sum()))
    (folder / NODES_FOLDER).mkdir(exist_ok=True)
    local.write_atomic(folder / name, b"".join([*texts, *nodes]), durability)
    if durability is Durability.FSYNC:
        local.fsync_folder(folder)
    local.write_atomic(folder / manifest.MANIFEST_NAME, manifest.encode(root), durability)
