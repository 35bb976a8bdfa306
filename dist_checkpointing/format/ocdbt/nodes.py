"""Nodes of the tree of keys: leaves, which say where values are, and nodes above them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from dist_checkpointing.format.ocdbt.columns import (
    I64,
    MOST_I64,
    MOST_U16,
    Body,
    Malformed,
    encoded,
    shared_lengths,
    total,
)
from dist_checkpointing.format.ocdbt.records import MOST_BODY_BYTES, NODE, opened, sealed

Columns = list[Sequence[int] | I64]

MOST_HEIGHT: Final = 255
MOST_ENTRIES: Final = 1 << 20
_MOST_INLINE_BYTES: Final = 1 << 20
_OUTSIDE: Final = 1
_OBJECT_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that a record refers to, and the folder that paths in its nodes are relative to."""

    path: str
    folder: str


@dataclass(frozen=True, slots=True)
class Extents:
    """Where values or nodes lie, as columns; ``file`` is a position in a list of files."""

    file: I64
    offset: I64
    length: I64

    def rows(self, rows: slice | I64) -> Extents:
        return Extents(self.file[rows], self.offset[rows], self.length[rows])

    @property
    def columns(self) -> tuple[I64, I64, I64]:
        return self.file, self.offset, self.length


@dataclass(frozen=True, slots=True)
class TreeStatistics:
    """What lies below a node, and in it: keys, encoded nodes, and values outside of the tree."""

    num_keys: int
    num_tree_bytes: int
    num_value_bytes: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node at the bottom: whole keys, sorted, the extents of their values, and files that hold
    them.

    The file of a value in the node itself is -1, and its offset counts from the first byte of
    ``inline``. The node takes about ``num_bytes`` of memory.
    """

    keys: Sequence[bytes]
    files: Sequence[FileRef]
    extents: Extents
    inline: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Interior:
    """A node above others: extents of the children, and files that hold them.

    Keys are lower bounds of those below each child, whole, sorted; ``prefixes`` are how many bytes
    of its lower bound all keys below a child begin with.
    """

    keys: Sequence[bytes]
    prefixes: I64
    files: Sequence[FileRef]
    extents: Extents
    num_keys: I64
    num_bytes: int


def data_file(base: str, relative: str, folder: str) -> FileRef:
    """A file of a table that stands in a record below ``folder``.

    Raises:
        Malformed: if it would lie outside of the database, or where TensorStore does not read it.
    """
    path = f"{folder}{base}{relative}"
    # An empty path is the one of an empty tree, which nobody opens.
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise Malformed(f"the path {path!r} leads out of the database")
    if "\0" in path or path.endswith(".__lock"):
        raise Malformed(f"the path {path!r} cannot be that of a file")
    return FileRef(path, folder + base)


def read_files(body: Body, folder: str) -> list[FileRef]:
    """The data file table of a record whose paths are relative to ``folder``."""
    count = body.varint(MOST_ENTRIES)
    shared = np.concatenate([[0], body.varints(count - 1, MOST_U16)]) if count else np.zeros(0, int)
    rest = body.varints(count, MOST_U16)
    base = body.varints(count, MOST_U16)
    lengths = _checked_lengths(shared, rest, "paths")
    # Where a path shares more than the base of its neighbour, it must have the same base.
    if (base > lengths).any() or (
        (shared[1:] > np.minimum(base[1:], base[:-1])) & (base[1:] != base[:-1])
    ).any():
        raise Malformed("the lengths of base paths do not fit")
    paths = _strings(shared, rest, body, b"")
    files = []
    for path, cut in zip(paths, base.tolist(), strict=True):
        try:
            files.append(data_file(path[:cut].decode(), path[cut:].decode(), folder))
        except UnicodeDecodeError as error:
            raise Malformed(f"the path {path!r} is not UTF-8") from error
    return files


def files_table(paths: Sequence[str]) -> bytes:
    """The data file table of these paths, with no base path."""
    names = [path.encode() for path in paths]
    shared = shared_lengths(names)
    rests = [name[cut:] for name, cut in zip(names, shared.tolist(), strict=True)]
    lengths = [len(rest) for rest in rests]
    columns: Columns = [[len(names)], shared[1:], lengths, [0] * len(names)]
    return b"".join([*map(encoded, columns), *rests])


def _checked_lengths(shared: I64, rest: I64, what: str) -> I64:
    """The lengths of strings told by what they share with the one before."""
    lengths = shared + rest
    if (shared[1:] > lengths[:-1]).any():
        raise Malformed(f"{what} share more than there is")
    total(lengths, MOST_BODY_BYTES, what)
    if len(lengths) and int(lengths.max()) > MOST_U16:
        raise Malformed(f"{what} are longer than {MOST_U16} bytes")
    return lengths


def _strings(shared: I64, rest: I64, body: Body, first: bytes) -> list[bytes]:
    """The strings whose rests come next; the first one begins with ``first``."""
    rests = body.take(total(rest, MOST_BODY_BYTES, "strings"))
    strings = []
    string, start = first, 0
    for kept, length in zip(shared.tolist(), rest.tolist(), strict=True):
        stop = start + length
        string = string[:kept] + rests[start:stop]
        strings.append(string)
        start = stop
    return strings


def decode_node(record: bytes, height: int, folder: str, prefix: bytes) -> Leaf | Interior:
    """The node of this height that a record says.

    Paths in it are relative to ``folder``, and all its keys begin with ``prefix``.
    """
    body = Body(opened(NODE, record))
    if body.take(1) != bytes([height]):
        raise Malformed(f"its height is {body.data[0]} and not {height}")
    files = read_files(body, folder)
    count = body.varint(MOST_ENTRIES)
    if count == 0:
        raise Malformed("it has no entries")
    # Keys are whole: what the first has of the prefix, all have.
    shared = np.concatenate([[0], body.varints(count - 1, MOST_U16)]) + len(prefix)
    rest = body.varints(count, MOST_U16)
    prefixes = body.varints(count, MOST_U16) + len(prefix) if height else np.zeros(count, int)
    key_bytes = int(_checked_lengths(shared, rest, "keys").sum())
    if (prefixes > shared + rest).any():
        raise Malformed("the keys below a child share more than its lower bound")
    keys = _strings(shared, rest, body, prefix)
    if not all(map(operator.lt, keys, islice(keys, 1, None))):
        raise Malformed("its keys do not rise")
    path_bytes = sum(len(file.path) for file in files)
    num_bytes = len(body.data) + key_bytes + path_bytes + _OBJECT_BYTES * (count + len(files))
    if height:
        extents = _extents(body, count, files)
        num_keys = body.varints(count)
        body.wide_varints(2 * count)
        body.finish()
        return Interior(keys, prefixes, files, extents, num_keys, num_bytes)
    lengths = body.varints(count)
    kinds = body.fixed(count, "u1")
    if int(kinds.max()) > _OUTSIDE:
        raise Malformed(f"a value of kind {kinds.max()}")
    is_outside = kinds == _OUTSIDE
    file = np.full(count, -1)
    offset = np.zeros(count, dtype=np.int64)
    outside = _extents(body, int(is_outside.sum()), files, lengths[is_outside])
    file[is_outside], offset[is_outside] = outside.file, outside.offset
    inside = lengths[~is_outside]
    if len(inside) and int(inside.max()) > _MOST_INLINE_BYTES:
        raise Malformed(f"a value in the tree has more than {_MOST_INLINE_BYTES} bytes")
    offset[~is_outside] = np.cumsum(inside) - inside
    inline = body.take(total(inside, MOST_BODY_BYTES, "values in the tree"))
    body.finish()
    return Leaf(keys, files, Extents(file, offset, lengths), inline, num_bytes)


def _extents(
    body: Body, count: int, files: Sequence[FileRef], lengths: I64 | None = None
) -> Extents:
    file = body.varints(count)
    if count and int(file.max()) >= len(files):
        raise Malformed(f"file {file.max()} of {len(files)}")
    if any(not files[number].path for number in np.unique(file).tolist()):
        raise Malformed("a file without a path")
    offset = body.varints(count)
    if lengths is None:
        lengths = body.varints(count)
    if (offset > MOST_I64 - lengths).any():
        raise Malformed("a place behind the end of any file")
    return Extents(file, offset, lengths)


def encode_leaf(
    keys: Sequence[bytes], shared: I64, cut: int, files: Sequence[str], extents: Extents
) -> bytes:
    """The record of a leaf whose values are all outside of the tree.

    Keys are whole and sorted. Each has ``shared`` bytes in common with the one before it, and the
    node above knows the first ``cut`` of all.
    """
    used, file = np.unique(extents.file, return_inverse=True)
    columns = [
        encoded(extents.length),
        bytes([_OUTSIDE]) * len(keys),
        encoded(file),
        encoded(extents.offset),
    ]
    table = files_table([files[number] for number in used.tolist()])
    body = [b"\0", table, *_key_columns(keys, shared, cut, None), *columns]
    return sealed(NODE, b"".join(body), compressed=True)


def encode_interior(
    height: int,
    keys: Sequence[bytes],
    cut: int,
    prefixes: I64,
    path: str,
    extents: Extents,
    below: Sequence[TreeStatistics],
) -> bytes:
    """The record of a node whose children all lie in one file.

    Keys are lower bounds, whole and sorted, of which the node above knows the first ``cut`` bytes.
    All keys below a child begin with ``prefixes`` bytes of its own.
    """
    statistics: Columns = [
        [row.num_keys for row in below],
        [row.num_tree_bytes for row in below],
        [row.num_value_bytes for row in below],
    ]
    places: Columns = [np.zeros(len(keys), dtype=np.int64), extents.offset, extents.length]
    body = [
        bytes([height]),
        files_table([path]),
        *_key_columns(keys, shared_lengths(keys), cut, prefixes - cut),
        *map(encoded, [*places, *statistics]),
    ]
    return sealed(NODE, b"".join(body), compressed=True)


def _key_columns(keys: Sequence[bytes], shared: I64, cut: int, prefixes: I64 | None) -> list[bytes]:
    starts = shared.copy()
    starts[0] = cut
    rests = [key[start:] for key, start in zip(keys, starts.tolist(), strict=True)]
    lengths = np.fromiter(map(len, rests), dtype=np.int64, count=len(rests))
    columns: Columns = [[len(keys)], starts[1:] - cut, lengths]
    if prefixes is not None:
        columns.append(prefixes)
    return [*map(encoded, columns), *rests]
