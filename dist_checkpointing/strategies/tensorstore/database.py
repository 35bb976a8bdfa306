"""The database of a checkpoint: names of its keys, writing its tree, values shared with a base,
removing values and freeing their space.

A value may be any range of bytes in a file: also some rows of a chunk of the base. Only rank 0
knows how much of a file all ranks use.

A new tree without removed values is written beside the old one. Space comes back when a file that
holds nothing else is deleted.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, islice
from operator import eq
from pathlib import Path
from typing import Final

import numpy as np

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import file_writer, local_folder, location
from dist_checkpointing.filesystem.local_folder import copy_range
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.chunk_reads import Extent, read_extent
from dist_checkpointing.strategies.incremental import LEAST_SHARED, BaseParts, Candidates
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import INLINE, MANIFEST_NAME
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Tree, Values, encode_tree
from dist_checkpointing.strategies.zarr_metadata import node_texts, object_key, row_keys

logger: logging.Logger = logging.getLogger(__name__)

NODES_FOLDER: Final = "d"
DATA_FOLDER: Final = "data"
CREATED_NAMES: Final = (MANIFEST_NAME, NODES_FOLDER, DATA_FOLDER)


@dataclass(frozen=True, slots=True)
class StoredValues:
    """What a rank has stored: the keys, joined by zero bytes, which none has, and the values.

    Files that are ``shared`` with the base are among those of the values.
    """

    keys: bytes
    values: Values
    shared: tuple[SealedFile, ...] = ()


def write_tree(
    folder: Location,
    keys: Sequence[bytes],
    values: Values,
    durability: Durability = Durability.FSYNC,
    write: Callable[..., object] = file_writer.put,
) -> list[SealedFile]:
    """Make the database in ``folder`` hold these values, and no others; the files of the tree.

    They, and the names of the files of the values, last once ``folder`` is synced too. Keys are
    sorted, each once; all files are in the folder, durably. What is not in a file yet is written
    before the nodes, once, whatever the number of its keys: in the tree it would be there once a
    key.
    """
    name = f"{NODES_FOLDER}/{os.urandom(16).hex()}"
    sizes = np.fromiter(map(len, values.inline), dtype=np.int64)
    extents = values.extents.copy()
    is_inline = extents[0] == INLINE
    number = extents[1, is_inline]
    # The first of the files is the one with the nodes.
    extents[0] += 1
    extents[1:, is_inline] = (sizes.cumsum() - sizes)[number], sizes[number]
    nodes, root = encode_tree(keys, [name, *values.files], extents, name, int(sizes.sum()))
    tree, top = b"".join([*values.inline, *nodes]), ocdbt_nodes.encode_manifest(root)
    nodes_file = SealedFile.put(folder, name, tree, durability)
    if durability is Durability.FSYNC:
        location.fsync_folders([name, *values.files], folder)
    write(folder, MANIFEST_NAME, top, durability)
    return [nodes_file, SealedFile.of_bytes(MANIFEST_NAME, top)]


def merged_values(parts: Sequence[StoredValues], index: Index) -> tuple[list[bytes], Values]:
    """The values of all ranks and the descriptions of all arrays, sorted by their keys."""
    texts: dict[str, int] = {}
    names, numbers = [], []
    for path, text in node_texts(index):
        names.append(path.encode())
        numbers.append(texts.setdefault(text, len(texts)))
    described = np.zeros((3, len(names)), dtype=np.int64)
    described[0], described[1] = INLINE, numbers
    columns, number_of = [described], dict[str, int]()
    for part in parts:
        names += part.keys.split(b"\0")
        # Ranks may share the same file of a base.
        files = [number_of.setdefault(name, len(number_of)) for name in part.values.files]
        file, *places = part.values.extents
        columns.append(np.array([np.array(files, dtype=np.int64)[file], *places]))
    order = sorted(range(len(names)), key=names.__getitem__)
    keys = [names[row] for row in order]
    for twice in compress(keys, map(eq, keys, islice(keys, 1, None))):
        finding = Finding("it would be stored twice", twice.decode())
        raise InvalidShardingError("two values have one place", [finding])
    extents = np.concatenate(columns, axis=1)[:, np.array(order, dtype=np.int64)]
    return keys, Values(list(number_of), extents, [text.encode() for text in texts])


_ANY, _NOWHERE = -1, -2


def values_in_base(base: BaseParts, table: ShardTable, index: Index) -> Candidates:
    """Where values of the same box lie in the base."""
    rows = np.flatnonzero(base.same_box)
    sizes = [_stored_bytes(base, table, index, row) for row in rows.tolist()]
    expected = np.array(sizes, dtype=np.int64)
    values = Tree(base.folder).find(row_keys(table.take(rows), base.index))
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
    return Candidates(rows, files, np.stack([number, offset, length], axis=1)).take(is_good)


def _stored_bytes(base: BaseParts, table: ShardTable, index: Index, row: int) -> int:
    """Bytes that a value of the base must have to be that of a row of the same box."""
    if table.is_object[row]:
        return _ANY
    key, num_bytes = table.key(row), int(table.num_bytes[row])
    wanted = index.chunk_shape(key)
    padded_bytes = num_bytes if wanted is None else math.prod(wanted) * int(table.itemsizes[row])
    if wanted is None or padded_bytes == num_bytes:
        return num_bytes
    # At the edge of a tensor it is padded, and the padding depends on the chunk.
    return padded_bytes if tuple(wanted) == tuple(base.index.chunk_shape(key) or ()) else _NOWHERE


_COPIED_BYTES: Final = 2**24


def keep_shared(
    folder: Path, values: Values, shared: Mapping[str, SealedFile], options: StorageOptions
) -> tuple[Values, list[SealedFile]]:
    """Decide which shared files stay, and make these durable.

    What is used of the others is copied to new files. Returns all values, some of which lie
    elsewhere now, and the shared files that stay and the new ones.
    """
    files, (file, offset, length) = list(values.files), values.extents
    for name in location.files_below(folder, [DATA_FOLDER]).keys() - {*files}:
        # A rank shared it, and then found that it could not use it.
        (folder / name).unlink()
    is_outside, is_durable = file >= 0, options.durability is Durability.FSYNC
    used = np.bincount(file[is_outside], length[is_outside], len(files)).astype(np.int64)
    kept, copied, num_bytes = [], [], 0
    for name, sealed in sorted(shared.items()):
        number = files.index(name)
        if used[number] >= LEAST_SHARED * sealed.num_bytes:
            kept.append(sealed)
            num_bytes += int(used[number])
            # The base may have been saved with less care.
            if is_durable:
                location.fsync_file(folder / name)
            continue
        rows = np.flatnonzero(file == number)
        rows = rows[np.argsort(offset[rows], kind="stable")]
        files[number] = fresh = f"{name.rpartition('/')[0]}/used-{os.urandom(16).hex()}"
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


_MOST_TEXT_BYTES = 2**16


def drop_all_but(root: Path, kept: Index) -> None:
    """Drop everything that ``kept`` does not name, also what a removal cut off has left.

    Raises:
        CorruptCheckpointError: if the database cannot be read; nothing has been deleted then.
    """
    rest, unused, _ = split(root, kept)
    if rest is not None:
        write_tree(root, *rest, write=local_folder.write_content)
        local_folder.fsync_folder(root)
    location.remove_all(unused, root)


def split(
    root: Path, kept: Index
) -> tuple[tuple[list[bytes], Values] | None, tuple[str, ...], dict[str, int]]:
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
    flags = [key.partition(b"/")[0] in tensors or key in cells for key in keys]
    is_kept = np.array(flags, dtype=np.bool_)
    rest, staying, in_use = None, values, set(tree.files)
    if not is_kept.all():
        staying, in_use = _with_texts(root, values.rows(np.flatnonzero(is_kept))), set()
        rest = list(compress(keys, is_kept.tolist())), staying
    used = np.unique(staying.extents[0]).tolist()
    in_use |= {values.files[number] for number in used if number != INLINE}
    file, _, length = values.extents[:, ~is_kept & (values.extents[0] != INLINE)]
    sizes = np.bincount(file, length, len(values.files)).astype(np.int64).tolist()
    sizes_of = zip(values.files, sizes, strict=True)
    shared = {name: size for name, size in sizes_of if size and name in in_use}
    # All files in which the database may keep something.
    files = sorted(location.files_below(root, (NODES_FOLDER, DATA_FOLDER)))
    return rest, tuple(name for name in files if name not in in_use), shared


def _with_texts(root: Path, values: Values) -> Values:
    """These values, with small ones that lie in files of nodes taken out of them."""

    @cache
    def content(file: int, offset: int, length: int) -> bytes:
        if file == INLINE:
            return values.inline[offset]
        return read_extent(Extent(root, values.files[file], offset, length), values.files[file])

    extents, texts = values.extents.copy(), dict[bytes, int]()
    # The last is that of a value in the tree.
    in_nodes = [*(name.startswith(f"{NODES_FOLDER}/") for name in values.files), True]
    is_text = np.array(in_nodes)[extents[0]] & (extents[2] <= _MOST_TEXT_BYTES)
    for row in np.flatnonzero(is_text | (extents[0] == INLINE)).tolist():
        text = content(*extents[:, row].tolist())
        extents[:2, row] = INLINE, texts.setdefault(text, len(texts))
    return Values(values.files, extents, list(texts))
