"""Writes the tree of a checkpoint's database: a file of nodes, and the manifest that names it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import eq

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.tensorstore import keys as names_of
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import Extents
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import INLINE, encode_tree


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Where values are, as columns: data files, some of which are shared with the base, and
    extents.

    Their keys in the database are joined, with the bytes of each.
    """

    files: tuple[str, ...]
    keys: bytes
    key_lengths: npt.NDArray[np.uint16]
    extents: Extents
    shared: tuple[SealedFile, ...] = ()

    def key_list(self) -> list[bytes]:
        stops = np.cumsum(self.key_lengths, dtype=np.int64).tolist()
        starts = [0, *stops[:-1]]
        return [self.keys[start:stop] for start, stop in zip(starts, stops, strict=True)]


def write_tree(
    folder: Location,
    keys: Sequence[bytes],
    files: Sequence[str],
    extents: Extents,
    texts: Sequence[bytes],
    durability: Durability = Durability.FSYNC,
) -> list[SealedFile]:
    """Make the database in ``folder`` hold these values, and no others; the files of the tree.

    They last once ``folder`` is synced too.

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
    name = f"{names_of.NODES_FOLDER}/{uuid.uuid4().hex}"
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    starts = np.cumsum(sizes) - sizes
    is_text = extents.file == INLINE
    number = extents.offset[is_text]
    file, offset, length = extents.file + 1, extents.offset.copy(), extents.length.copy()
    offset[is_text], length[is_text] = starts[number], sizes[number]
    places = Extents(file, offset, length)
    nodes, root = encode_tree(keys, [name, *files], places, name, int(sizes.sum()))
    location.make_folder(folder / names_of.NODES_FOLDER)
    tree, top = b"".join([*texts, *nodes]), ocdbt_nodes.encode_manifest(root)
    location.write(folder / name, tree, durability)
    location.write_content(folder / ocdbt_nodes.MANIFEST_NAME, top, durability)
    return [SealedFile.of_bytes(name, tree), SealedFile.of_bytes(ocdbt_nodes.MANIFEST_NAME, top)]


def merged_values(
    parts: Sequence[StoredValues], index: Index
) -> tuple[list[bytes], list[str], Extents, list[bytes]]:
    """The values of all ranks and the descriptions of all arrays, see ``write_tree``."""
    described, numbers, texts = names_of.descriptions(index)
    names = list(map(str.encode, described))
    number = np.array(numbers, dtype=np.int64)
    columns = [(np.full_like(number, INLINE), number, np.zeros_like(number))]
    number_of: dict[str, int] = {}
    for part in parts:
        names += part.key_list()
        # Ranks may share the same file of a base.
        numbers = [number_of.setdefault(name, len(number_of)) for name in part.files]
        extents = part.extents
        file = np.array(numbers, dtype=np.int64)[extents.file]
        columns.append((file, extents.offset, extents.length))
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[row] for row in order]
    for twice in compress(ordered, map(eq, ordered, islice(ordered, 1, None))):
        finding = Finding("it would be stored twice", twice.decode())
        raise InvalidShardingError("two values have one place", [finding])
    joined = Extents(*map(np.concatenate, zip(*columns, strict=True)))
    rows = np.array(order, dtype=np.int64)
    return ordered, list(number_of), joined.rows(rows), [text.encode() for text in texts]
