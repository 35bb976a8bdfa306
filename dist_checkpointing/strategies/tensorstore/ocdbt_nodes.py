"""OCDBT, bytes: manifest, nodes and their columns, encoded and decoded.

A B+tree says in which file, and at which byte, the value of each key lies. All numbers below are
those of the format; nothing here knows what the keys and values mean.
"""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
MOST_U16: Final = (1 << 16) - 1
MOST_U32: Final = (1 << 32) - 1
MOST_I64: Final = (1 << 63) - 1
MOST_U64: Final = (1 << 64) - 1
_MOST_VARINT_BYTES: Final = 10
_BYTES: Final = np.uint64(1) << np.arange(8, 64, 8, dtype=np.uint64)
"""The first number that takes two bytes, three, ..., eight."""


class Malformed(ValueError):
    """A record that is not what the format allows."""


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise Malformed(problem)


class Body:
    """The body of a record, read column by column."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def varint(self, most: int) -> int:
        """One unsigned integer of variable length."""
        # By hand: opening a database reads a dozen, each far cheaper than a column.
        value = shift = 0
        for byte in self.data[self.position : self.position + _MOST_VARINT_BYTES]:
            self.position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value > most:
                    raise Malformed(f"the integer {value} is above {most}")
                return value
        raise Malformed("an integer has no end")

    def varints(self, count: int, most: int = MOST_I64) -> I64:
        """A column of unsigned integers of at most 63 bits."""
        return self.wide_varints(count, most).astype(np.int64)

    def wide_varints(self, count: int, most: int = MOST_U64) -> U64:
        """A column of unsigned integers."""
        # Before anything of this size is made.
        if count > len(self.data) - self.position:
            raise Malformed(f"a column of {count} integers runs over the end")
        if count <= 0:
            return np.zeros(0, dtype=np.uint64)
        begin = self.position
        for width in (1, 3, _MOST_VARINT_BYTES):
            window = self._bytes[begin : begin + width * count]
            stops = np.flatnonzero(window < 0x80)[:count]
            if len(stops) == count:
                break
        else:
            raise Malformed(f"{count} integers have no end, or more than 64 bits")
        self.position = begin + int(stops[-1]) + 1
        values = window.astype(np.uint64) if width == 1 else _joined_digits(window, stops)
        if most < MOST_U64 and int(values.max()) > most:
            raise Malformed(f"the integer {values.max()} is above {most}")
        return values

    def fixed(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """A column of integers of fixed size."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), dtype=kind)

    def take(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self.data):
            raise Malformed(f"{num_bytes} bytes from {self.position} run over the end")
        taken = self.data[self.position : stop]
        self.position = stop
        return taken

    def finish(self) -> None:
        """Make sure that nothing is left."""
        left = len(self.data) - self.position
        _require(left == 0, f"{left} bytes are left")


def _joined_digits(data: npt.NDArray[np.uint8], stops: I64) -> U64:
    """The integers whose last bytes are at ``stops``."""
    sizes = np.diff(stops, prepend=-1)
    longest = int(sizes.max())
    # The tenth byte of an integer has one bit of its 64.
    if longest > _MOST_VARINT_BYTES or (
        longest == _MOST_VARINT_BYTES and (data[stops[sizes == longest]] > 1).any()
    ):
        raise Malformed("an integer has more than 64 bits")
    starts = stops - sizes + 1
    values = np.zeros(len(stops), dtype=np.uint64)
    shortest = int(sizes.min())
    for place in range(longest):
        has = slice(None) if place < shortest else np.flatnonzero(sizes > place)
        digits = (data[starts[has] + place] & 0x7F).astype(np.uint64)
        values[has] |= digits << np.uint64(7 * place)
    return values


def total(lengths: I64, most: int, what: str) -> int:
    """The sum of lengths, each of at most 32 bits or with a sum that cannot overflow."""
    if len(lengths) and (int(lengths.max()) > most or int(lengths.sum()) > most):
        raise Malformed(f"{what} take more than {most} bytes")
    return int(lengths.sum())


def encoded(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Unsigned integers of variable length, one after the other."""
    column = np.asarray(values, dtype=np.uint64)
    if not len(column) or int(column.max()) < 0x80:
        return column.astype(np.uint8).tobytes()
    sizes = np.ones(len(column), dtype=np.int64)
    for place in range(1, _MOST_VARINT_BYTES):
        longer = column >> np.uint64(7 * place) != 0
        if not longer.any():
            break
        sizes += longer
    ends = np.cumsum(sizes)
    data = np.empty(int(ends[-1]), dtype=np.uint8)
    starts = ends - sizes
    for place in range(int(sizes.max())):
        has = np.flatnonzero(sizes > place)
        digits = column[has] >> np.uint64(7 * place) & np.uint64(0x7F)
        more = (sizes[has] > place + 1).astype(np.uint64) << np.uint64(7)
        data[starts[has] + place] = digits | more
    return data.tobytes()


def shared_lengths(strings: Sequence[bytes]) -> I64:
    """How many bytes each of the strings shares with the one before; 0 for the first."""
    count = len(strings)
    shared = np.zeros(count, dtype=np.int64)
    if count < 2:
        return shared
    lengths = np.fromiter(map(len, strings), dtype=np.int64, count=count)
    joined = b"".join(strings) + bytes(8)
    # Eight bytes from each place on, as one number: most neighbours differ within a few of these.
    words = np.ndarray((len(joined) - 7,), dtype="<u8", buffer=joined, strides=(1,))
    starts = np.cumsum(lengths) - lengths
    both = np.minimum(lengths[1:], lengths[:-1])
    rows = np.arange(count - 1)
    place = 0
    while len(rows):
        differ = words[starts[rows] + place] ^ words[starts[rows + 1] + place]
        lowest_bit = differ & (~differ + np.uint64(1))
        alike = np.where(differ == 0, 8, np.searchsorted(_BYTES, lowest_bit, side="right"))
        shared[rows + 1] = np.minimum(place + alike, both[rows])
        place += 8
        rows = rows[(differ == 0) & (both[rows] > place)]
    return shared


MANIFEST: Final = 0x0CDB3A2A
NODE: Final = 0x0CDB20DE
MOST_BODY_BYTES: Final = 1 << 26
"""Eight times what TensorStore puts into a node unless told otherwise."""
_TOO_LARGE: Final = f"it is larger than {MOST_BODY_BYTES} bytes"
_MAGIC_BYTES, _HEAD_BYTES, _CHECKSUM_BYTES = 4, 12, 4
_VERSION, _RAW, _ZSTD, _ZSTD_LEVEL = 0, 0, 1, 1
_WORTH_COMPRESSING: Final = 1 << 12
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_MOST_BLOCK_BYTES: Final = 1 << 17
_ID_BYTES: Final = (0, 1, 2, 4)


def _checksum(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(_CHECKSUM_BYTES, "little")


def sealed(magic: int, body: bytes, *, compressed: bool) -> bytes:
    """A record of this kind with this body."""
    method = _RAW
    if compressed and len(body) >= _WORTH_COMPRESSING:
        from numcodecs import zstd  # noqa: PLC0415 - it takes longer than to read small databases

        method, body = _ZSTD, zstd.compress(body, _ZSTD_LEVEL)
    rest = encoded([_VERSION, method]) + body
    length = _HEAD_BYTES + len(rest) + _CHECKSUM_BYTES
    data = magic.to_bytes(_MAGIC_BYTES, "big") + length.to_bytes(8, "little") + rest
    return data + _checksum(data)


def opened(magic: int, record: bytes) -> bytes:
    """The body of a record, see ``sealed``."""
    head, data = record[:_HEAD_BYTES], record[:-_CHECKSUM_BYTES]
    is_record = len(record) >= _HEAD_BYTES + _CHECKSUM_BYTES
    is_record &= head[:_MAGIC_BYTES] == magic.to_bytes(_MAGIC_BYTES, "big")
    _require(is_record, f"no record of kind {magic:#010x}")
    length = int.from_bytes(head[_MAGIC_BYTES:], "little")
    _require(length == len(record), "its length differs from what it says")
    _require(record[-_CHECKSUM_BYTES:] == _checksum(data), "its checksum differs")
    rest = Body(data[_HEAD_BYTES:])
    version, method = rest.varint(MOST_U32), rest.varint(MOST_U32)
    _require(version == _VERSION, f"format version {version} is not known")
    _require(method in (_RAW, _ZSTD), f"compression method {method} is not known")
    body = rest.data[rest.position :]
    if method == _RAW:
        return body
    _check_frame(body)
    from numcodecs import zstd  # noqa: PLC0415 - as above

    try:
        content: bytes = zstd.decompress(body)
    except (RuntimeError, ValueError) as error:
        raise Malformed(f"it cannot be decompressed: {error}") from error
    _require(len(content) <= MOST_BODY_BYTES, _TOO_LARGE)
    return content


def _check_frame(frame: bytes) -> None:
    """Refuse what is not exactly one zstd frame (RFC 8878), or too large, before it takes memory.

    Frames need not say how large their content is, so the blocks are looked through.
    """
    _require(len(frame) >= 6 and frame[:4] == _FRAME_MAGIC, "its body is no zstd frame")
    described = frame[4]
    is_single = described >> 5 & 1
    size_bytes = (is_single, 2, 4, 8)[described >> 6]
    at = 5 + (1 - is_single) + _ID_BYTES[described & 3]
    content = int.from_bytes(frame[at : at + size_bytes], "little")
    at += size_bytes
    most, is_last = 0, False
    while not is_last:
        block = int.from_bytes(frame[at : at + 3], "little")
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == 1 else size)
        most += _MOST_BLOCK_BYTES if kind == 2 else size
        _require(at <= len(frame) and kind != 3, "a zstd frame is cut off or damaged")
        is_small = max(most, content) <= MOST_BODY_BYTES + _MOST_BLOCK_BYTES
        _require(is_small, _TOO_LARGE)
    _require(at + 4 * (described >> 2 & 1) == len(frame), "its body is more than a zstd frame")


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


class Extents(NamedTuple):
    """Where values or nodes lie, as columns; ``file`` is a position in a list of files."""

    file: I64
    offset: I64
    length: I64

    def rows(self, rows: slice | I64) -> Extents:
        return Extents(self.file[rows], self.offset[rows], self.length[rows])


class TreeStatistics(NamedTuple):
    """What lies below a node, and in it: keys, encoded nodes, and values outside of the tree."""

    num_keys: int
    num_tree_bytes: int
    num_value_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node: keys, whole and sorted, and the extents of their values, or of the nodes below.

    Attributes:
        keys: Of values, or lower bounds of those below each child.
        files: Files of the extents. That of a value in the node itself is -1, and its offset counts
            from the first byte of ``inline``.
        extents: ``[keys]``.
        num_keys: ``[keys]``, keys of values below each child; None of a leaf.
        prefixes: ``[keys]``, with how many bytes of its lower bound all keys below a child begin;
            None of a leaf.
        inline: Values in the node.
        num_bytes: About the memory that it takes.
    """

    keys: Sequence[bytes]
    files: Sequence[FileRef]
    extents: Extents
    num_keys: I64 | None
    prefixes: I64 | None
    inline: bytes
    num_bytes: int


def read_files(body: Body, folder: str) -> list[FileRef]:
    """The data file table of a record whose paths are relative to ``folder``, and lie below it."""
    names, shared, lengths, bases = _read_strings(body, body.varint(MOST_ENTRIES), b"", "paths")
    # Where a path shares more than the base of its neighbour, it must have the same base.
    if (bases > lengths).any() or (
        (shared[1:] > np.minimum(bases[1:], bases[:-1])) & (bases[1:] != bases[:-1])
    ).any():
        raise Malformed("the lengths of base paths do not fit")
    files = []
    for name, cut in zip(names, bases.tolist(), strict=True):
        try:
            base = folder + name[:cut].decode()
            path = base + name[cut:].decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"the path {name!r} is not UTF-8") from error
        # An empty path is the one of an empty tree, which nobody opens.
        if path and any(part in ("", ".", "..") for part in path.split("/")):
            raise Malformed(f"the path {path!r} leads out of the database")
        if "\0" in path or path.endswith(".__lock"):
            raise Malformed(f"the path {path!r} cannot be that of a file")
        files.append(FileRef(path, base))
    return files


def files_table(paths: Sequence[str]) -> bytes:
    """The data file table of these paths, with no base path."""
    names = [path.encode() for path in paths]
    lengths, rests = _split_strings(names, shared_lengths(names), 0)
    return b"".join([*lengths, bytes(len(names)), *rests])


def _split_strings(
    strings: Sequence[bytes], shared: I64, cut: int
) -> tuple[list[bytes], list[bytes]]:
    """Their number and lengths, and the part of each that the one before does not have.

    The reader knows the first ``cut`` bytes of all.
    """
    starts = shared.copy()
    starts[:1] = cut
    rests = [string[start:] for string, start in zip(strings, starts.tolist(), strict=True)]
    columns: list[Sequence[int] | I64] = [[len(rests)], starts[1:] - cut, [*map(len, rests)]]
    return [*map(encoded, columns)], rests


def _read_strings(
    body: Body, count: int, first: bytes, what: str, *, has_column: bool = True
) -> tuple[list[bytes], I64, I64, I64]:
    """So many strings of which each says what it shares with the one before; all begin alike.

    Returns:
        The strings, how many bytes each shares, how many it has, and the column that stands
        between these lengths and the rests, if any.
    """
    shared = np.zeros(count, dtype=np.int64)
    shared[1:] = body.varints(count - 1, MOST_U16)
    shared += len(first)
    rest = body.varints(count, MOST_U16)
    column = body.varints(count, MOST_U16) if has_column else rest
    lengths = shared + rest
    _require((shared[1:] <= lengths[:-1]).all(), f"{what} share more than there is")
    total(lengths, MOST_BODY_BYTES, what)
    _require(int(lengths.max(initial=0)) <= MOST_U16, f"{what} are longer than {MOST_U16} bytes")
    rests, string, start = body.take(int(rest.sum())), first, 0
    strings = []
    for kept, length in zip(shared.tolist(), rest.tolist(), strict=True):
        string = string[:kept] + rests[start : start + length]
        strings.append(string)
        start += length
    return strings, shared, lengths, column


def decode_node(record: bytes, height: int, folder: str, prefix: bytes) -> Node:
    """The node of this height that a record says.

    Paths in it are relative to ``folder``, and all its keys begin with ``prefix``.
    """
    body = Body(opened(NODE, record))
    _require(body.take(1) == bytes([height]), f"its height is {body.data[0]} and not {height}")
    files = read_files(body, folder)
    count = body.varint(MOST_ENTRIES)
    _require(count > 0, "it has no entries")
    # Keys are whole: what the first has of the prefix, all have.
    keys, _, lengths, column = _read_strings(body, count, prefix, "keys", has_column=height > 0)
    prefixes = column + len(prefix) if height else None
    if prefixes is not None and (prefixes > lengths).any():
        raise Malformed("the keys below a child share more than its lower bound")
    _require(all(map(operator.lt, keys, islice(keys, 1, None))), "its keys do not rise")
    num_bytes = len(body.data) + int(lengths.sum()) + sum(len(file.path) for file in files)
    num_bytes += _OBJECT_BYTES * (count + len(files))
    num_keys, inline = None, b""
    if prefixes is not None:
        extents = _extents(body, count, files)
        num_keys = body.varints(count)
        body.wide_varints(2 * count)
    else:
        lengths = body.varints(count)
        kinds = body.fixed(count, "u1")
        _require(kinds.max() <= _OUTSIDE, f"a value of kind {kinds.max()}")
        outside, inside = np.flatnonzero(kinds), lengths[kinds != _OUTSIDE]
        extents = Extents(np.full(count, -1), np.zeros(count, dtype=np.int64), lengths)
        extents.file[outside], extents.offset[outside], _ = _extents(
            body, len(outside), files, lengths[outside]
        )
        if int(inside.max(initial=0)) > _MOST_INLINE_BYTES:
            raise Malformed(f"a value in the tree has more than {_MOST_INLINE_BYTES} bytes")
        extents.offset[kinds != _OUTSIDE] = np.cumsum(inside) - inside
        inline = body.take(total(inside, MOST_BODY_BYTES, "values in the tree"))
    body.finish()
    return Node(keys, files, extents, num_keys, prefixes, inline, num_bytes)


def _file_numbers(body: Body, count: int, num_files: int) -> I64:
    file = body.varints(count)
    last = int(file.max(initial=-1))
    _require(last < num_files, f"file {last} of {num_files}")
    return file


def _extents(
    body: Body, count: int, files: Sequence[FileRef], lengths: I64 | None = None
) -> Extents:
    file = _file_numbers(body, count, len(files))
    used = np.unique(file).tolist()
    _require(all(files[number].path for number in used), "a file without a path")
    offset = body.varints(count)
    if lengths is None:
        lengths = body.varints(count)
    _require((offset <= MOST_I64 - lengths).all(), "a place behind the end of any file")
    return Extents(file, offset, lengths)


def encode_node(
    keys: Sequence[bytes],
    shared: I64,
    cut: int,
    files: Sequence[str],
    extents: Extents,
    height: int = 0,
    prefixes: I64 | None = None,
    below: Sequence[Sequence[int]] | I64 = (),
) -> bytes:
    """The record of a leaf whose values are all outside of the tree, or of a node above others.

    Args:
        keys: whole and sorted; of a node above others lower bounds.
        shared: bytes that each has in common with the one before it.
        cut: the node above knows so many bytes of all of them.
        files: of the extents.
        extents: of values or children.
        height: of the node.
        prefixes: with how many bytes of its lower bound all keys below a child begin.
        below: ``[keys, 3]``, the statistics of each child.
    """
    used, file = np.unique(extents.file, return_inverse=True)
    lengths, rests = _split_strings(keys, shared, cut)
    if prefixes is not None:
        places = [*map(encoded, [file, extents.offset, extents.length, *np.transpose(below)])]
        lengths.append(encoded(prefixes - cut))
    else:
        places = [encoded(extents.length), bytes([_OUTSIDE]) * len(keys)]
        places += [encoded(file), encoded(extents.offset)]
    table = files_table([files[number] for number in used.tolist()])
    body = b"".join([bytes([height]), table, *lengths, *rests, *places])
    return sealed(NODE, body, compressed=True)


MANIFEST_NAME: Final = "manifest.ocdbt"
_SINGLE, _NUMBERED = 0, 1
_INLINE_BYTES: Final = 1024
NODE_BYTES: Final = 1 << 18
"""Estimated size of a decoded node. A reader of one key decodes one for each level of the tree."""
_ARITY_LOG2, _MOST_ARITY_LOG2 = 4, 16
_LEVEL_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Root:
    """The node where a tree begins, and the statistics of the whole tree."""

    height: int
    file: FileRef
    offset: int
    length: int
    statistics: TreeStatistics


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says: its settings, encoded, and the root of its newest version, if any.

    If its generation is 0, other manifests, with numbers, say where trees begin.
    """

    config: bytes
    generation: int
    root: Root | None


def encode_manifest(root: Root | None) -> bytes:
    """The manifest of a database with one version, whose root lies in a file without base path."""
    path, height, numbers = "", 0, [0, MOST_U64, MOST_U64, 0, 0, 0]
    if root is not None:
        path, height = root.file.path, root.height
        numbers = [0, root.offset, root.length, *root.statistics]
    config = uuid.uuid4().bytes + bytes([_SINGLE]) + encoded([_INLINE_BYTES, NODE_BYTES])
    config += bytes([_ARITY_LOG2]) + encoded([_ZSTD]) + bytes(_LEVEL_BYTES)
    version = encoded([1, 1]) + bytes([height]) + encoded(np.array(numbers, dtype=np.uint64))
    version += time.time_ns().to_bytes(8, "little")
    body = config + files_table([path]) + version + encoded([0])
    return sealed(MANIFEST, body, compressed=False)


def decode_manifest(record: bytes) -> Manifest:
    """What the bytes of a manifest say."""
    body = Body(opened(MANIFEST, record))
    identity = body.take(16)
    kind = body.take(1)[0]
    start = body.position
    body.varint(MOST_U32)
    body.varint(MOST_U32)
    arity = body.take(1)[0]
    method = body.varint(MOST_U32)
    if method == _ZSTD:
        body.take(_LEVEL_BYTES)
    if kind > _NUMBERED or not 1 <= arity <= _MOST_ARITY_LOG2 or method > _ZSTD:
        raise Malformed("its settings are not known")
    config = identity + body.data[start : body.position]
    if kind == _NUMBERED:
        body.finish()
        return Manifest(config, 0, None)
    files = read_files(body, "")
    manifest = Manifest(config, *_newest(body, files, arity))
    _check_older(body, len(files), arity)
    body.finish()
    return manifest


def _rise(generations: I64) -> bool:
    return int(generations[0]) >= 1 and bool((np.diff(generations) > 0).all())


def _newest(body: Body, files: list[FileRef], arity: int) -> tuple[int, Root | None]:
    """The last of the versions that stand in the manifest itself."""
    count = body.varint(1 << arity)
    _require(count > 0, "it has no version")
    generations = body.varints(count)
    heights = body.fixed(count, "u1")
    file = _file_numbers(body, count, len(files))
    numbers = [int(body.wide_varints(count)[-1]) for _ in range(5)]
    body.fixed(count, "<u8")
    same = generations - 1 >> arity
    _require(_rise(generations) and (same == same[-1]).all(), "its versions are not in order")
    newest, height = files[int(file[-1])], int(heights[-1])
    offset, length, below = numbers[0], numbers[1], TreeStatistics(*numbers[2:])
    if (offset, length) == (MOST_U64, MOST_U64):
        _require(not (newest.path or height or any(below)), "its empty tree is not empty")
        return int(generations[-1]), None
    is_here = newest.path and length <= MOST_BODY_BYTES and offset + length <= MOST_I64
    _require(bool(is_here), "its tree is nowhere")
    return int(generations[-1]), Root(height, newest, offset, length, below)


def _check_older(body: Body, num_files: int, arity: int) -> None:
    """Check the references to nodes of older versions; their content is not read."""
    count = body.varint(MOST_HEIGHT)
    generations = body.varints(count)
    _file_numbers(body, count, num_files)
    for _ in range(3):
        body.wide_varints(count)
    body.fixed(count, "<u8")
    heights = body.fixed(count, "u1").astype(np.int64)
    if count and (
        not _rise(generations)
        or (np.diff(heights) >= 0).any()
        or int(heights[-1]) < 1
        or int(heights[0]) > min(MOST_HEIGHT, 63 // arity - 1)
    ):
        raise Malformed("its older versions are not in order")
