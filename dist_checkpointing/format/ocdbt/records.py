"""The envelope of manifests and nodes: what it is, its length, compression and checksum."""

from __future__ import annotations

import struct
from typing import Final

import google_crc32c

from dist_checkpointing.format.ocdbt.columns import MOST_U32, Body, Malformed, encoded

MANIFEST: Final = 0x0CDB3A2A
NODE: Final = 0x0CDB20DE

MOST_BODY_BYTES: Final = 1 << 26
"""Eight times what TensorStore puts into a node unless told otherwise."""

_HEAD: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<I")
_VERSION: Final = 0
_RAW, _ZSTD_METHOD = 0, 1
_HEAD_BYTES: Final = _HEAD.size + _LENGTH.size

_WORTH_COMPRESSING: Final = 1 << 12
_ZSTD_LEVEL: Final = 1
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_MOST_BLOCK_BYTES: Final = 1 << 17
_ID_BYTES: Final = (0, 1, 2, 4)


def sealed(magic: int, body: bytes, *, compressed: bool) -> bytes:
    method = _RAW
    if compressed and len(body) >= _WORTH_COMPRESSING:
        from numcodecs import zstd  # noqa: PLC0415 - it takes longer than to read small databases

        method, body = _ZSTD_METHOD, zstd.compress(body, _ZSTD_LEVEL)
    rest = encoded([_VERSION, method]) + body
    length = _HEAD_BYTES + len(rest) + _CHECKSUM.size
    data = b"".join([_HEAD.pack(magic), _LENGTH.pack(length), rest])
    return data + _CHECKSUM.pack(google_crc32c.value(data))


def opened(magic: int, record: bytes) -> bytes:
    if len(record) < _HEAD_BYTES + _CHECKSUM.size or _HEAD.unpack_from(record) != (magic,):
        raise Malformed(f"no record of kind {magic:#010x}")
    if _LENGTH.unpack_from(record, _HEAD.size) != (len(record),):
        raise Malformed("its length differs from what it says")
    data = record[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(record[len(data) :]) != (google_crc32c.value(data),):
        raise Malformed("its checksum differs")
    head = Body(data[_HEAD_BYTES:])
    version, method = head.varint(MOST_U32), head.varint(MOST_U32)
    if version != _VERSION:
        raise Malformed(f"format version {version} is not known")
    body = head.data[head.position :]
    if method == _RAW:
        return body
    if method != _ZSTD_METHOD:
        raise Malformed(f"compression method {method} is not known")
    return _decompressed(body)


def _decompressed(frame: bytes) -> bytes:
    _check_frame(frame)
    from numcodecs import zstd  # noqa: PLC0415 - as above

    try:
        body: bytes = zstd.decompress(frame)
    except (RuntimeError, ValueError) as error:
        raise Malformed(f"it cannot be decompressed: {error}") from error
    if len(body) > MOST_BODY_BYTES:
        raise Malformed(f"it is larger than {MOST_BODY_BYTES} bytes")
    return body


def _check_frame(frame: bytes) -> None:
    """Refuse what is not exactly one zstd frame (RFC 8878), or too large, before it takes memory.

    Frames need not say how large their content is, so the blocks are looked through.
    """
    if len(frame) < 6 or frame[:4] != _FRAME_MAGIC:
        raise Malformed("its body is no zstd frame")
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
        if at > len(frame) or kind == 3:
            raise Malformed("a zstd frame is cut off or damaged")
        if max(most, content) > MOST_BODY_BYTES + _MOST_BLOCK_BYTES:
            raise Malformed(f"it is larger than {MOST_BODY_BYTES} bytes")
    if at + 4 * (described >> 2 & 1) != len(frame):
        raise Malformed("its body is more than a zstd frame")
