"""Optional compression of zarr v3 chunks, which must unpack to the size that they have."""

from __future__ import annotations

import zlib
from typing import Any, Final, Protocol

import numcodecs

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.strategies.zarr_metadata import CODECS

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW: Final = 31
_BLOSC_HEADER_BYTES: Final = 16


class Codec(Protocol):
    """Turns the bytes of a chunk into others and back."""

    def encode(self, data: Any) -> Any:
        """Shorter bytes for a C-contiguous array."""

    def decode(self, data: Any) -> Any:
        """The bytes of the array."""


def unpacked(codec: Codec, data: bytes, num_bytes: int) -> Any:
    """The bytes of a chunk, which must be so many.

    Raises:
        ValueError: if it unpacks to anything else; says so before it has unpacked more.
    """
    name = getattr(codec, "codec_id", None)
    if name == "gzip":
        return _gunzipped(data, num_bytes)
    said = _zstd_size(data) if name == "zstd" else _blosc_size(data) if name == "blosc" else None
    if said is not None and said != num_bytes:
        raise ValueError(f"it unpacks to {said} bytes, expected {num_bytes}")
    return codec.decode(data)


def _gunzipped(data: bytes, num_bytes: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = stream.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(content) != num_bytes or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not unpack to {num_bytes} bytes")
    return content


def _zstd_size(data: bytes) -> int:
    """What the header of a Zstandard frame says, see RFC 8878, 3.1.1.1."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 6:
        raise ValueError("it is no Zstandard frame")
    descriptor = data[4]
    is_single = bool(descriptor & 0x20)
    start = 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    width = (int(is_single), 2, 4, 8)[descriptor >> 6]
    if not width or len(data) < start + width:
        raise ValueError("its Zstandard frame does not say how long it is")
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)


def _blosc_size(data: bytes) -> int:
    """What the header of a Blosc chunk says: bytes 4 to 8. Bytes 12 to 16 are its own size.

    Blosc believes that, and reads past the end of a chunk that was cut off.
    """
    if len(data) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for Blosc")
    expected = int.from_bytes(data[12:_BLOSC_HEADER_BYTES], "little")
    if expected != len(data):
        raise ValueError(f"Blosc expects {expected} bytes and there are {len(data)}")
    return int.from_bytes(data[4:8], "little")


def make_codec(name: str | None) -> Codec | None:
    """The codec with this zarr v3 name; None for raw bytes."""
    if name is None:
        return None
    if name not in CODECS:
        expected = ", ".join(CODECS)
        finding = Finding("unknown codec", expected=expected, found=repr(name))
        raise UnsupportedFormatError("cannot store or read chunks this way", [finding])
    configuration = {"id": name} | CODECS[name]
    if name == "blosc":
        configuration["shuffle"] = numcodecs.Blosc.SHUFFLE
    codec: Codec = numcodecs.get_codec(configuration)
    return codec
