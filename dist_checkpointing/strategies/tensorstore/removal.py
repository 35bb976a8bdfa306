"""Takes values out of a checkpoint's database, and gives their disk space back.

A new tree without them is written beside the old one. Space comes back when a file that holds
nothing else is deleted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.strategies.raw_chunks import Extent, read_extent
from dist_checkpointing.strategies.tensorstore import keys
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import I64, MANIFEST_NAME
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import INLINE, Tree, Values
from dist_checkpointing.strategies.tensorstore.tree_file import write_tree

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
        keys.object_key(key, cell, shape).encode()
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
        elif length <= _MOST_TEXT_BYTES and values.files[file].startswith(f"{keys.NODES_FOLDER}/"):
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
        for folder in (keys.NODES_FOLDER, keys.DATA_FOLDER)
        for path, names in local_folder.walked(root / folder)
        for name in names
    )
