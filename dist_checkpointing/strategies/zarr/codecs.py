"""Optional compression of zarr v3 chunks, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numcodecs

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.strategies.zarr.unpacking import Codec

# The level and the other parameters matter to the writer only; any reader decodes all of them.
_MAKERS: dict[str, Callable[[], Any]] = {
    "zstd": lambda: numcodecs.Zstd(level=3),
    "gzip": lambda: numcodecs.GZip(level=5),
    "blosc": lambda: numcodecs.Blosc(cname="zstd", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
}


def make_codec(name: str | None) -> Codec | None:
    """The codec with this zarr v3 name; None for raw bytes."""
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
