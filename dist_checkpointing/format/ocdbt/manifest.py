"""The manifest: the settings of a database, and where the tree of its newest version begins."""

from __future__ import annotations

import struct
import time
import uuid
from dataclasses import dataclass
from typing import Final

import numpy as np

from dist_checkpointing.format.ocdbt.columns import (
    MOST_I64,
    MOST_U32,
    MOST_U64,
    Body,
    Malformed,
    encoded,
)
from dist_checkpointing.format.ocdbt.nodes import (
    MOST_HEIGHT,
    FileRef,
    TreeStatistics,
    files_table,
    read_files,
)
from dist_checkpointing.format.ocdbt.records import MANIFEST, MOST_BODY_BYTES, opened, sealed

MANIFEST_NAME: Final = "manifest.ocdbt"
_SINGLE, _NUMBERED = 0, 1
_NO_COMPRESSION, _ZSTD = 0, 1
_INLINE_BYTES: Final = 1024
NODE_BYTES: Final = 1 << 18
"""Estimated size of a decoded node. A reader of one key decodes one for each level of the tree."""
_ARITY_LOG2: Final = 4
_MOST_ARITY_LOG2: Final = 16
_ZSTD_LEVEL_FIELD: Final = struct.Struct("<i")


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

    If it is numbered, other manifests, with numbers, say where trees begin.
    """

    config: bytes
    is_numbered: bool
    generation: int
    root: Root | None


def encode_manifest(root: Root | None) -> bytes:
    """The manifest of a database with one version, whose root lies in a file without base path."""
    config = [
        uuid.uuid4().bytes,
        bytes([_SINGLE]),
        encoded([_INLINE_BYTES, NODE_BYTES]),
        bytes([_ARITY_LOG2]),
        encoded([_ZSTD]),
        _ZSTD_LEVEL_FIELD.pack(0),
    ]
    if root is None:
        path, height, place, numbers = "", 0, [0, MOST_U64, MOST_U64], [0, 0, 0]
    else:
        path, height, place = root.file.path, root.height, [0, root.offset, root.length]
        below = root.statistics
        numbers = [below.num_keys, below.num_tree_bytes, below.num_value_bytes]
    version = [
        encoded([1, 1]),
        bytes([height]),
        encoded(np.array([*place, *numbers], dtype=np.uint64)),
        time.time_ns().to_bytes(8, "little"),
    ]
    body = b"".join([*config, files_table([path]), *version, encoded([0])])
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
        body.take(_ZSTD_LEVEL_FIELD.size)
    if kind > _NUMBERED or not 1 <= arity <= _MOST_ARITY_LOG2 or method > _ZSTD:
        raise Malformed("its settings are not known")
    config = identity + body.data[start : body.position]
    if kind == _NUMBERED:
        body.finish()
        return Manifest(config, is_numbered=True, generation=0, root=None)
    files = read_files(body, "")
    generation, root = _newest(body, files, arity)
    _check_older(body, len(files), arity)
    body.finish()
    return Manifest(config, is_numbered=False, generation=generation, root=root)


def _newest(body: Body, files: list[FileRef], arity: int) -> tuple[int, Root | None]:
    """The last of the versions that stand in the manifest itself."""
    count = body.varint(1 << arity)
    if count == 0:
        raise Malformed("it has no version")
    generations = body.varints(count)
    heights = body.fixed(count, "u1")
    file = body.varints(count)
    offset, length, num_keys, tree_bytes, value_bytes = (body.wide_varints(count) for _ in range(5))
    body.fixed(count, "<u8")
    same = generations - 1 >> arity
    if int(generations[0]) < 1 or (np.diff(generations) <= 0).any() or (same != same[-1]).any():
        raise Malformed("its versions are not in order")
    if int(file.max()) >= len(files):
        raise Malformed(f"file {file.max()} of {len(files)}")
    newest = files[int(file[-1])]
    place = (int(offset[-1]), int(length[-1]))
    below = TreeStatistics(int(num_keys[-1]), int(tree_bytes[-1]), int(value_bytes[-1]))
    height = int(heights[-1])
    if place == (MOST_U64, MOST_U64):
        if newest.path or height or below != TreeStatistics(0, 0, 0):
            raise Malformed("its empty tree is not empty")
        return int(generations[-1]), None
    if not newest.path or place[1] > MOST_BODY_BYTES or sum(place) > MOST_I64:
        raise Malformed("its tree is nowhere")
    return int(generations[-1]), Root(height, newest, *place, below)


def _check_older(body: Body, num_files: int, arity: int) -> None:
    """Check the references to nodes of older versions; their content is not read."""
    count = body.varint(MOST_HEIGHT)
    generations, file = body.varints(count), body.varints(count)
    for _ in range(3):
        body.wide_varints(count)
    body.fixed(count, "<u8")
    heights = body.fixed(count, "u1").astype(np.int64)
    if count == 0:
        return
    if (
        int(generations[0]) < 1
        or (np.diff(generations) <= 0).any()
        or (np.diff(heights) >= 0).any()
        or int(heights[-1]) < 1
        or int(heights[0]) > min(MOST_HEIGHT, 63 // arity - 1)
        or int(file.max()) >= num_files
    ):
        raise Malformed("its older versions are not in order")
