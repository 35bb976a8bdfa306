"""The database of a checkpoint: names of its keys, writing its tree, removing values and freeing
their space.

A new tree without them is written beside the old one. Space comes back when a file that holds
nothing else is deleted.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import eq
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import disk_name, is_of_optimizer
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.chunk_reads import Extent, read_extent
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import I64, MANIFEST_NAME, Extents
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import INLINE, Tree, Values, encode_tree
from dist_checkpointing.strategies.zarr_metadata import (
    chunk_keys,
    node_texts,
)

NODES_FOLDER: Final = "d"
DATA_FOLDER: Final = "data"
CREATED_NAMES: Final = (MANIFEST_NAME, NODES_FOLDER, DATA_FOLDER)
DATA_GROUPS: Final = ("model", "optimizer")
"""An optimizer's tensors lie in data files of their own: dropping them deletes these files, whereas
deleting keys from a database frees nothing."""


def group_of(key: str) -> int:
    """The data group that a key belongs to, as a position in ``DATA_GROUPS``."""
    return int(is_of_optimizer(key))


def object_key(key: str, cell: Sequence[int], shape: Sequence[int]) -> bytes:
    """The key of one cell of a sharded object with a grid of this shape."""
    numbers = "_".join(".".join(map(str, numbers)) for numbers in (cell, shape))
    return f"{disk_name(key)}/shard_{numbers}".encode()


def row_keys(table: ShardTable | ReadTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a plan."""
    names = map(str.encode, chunk_keys(table.take(~table.is_object), index))
    if not table.is_object.any():
        return list(names)
    cells = table.offsets if isinstance(table, ShardTable) else table.chunk_offsets
    rows = zip(table.is_object.tolist(), table.keys.tolist(), cells.tolist(), strict=True)
    keys = []
    for is_object, key, cell in rows:
        shape = index.objects[table.names[key]] if is_object else ()
        own = object_key(table.names[key], cell[: len(shape)], shape) if is_object else next(names)
        keys.append(own)
    return keys


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
    name = f"{NODES_FOLDER}/{uuid.uuid4().hex}"
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    starts = np.cumsum(sizes) - sizes
    is_text = extents.file == INLINE
    number = extents.offset[is_text]
    file, offset, length = extents.file + 1, extents.offset.copy(), extents.length.copy()
    offset[is_text], length[is_text] = starts[number], sizes[number]
    places = Extents(file, offset, length)
    nodes, root = encode_tree(keys, [name, *files], places, name, int(sizes.sum()))
    location.make_folder(folder / NODES_FOLDER)
    tree, top = b"".join([*texts, *nodes]), ocdbt_nodes.encode_manifest(root)
    location.write(folder / name, tree, durability)
    location.write_content(folder / ocdbt_nodes.MANIFEST_NAME, top, durability)
    return [SealedFile.of_bytes(name, tree), SealedFile.of_bytes(ocdbt_nodes.MANIFEST_NAME, top)]


def merged_values(
    parts: Sequence[StoredValues], index: Index
) -> tuple[list[bytes], list[str], Extents, list[bytes]]:
    """The values of all ranks and the descriptions of all arrays, see ``write_tree``."""
    texts: dict[str, int] = {}
    nodes = list(node_texts(index))
    names = [path.encode() for path, _ in nodes]
    numbers = [texts.setdefault(text, len(texts)) for _, text in nodes]
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


_MOST_TEXT_BYTES = 2**16


def plan_removal(root: Path, gone: Iterable[str], kept: Index) -> PlannedRemoval:
    """What ``drop_all_but`` would do."""
    _, unused, shared = _split(root, kept)
    return PlannedRemoval(tuple(gone), unused, shared)


def drop_all_but(root: Path, kept: Index) -> None:
    """Drop everything that ``kept`` does not name, also what a removal cut off has left.

    Raises:
        CorruptCheckpointError: if the database cannot be read; nothing has been deleted then.
    """
    rest, unused, _ = _split(root, kept)
    if rest is not None:
        write_tree(root, *rest)
        local_folder.fsync_folder(root)
    local_folder.remove_all([root / name for name in unused], root)


_Rest = tuple[list[bytes], Sequence[str], Extents, list[bytes]]


def _split(root: Path, kept: Index) -> tuple[_Rest | None, tuple[str, ...], dict[str, int]]:
    """What ``write_tree`` needs for the values that stay (None if all do, or nothing is there), the
    files that are free without the others, and bytes of the others in files that stay.
    """
    if not (root / MANIFEST_NAME).exists():
        return None, (), {}
    tree = Tree(root)
    keys, values = tree.all()
    tensors = {disk_name(key).encode() for key in kept}
    cells = {
        object_key(key, cell, shape)
        for key, shape in kept.objects.items()
        for cell in itertools.product(*map(range, shape))
    }
    is_kept = np.array(
        [key.partition(b"/")[0] in tensors or key in cells for key in keys], dtype=np.bool_
    )
    rows, all_in_files = np.flatnonzero(is_kept), values.extents.file != INLINE
    texts = _texts(root, values, rows)
    is_in_use = is_kept & all_in_files
    is_in_use[rows[list(texts)]] = False
    in_use = {values.files[number] for number in np.unique(values.extents.file[is_in_use]).tolist()}
    rest = None
    if is_kept.all():
        in_use |= tree.files
    else:
        extents = values.extents.rows(rows)
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts.values()))}
        for row, text in texts.items():
            extents.file[row], extents.offset[row] = INLINE, numbers[text]
        rest = [keys[row] for row in rows.tolist()], values.files, extents, list(numbers)
    gone = values.extents.rows(np.flatnonzero(~is_kept & all_in_files))
    sizes = np.bincount(gone.file, gone.length, len(values.files)).astype(np.int64).tolist()
    sizes_of = zip(values.files, sizes, strict=True)
    shared = {name: size for name, size in sizes_of if size and name in in_use}
    return rest, tuple(name for name in _files(root) if name not in in_use), shared


def _texts(root: Path, values: Values, rows: I64) -> dict[int, bytes]:
    """The small values of these rows that are in the tree or in the files of its nodes."""
    texts = {}
    known: dict[tuple[str, int, int], bytes] = {}
    columns = (column.tolist() for column in values.extents.rows(rows))
    for row, (file, offset, length) in enumerate(zip(*columns, strict=True)):
        if file == INLINE:
            texts[row] = values.inline[int(rows[row])]
        elif length <= _MOST_TEXT_BYTES and values.files[file].startswith(f"{NODES_FOLDER}/"):
            place = (values.files[file], offset, length)
            if place not in known:
                extent = Extent(root, *place)
                known[place] = read_extent(extent, place[0])
            texts[row] = known[place]
    return texts


def _files(root: Path) -> list[str]:
    """All files in which the database may keep something."""
    return sorted(
        (path / name).relative_to(root).as_posix()
        for folder in (NODES_FOLDER, DATA_FOLDER)
        for path, names in local_folder.walked(root / folder)
        for name in names
    )
