"""The database of a checkpoint: names of its keys, writing its tree, removing values and freeing
their space.

A new tree without them is written beside the old one. Space comes back when a file that holds
nothing else is deleted.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, islice
from operator import eq
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import disk_name, disk_names, is_of_optimizer
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.shard_table import Bools, ShardTable
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.chunk_reads import Extent, read_extent
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import I64, MANIFEST_NAME, Extents
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import INLINE, Tree, Values, encode_tree
from dist_checkpointing.strategies.zarr_metadata import (
    METADATA_NAME,
    array_json,
    chunk_keys_to_read,
    chunk_keys_to_write,
    piece_arrays,
    top_node,
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


def object_key(key: str, offset: Sequence[int], shape: Sequence[int]) -> str:
    """The key of one cell of a sharded object."""
    cell = "_".join(".".join(map(str, numbers)) for numbers in (offset, shape))
    return f"{disk_name(key)}/shard_{cell}"


def keys_to_write(table: ShardTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a save plan."""
    is_object = table.is_object

    def cell_key(row: int) -> str:
        axes = int(table.ndim[row])
        numbers = (table.offsets[row, :axes].tolist(), table.global_shapes[row, :axes].tolist())
        return object_key(table.key(row), *numbers)

    return _in_rows(is_object, chunk_keys_to_write(table.take(~is_object), index), cell_key)


def keys_to_read(table: ReadTable, index: Index) -> list[bytes]:
    """The keys of the chunks, pieces and cells of all rows of a load plan."""
    is_object = table.is_object

    def cell_key(row: int) -> str:
        cell = table.chunk(row)
        return object_key(cell.fqn, cell.offset or (), index.objects[cell.fqn])

    return _in_rows(is_object, chunk_keys_to_read(table.take(~is_object), index), cell_key)


def _in_rows(
    is_object: Bools, chunks: Sequence[str], cell_key: Callable[[int], str]
) -> list[bytes]:
    """Keys of chunks and of the cells between them, in the order of the rows."""
    if not is_object.any():
        return list(map(str.encode, chunks))
    names = iter(chunks)
    return [
        (cell_key(row) if is_cell else next(names)).encode()
        for row, is_cell in enumerate(is_object.tolist())
    ]


def descriptions(index: Index) -> tuple[list[str], list[int], list[str]]:
    """Keys of the ``zarr.json`` of all arrays and groups, the text of each, and all texts."""
    found: list[str] = []
    numbers: list[int] = []
    texts: dict[str, int] = {}
    number_of: dict[tuple[Ints, Ints, str], int] = {}
    special: list[tuple[str, str, str]] = []
    names = disk_names(index.keys_column)
    columns = (index.keys_column, index.dtype_column, index.global_shape_column)
    for name, key, dtype, shape, chunk in zip(
        names, *columns, index.chunk_shape_column, strict=True
    ):
        if chunk is None or name != key:
            special.append((name, key, dtype))
            continue
        kind = (tuple(shape), tuple(chunk), dtype)
        if kind not in number_of:
            number_of[kind] = texts.setdefault(_array_text(*kind), len(texts))
        found.append(f"{name}/{METADATA_NAME}")
        numbers.append(number_of[kind])
    for row in special:
        for path, text in _nodes(index, *row):
            found.append(path)
            numbers.append(texts.setdefault(text, len(texts)))
    return found, numbers, list(texts)


def _nodes(index: Index, name: str, key: str, dtype: str) -> Iterator[tuple[str, str]]:
    """The same of a tensor that has pieces or another name on disk, with all of its text."""
    tensor = index[key]
    yield f"{name}/{METADATA_NAME}", json.dumps(top_node(tensor), separators=(",", ":"))
    for piece, shape in piece_arrays(tensor):
        yield f"{name}/{piece}/{METADATA_NAME}", _array_text(shape, shape, dtype)


@lru_cache(maxsize=1 << 12)
def _array_text(shape: Ints, chunk: Ints, dtype: str) -> str:
    head, middle, tail = _template(dtype)
    extents = (",".join(map(str, numbers)) for numbers in (shape, chunk))
    return f"{head}[{next(extents)}]{middle}[{next(extents)}]{tail}"


@lru_cache(maxsize=64)
def _template(dtype: str) -> tuple[str, str, str]:
    """The text around the two shapes."""
    node = array_json((), (), tensor_memory.from_name(dtype))
    head, middle, tail = json.dumps(node, separators=(",", ":")).split("[]")
    return head, middle, tail


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
    described, numbers, texts = descriptions(index)
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


_MOST_TEXT_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Split:
    """The database, taken apart.

    Of all values, the keys and rows of those that stay, and by row those of them that do not lie in
    data files; the files that are free without the others, and the bytes of the others in files
    that stay.
    """

    keys: list[bytes]
    values: Values
    rows: I64
    texts: dict[int, bytes]
    unused: tuple[str, ...]
    shared: dict[str, int]


def plan_removal(root: Path, gone: Iterable[str], kept: Index) -> PlannedRemoval:
    """What ``drop_all_but`` would do."""
    split = _split(root, kept)
    unused, shared = ((), {}) if split is None else (split.unused, split.shared)
    return PlannedRemoval(tuple(gone), unused, shared)


def drop_all_but(root: Path, kept: Index) -> None:
    """Drop everything that ``kept`` does not name, also what a removal cut off has left.

    Raises:
        CorruptCheckpointError: if the database cannot be read; nothing has been deleted then.
    """
    split = _split(root, kept)
    if split is None:
        return
    if len(split.rows) < len(split.values.extents.file):
        extents = split.values.extents.rows(split.rows)
        numbers = {text: number for number, text in enumerate(dict.fromkeys(split.texts.values()))}
        for row, text in split.texts.items():
            extents.file[row], extents.offset[row] = INLINE, numbers[text]
        write_tree(root, split.keys, split.values.files, extents, list(numbers))
        local_folder.fsync_folder(root)
    local_folder.remove_all([root / name for name in split.unused], root)


def _split(root: Path, kept: Index) -> _Split | None:
    """The decoded database; None without a manifest."""
    if not (root / MANIFEST_NAME).exists():
        return None
    tree = Tree(root)
    found, values = tree.all()
    tensors = {disk_name(key).encode() for key in kept}
    cells = {
        object_key(key, cell, shape).encode()
        for key, shape in kept.objects.items()
        for cell in itertools.product(*map(range, shape))
    }
    is_alive = np.array(
        [key.partition(b"/")[0] in tensors or key in cells for key in found], dtype=np.bool_
    )
    rows = np.flatnonzero(is_alive)
    texts = _texts(root, values, rows)
    is_in_file = values.extents.file != INLINE
    is_in_use = is_alive & is_in_file
    is_in_use[rows[list(texts)]] = False
    in_use = {values.files[number] for number in np.unique(values.extents.file[is_in_use]).tolist()}
    if is_alive.all():
        in_use |= tree.files
    sizes = np.bincount(
        values.extents.file[~is_alive & is_in_file],
        values.extents.length[~is_alive & is_in_file],
        len(values.files),
    )
    shared = {name: int(size) for name, size in zip(values.files, sizes, strict=True)}
    return _Split(
        [found[row] for row in rows.tolist()],
        values,
        rows,
        texts,
        tuple(name for name in _files(root) if name not in in_use),
        {name: size for name, size in shared.items() if size and name in in_use},
    )


def _texts(root: Path, values: Values, rows: I64) -> dict[int, bytes]:
    """The small values of these rows that are in the tree or in the files of its nodes."""
    texts = {}
    known: dict[tuple[str, int, int], bytes] = {}
    columns = (column.tolist() for column in values.extents.rows(rows).columns)
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
