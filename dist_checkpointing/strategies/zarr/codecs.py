"""Optional compression of zarr v3 chunks, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numcodecs

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.strategies.zarr.unpacking import Codec

_BLOSC_HEADER_BYTES = 16


class _CheckedBlosc:
    """Blosc believes its header and reads past the end of a shortened chunk: check it first."""

    codec_id = "blosc"

    def __init__(self) -> None:
        self._codec = numcodecs.Blosc(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE)

    def encode(self, data: Any) -> Any:
        return self._codec.encode(data)

    def decode(self, data: Any) -> Any:
        if len(data) < _BLOSC_HEADER_BYTES:
            raise ValueError(f"{len(data)} bytes are too few for Blosc")
        # Bytes 12 to 16 of the header: the size of header and data together, little-endian.
        expected = int.from_bytes(data[12:_BLOSC_HEADER_BYTES], "little")
        if expected != len(data):
            raise ValueError(f"Blosc expects {expected} bytes and there are {len(data)}")
        return self._codec.decode(data)


# The level and the other parameters matter to the writer only; any reader decodes all of them.
_MAKERS: dict[str, Callable[[], Any]] = {
    "zstd": lambda: numcodecs.Zstd(level=3),
    "gzip": lambda: numcodecs.GZip(level=5),
    "blosc": _CheckedBlosc,
}


def make_codec(name: str | None) -> Codec | None:
    """The codec with this zarr v3 name; None for raw bytes.

    Raises:
        UnsupportedFormatError: for an unknown name.
    """
    if name is None:
        return None
    try:
        return _MAKERS[name]()  # type: ignore[no-any-return]
    except KeyError:
        finding = Finding("unknown codec", expected=", ".join(_MAKERS), found=repr(name))
        raise UnsupportedFormatError("cannot store or read chunks this way", [finding]) from None


def codec_json(name: str | None, itemsize: int) -> list[dict[str, Any]]:
    """The bytes-to-bytes codecs of an array's ``zarr.json``."""
    if name is None:
        return []
    configurations: dict[str, dict[str, Any]] = {
        "zstd": {"level": 3, "checksum": False},
        "gzip": {"level": 5},
        "blosc": {
            "cname": "zstd",
            "clevel": 5,
            "shuffle": "shuffle",
            "typesize": itemsize,
            "blocksize": 0,
        },
    }
    return [{"name": name, "configuration": configurations[name]}]
