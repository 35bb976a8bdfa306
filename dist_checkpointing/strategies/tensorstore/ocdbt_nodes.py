"""OCDBT, bytes: manifest, nodes and their columns, encoded and decoded.

A B+tree says in which file, and at which byte, the value of each key lies. All numbers below are
those of the format; nothing here knows what the keys and values mean. Columns of integers that
follow each other in a record are read and written together, as rows of one array.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from dist_checkpointing.format.geometry import renumbered

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


class Body:
    """The body of a record, read column by column."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position: int = 0

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

    def varints(self, count: int, *most: int) -> U64:
        """Columns of so many unsigned integers, each with its own limit: ``[columns, count]``."""
        total = max(0, count) * len(most)
        digits = self.data[self.position : self.position + total]
        # Before anything of this size is made.
        if total > len(digits):
            raise Malformed(f"a column of {count} integers runs over the end")
        if digits.isascii():  # each is one byte
            values = np.frombuffer(digits, dtype=np.uint8).astype(np.uint64)
            self.position += total
        else:
            values, num_bytes = _joined_digits(self.data, self.position, total)
            self.position += num_bytes
        columns = values.reshape(len(most), max(0, count))
        for largest, limit in zip(columns.max(axis=1, initial=0).tolist(), most, strict=True):
            if largest > limit:
                raise Malformed(f"the integer {largest} is above {limit}")
        return columns

    def take(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self.data):
            raise Malformed(f"{num_bytes} bytes from {self.position} run over the end")
        taken = self.data[self.position : stop]
        self.position = stop
        return taken

    def finish(self) -> None:
        """Make sure that nothing is left."""
        if left := len(self.data) - self.position:
            raise Malformed(f"{left} bytes are left")


def _joined_digits(data: bytes, position: int, total: int) -> tuple[U64, int]:
    """So many integers from a position on, and the bytes that they take."""
    most_bytes = min(_MOST_VARINT_BYTES * total, len(data) - position)
    digits = np.frombuffer(data, np.uint8, most_bytes, position)
    stops = np.flatnonzero(digits < 0x80)[:total]
    if len(stops) < total:
        raise Malformed(f"{total} integers have no end, or more than 64 bits")
    starts = np.zeros_like(stops)
    starts[1:] = stops[:-1] + 1
    sizes, digits = stops - starts + 1, digits[: stops[-1] + 1]
    longest = int(sizes.max())
    # The tenth byte of an integer has one bit of its 64.
    if longest > _MOST_VARINT_BYTES or (
        longest == _MOST_VARINT_BYTES and (digits[stops[sizes == longest]] > 1).any()
    ):
        raise Malformed("an integer has more than 64 bits")
    places = np.arange(len(digits)) - starts.repeat(sizes)
    parts = (digits & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, starts), len(digits)


def encoded(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Unsigned integers of variable length, one after the other."""
    column = np.asarray(values, dtype=np.uint64).reshape(-1, 1)
    most = int(column.max(initial=0))
    if most < 0x80:
        return column.astype(np.uint8).tobytes()
    # What is left of each integer at each of its bytes.
    rest = column >> np.arange(0, most.bit_length(), 7, dtype=np.uint64)
    is_used = rest != 0
    is_used[:, 0] = True
    # All but the last one have the highest bit.
    digits = np.where(rest > 0x7F, rest | 0x80, rest).astype(np.uint8)
    data: bytes = digits[is_used].tobytes()
    return data


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
    starts = lengths.cumsum() - lengths
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


def sealed(magic: int, body: bytes, *, compressed: bool) -> bytes:
    """A record of this kind with this body."""
    method = _RAW
    if compressed and len(body) >= _WORTH_COMPRESSING:
        from numcodecs import zstd  # noqa: PLC0415 - it takes longer than to read small databases

        method, body = _ZSTD, zstd.compress(body, _ZSTD_LEVEL)
    rest = bytes([_VERSION, method]) + body
    length = _HEAD_BYTES + len(rest) + _CHECKSUM_BYTES
    data = magic.to_bytes(_MAGIC_BYTES, "big") + length.to_bytes(8, "little") + rest
    return data + int(google_crc32c.value(data)).to_bytes(_CHECKSUM_BYTES, "little")


def opened(magic: int, record: bytes) -> bytes:
    """The body of a record, see ``sealed``."""
    head, data = record[:_HEAD_BYTES], record[:-_CHECKSUM_BYTES]
    is_record = len(record) >= _HEAD_BYTES + _CHECKSUM_BYTES
    is_record &= head[:_MAGIC_BYTES] == magic.to_bytes(_MAGIC_BYTES, "big")
    if not is_record:
        raise Malformed(f"no record of kind {magic:#010x}")
    if int.from_bytes(head[_MAGIC_BYTES:], "little") != len(record):
        raise Malformed("its length differs from what it says")
    if int.from_bytes(record[-_CHECKSUM_BYTES:], "little") != google_crc32c.value(data):
        raise Malformed("its checksum differs")
    rest = Body(data[_HEAD_BYTES:])
    version, method = rest.varint(MOST_U32), rest.varint(MOST_U32)
    if version != _VERSION:
        raise Malformed(f"format version {version} is not known")
    if method not in (_RAW, _ZSTD):
        raise Malformed(f"compression method {method} is not known")
    body = rest.data[rest.position :]
    if method == _RAW:
        return body
    if zstd_content_bytes(body) > MOST_BODY_BYTES + _MOST_BLOCK_BYTES:
        raise Malformed(_TOO_LARGE)
    from numcodecs import zstd  # noqa: PLC0415 - as above

    try:
        content: bytes = zstd.decompress(body)
    except (RuntimeError, ValueError) as error:
        raise Malformed(f"it cannot be decompressed: {error}") from error
    if len(content) > MOST_BODY_BYTES:
        raise Malformed(_TOO_LARGE)
    return content


def zstd_content_bytes(frame: bytes) -> int:
    """How large the content of exactly one zstd frame (RFC 8878) is, or at most can be.

    Frames need not say how large it is, so the blocks are looked through.
    """
    if len(frame) < 6 or frame[:4] != _FRAME_MAGIC:
        raise Malformed("it is no zstd frame")
    described = frame[4]
    is_single = described >> 5 & 1
    size_bytes = (is_single, 2, 4, 8)[described >> 6]
    start = 5 + (1 - is_single) + _ID_BYTES[described & 3]
    at = start + size_bytes
    said = int.from_bytes(frame[start:at], "little") + (256 if size_bytes == 2 else 0)
    most, is_last = 0, False
    while not is_last:
        block = int.from_bytes(frame[at : at + 3], "little")
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == 1 else size)
        most += _MOST_BLOCK_BYTES if kind == 2 else size
        if at > len(frame) or kind == 3:
            raise Malformed("a zstd frame is truncated or damaged")
    if at + 4 * (described >> 2 & 1) != len(frame):
        raise Malformed("it is more than a zstd frame")
    return said if size_bytes else most


MOST_ENTRIES: Final = 1 << 20
INLINE: Final = -1
_MOST_INLINE_BYTES: Final = 1 << 20
_OUTSIDE: Final = 1
_OBJECT_BYTES: Final = 64


@dataclass(slots=True)
class NodeRef:
    """Where a node lies, and what the manifest or the node above says of it.

    Attributes:
        folder: Paths in the node are relative to it.
        num_keys: Keys of values below the node.
        num_tree_bytes: Bytes of it and of all nodes below.
        num_value_bytes: Bytes of all values outside of the tree.
        prefix: All its keys begin with this; none is below ``low``, and all are below ``high``.
        node: The node itself, where it is remembered.
    """

    path: str
    folder: str
    height: int
    offset: int
    length: int
    num_keys: int
    num_tree_bytes: int
    num_value_bytes: int
    prefix: bytes = b""
    low: bytes = b""
    high: bytes | None = None
    node: Node | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node: keys, whole and sorted, and where their values lie, or the nodes below.

    Attributes:
        keys: Of values, or lower bounds of those below each child.
        files: Paths of the files of the values.
        extents: ``[3, keys]``, of a leaf: position in ``files``, first byte, number of bytes. Of a
            value in the node itself the first is ``INLINE``, and the second a position in
            ``inline``.
        inline: Values in the node.
        children: A node for each key; empty for a leaf.
        num_bytes: About the memory that it takes.
    """

    keys: Sequence[bytes]
    files: Sequence[str]
    extents: I64
    inline: Sequence[bytes]
    children: Sequence[NodeRef]
    num_bytes: int


def _read_strings(
    body: Body, count: int, first: bytes, what: str, num_columns: int
) -> tuple[list[bytes], list[list[int]]]:
    """So many strings of which each says what it shares with the one before; all begin alike.

    Returns:
        The strings, and the columns that stand before the rests: how many bytes each shares beside
        ``first``, how many it adds, and others that the caller knows.
    """
    # All but the first share something.
    numbers = [0, *body.varints(num_columns * count - 1, MOST_U16)[0].tolist()]
    columns = [numbers[at : at + count] for at in range(0, num_columns * count, count or 1)]
    shared, added = columns[:2] if count else ([], [])
    rests, string, start, total, common = body.take(sum(added)), first, 0, 0, len(first)
    strings = []
    for kept, length in zip(shared, added, strict=True):
        if common + kept > len(string):
            raise Malformed(f"{what} share more than there is")
        string = string[: common + kept] + rests[start : start + length]
        if len(string) > MOST_U16:
            raise Malformed(f"{what} are longer than {MOST_U16} bytes")
        if (total := total + len(string)) > MOST_BODY_BYTES:
            raise Malformed(f"{what} take more than {MOST_BODY_BYTES} bytes")
        strings.append(string)
        start += length
    return strings, columns


def _encoded_strings(strings: Sequence[bytes], shared: I64, cut: int, *others: I64) -> bytes:
    """Their number, see ``_read_strings``; the reader knows the first ``cut`` bytes of all."""
    starts = shared.copy()
    starts[:1] = cut
    rests = [string[start:] for string, start in zip(strings, starts.tolist(), strict=True)]
    columns = np.concatenate([[len(rests)], starts[1:] - cut, [*map(len, rests)], *others])
    return b"".join([encoded(columns), *rests])


def read_files(body: Body, folder: str) -> list[tuple[str, str]]:
    """The data file table of a record whose paths are relative to ``folder``, and lie below it.

    Each path with the folder that paths in a node there are relative to.
    """
    names, columns = _read_strings(body, body.varint(MOST_ENTRIES), b"", "paths", 3)
    files, last = [], 0
    for name, shared, _, cut in zip(names, *columns, strict=True):
        # Where a path shares more than the base of its neighbour, it must have the same base.
        if cut > len(name) or (shared > min(cut, last) and cut != last):
            raise Malformed("the lengths of base paths do not fit")
        last = cut
        try:
            base = folder + name[:cut].decode()
            path = base + name[cut:].decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"the path {name!r} is not UTF-8") from error
        # An empty path is the one of an empty tree, which nobody opens.
        if path and not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise Malformed(f"the path {path!r} leads out of the database")
        if "\0" in path or path.endswith(".__lock"):
            raise Malformed(f"the path {path!r} cannot be that of a file")
        files.append((path, base))
    return files


def files_table(paths: Sequence[str]) -> bytes:
    """The data file table of these paths, with no base path, which all stand there whole."""
    names, zeros = [path.encode() for path in paths], np.zeros(len(paths), dtype=np.int64)
    return _encoded_strings(names, zeros, 0, zeros)


def decode_node(record: bytes, ref: NodeRef) -> Node:
    """The node that a record says, which must be the one that ``ref`` tells of."""
    body = Body(opened(NODE, record))
    (height,) = body.take(1)
    if height != ref.height:
        raise Malformed(f"its height is {height} and not {ref.height}")
    files = read_files(body, ref.folder)
    paths = [path for path, _ in files]
    count = body.varint(MOST_ENTRIES)
    if count == 0:
        raise Malformed("it has no entries")
    # Keys are whole: what the first has of the prefix, all have.
    keys, columns = _read_strings(body, count, ref.prefix, "keys", 3 if height else 2)
    if not all(map(operator.lt, keys, islice(keys, 1, None))):
        raise Malformed("its keys do not rise")
    num_bytes = len(body.data) + sum(map(len, keys)) + sum(map(len, paths))
    # Of each child there is a NodeRef.
    num_bytes += _OBJECT_BYTES * (count * (8 if height else 1) + len(files))
    inline: list[bytes] = []
    children: list[NodeRef] = []
    if height:
        prefixes = [len(ref.prefix) + more for more in columns[2]]
        if any(map(operator.gt, prefixes, map(len, keys))):
            raise Malformed("the keys below a child share more than its lower bound")
        entries = body.varints(count, *[MOST_I64] * 4, MOST_U64, MOST_U64)
        extents = entries[:3].astype(np.int64)
        _check_extents(extents, paths)
        bounds = zip(prefixes, keys, [*keys[1:], ref.high], strict=True)
        for entry, (cut, low, high) in zip(entries.T, bounds, strict=True):
            file, *numbers = entry.tolist()
            child = NodeRef(*files[int(file)], height - 1, *numbers)
            child.prefix, child.low, child.high = low[:cut], low, high
            children.append(child)
        num_keys = sum(child.num_keys for child in children)
    else:
        extents, inline = _read_values(body, count, paths)
        num_keys = count
    body.finish()
    if num_keys != ref.num_keys:
        raise Malformed(f"the number of keys below it is {num_keys} and not {ref.num_keys}")
    if keys[0] < ref.low or (ref.high is not None and keys[-1] >= ref.high):
        raise Malformed("its keys are not those that the node above tells")
    return Node(keys, paths, extents, inline, children, num_bytes)


def _read_values(body: Body, count: int, paths: Sequence[str]) -> tuple[I64, list[bytes]]:
    """The extents of the values of a leaf, and those that are in the leaf itself."""
    extents = np.full((3, count), INLINE, dtype=np.int64)
    extents[2] = body.varints(count, MOST_I64)
    kinds = np.frombuffer(body.take(count), dtype=np.uint8)
    if kinds.max() > _OUTSIDE:
        raise Malformed(f"a value of kind {kinds.max()}")
    outside, inside = np.flatnonzero(kinds), np.flatnonzero(kinds != _OUTSIDE)
    extents[:2, outside] = body.varints(len(outside), MOST_I64, MOST_I64)
    _check_extents(extents[:, outside], paths)
    extents[1, inside] = np.arange(len(inside))
    sizes = extents[2, inside]
    if (sizes > _MOST_INLINE_BYTES).any():
        raise Malformed(f"a value in the tree has more than {_MOST_INLINE_BYTES} bytes")
    return extents, [body.take(size) for size in sizes.tolist()]


def _check_extents(extents: I64, paths: Sequence[str]) -> None:
    file, offset, length = extents
    _check_files(int(file.max(initial=-1)), len(paths))
    if "" in paths and not all(paths[number] for number in file.tolist()):
        raise Malformed("a file without a path")
    if (offset > MOST_I64 - length).any():
        raise Malformed("a place behind the end of any file")


def _check_files(largest: int, num_files: int) -> None:
    if largest >= num_files:
        raise Malformed(f"file {largest} of {num_files}")


def encode_node(
    keys: Sequence[bytes],
    shared: I64,
    cut: int,
    files: Sequence[str],
    entries: I64,
    height: int = 0,
    prefixes: I64 | Sequence[int] = (),
) -> bytes:
    """The record of a leaf whose values are all outside of the tree, or of a node above others.

    Keys are whole and sorted; ``shared`` says how many bytes each has in common with the one before
    it, and the node above knows the first ``cut`` bytes of all. Of each key ``entries`` has a
    position in ``files``, first byte and number of bytes; of a child also what a NodeRef says is
    below it, and ``prefixes`` has with how many bytes of its lower bound all keys there begin.
    """
    used, (file,) = renumbered(len(files), entries[0])
    others = [np.subtract(prefixes, cut)] if height else []
    strings = _encoded_strings(keys, shared, cut, *others)
    columns = [file, *entries[1:]]
    if not height:  # a byte says of each value where it is, which is as good as a number
        columns = [entries[2], np.full_like(file, _OUTSIDE), file, entries[1]]
    table = files_table([files[number] for number in used])
    body = b"".join([bytes([height]), table, strings, encoded(np.concatenate(columns))])
    return sealed(NODE, body, compressed=True)


MANIFEST_NAME: Final = "manifest.ocdbt"
_SINGLE: Final = 0
_INLINE_BYTES: Final = 1024
NODE_BYTES: Final = 1 << 18
"""Estimated size of a decoded node. A reader of one key decodes one for each level of the tree."""
_ARITY_LOG2, _MOST_ARITY_LOG2 = 4, 16
_LEVEL_BYTES: Final = 4
# What is one byte in the format is as good as a number below 128.
_CONFIG: Final = encoded(
    [_SINGLE, _INLINE_BYTES, NODE_BYTES, _ARITY_LOG2, _ZSTD, *bytes(_LEVEL_BYTES)]
)


def encode_manifest(root: NodeRef | None) -> bytes:
    """The manifest of a database with one version, whose root lies in a file without base path."""
    root = root or NodeRef("", "", 0, MOST_U64, MOST_U64, 0, 0, 0)
    numbers = (0, root.offset, root.length, root.num_keys, root.num_tree_bytes)
    version = b"\x01\x01" + bytes([root.height]) + encoded([*numbers, root.num_value_bytes])
    version += time.time_ns().to_bytes(8, "little")
    body = os.urandom(16) + _CONFIG + files_table([root.path]) + version + b"\x00"
    return sealed(MANIFEST, body, compressed=False)


def decode_manifest(record: bytes) -> NodeRef | None:
    """The root of the newest version that the bytes of a manifest tell of; None if that is empty.

    Settings in which no save of ours makes a database are those of other programs.
    """
    body = Body(opened(MANIFEST, record))
    *_, kind = body.take(17)
    body.varint(MOST_U32)
    body.varint(MOST_U32)
    (arity,) = body.take(1)
    method = body.varint(MOST_U32)
    if method == _ZSTD:
        body.take(_LEVEL_BYTES)
    if kind != _SINGLE or not 1 <= arity <= _MOST_ARITY_LOG2 or method > _ZSTD:
        raise Malformed("its settings are not known")
    # What follows are references to nodes of older versions.
    return _read_newest(body, read_files(body, ""), arity)


def _read_newest(body: Body, files: Sequence[tuple[str, str]], arity: int) -> NodeRef | None:
    """The last of the versions that stand in the manifest itself."""
    count = body.varint(1 << arity)
    if count == 0:
        raise Malformed("it has no version")
    generations = [body.varint(MOST_I64) for _ in range(count)]
    height = body.take(count)[-1]
    columns = [[body.varint(most) for _ in range(count)] for most in (MOST_I64, *[MOST_U64] * 5)]
    body.take(8 * count)  # the times of the commits
    _check_files(max(columns[0]), len(files))
    groups = {generation - 1 >> arity for generation in generations}
    if min(groups) < 0 or len(groups) > 1 or generations != sorted({*generations}):
        raise Malformed("its versions are not in order")
    file, offset, length, *below = (column[-1] for column in columns)
    path, folder = files[file]
    root = NodeRef(path, folder, height, offset, length, below[0], below[1], below[2])
    if (root.offset, root.length) == (MOST_U64, MOST_U64):
        if root.path or height or any(below):
            raise Malformed("its empty tree is not empty")
        return None
    if not root.path or root.length > MOST_BODY_BYTES or root.offset + root.length > MOST_I64:
        raise Malformed("its tree is nowhere")
    return root
