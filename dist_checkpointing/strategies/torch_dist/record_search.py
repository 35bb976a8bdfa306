"""Where the values of a tensor are in a record, whichever program wrote it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.strategies.pickle_guard import Checks, check_pickle
from dist_checkpointing.strategies.torch_archive import BadRecord, Read, entries
from dist_checkpointing.strategies.torch_dist.records import STORAGE_CLASSES, contiguous_stride

_MOST_DESCRIPTION_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How the elements of a stored tensor lie in its storage, in elements of ``dtype``."""

    storage: str
    dtype: torch.dtype
    storage_bytes: int
    offset: int
    shape: Ints
    stride: Ints

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        places = zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        return 0 in self.shape or all(extent == 1 or own == c for extent, own, c in places)


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in a record.

    Attributes:
        layout: How it lies in its storage; None for a subclass that only PyTorch can rebuild.
        start: Where its first element is, in bytes from the first of the record.
    """

    layout: StoredLayout | None
    start: int


def find_tensor(read: Read, length: int) -> FoundTensor:
    """Find the values of the tensor in a record, without reading them."""
    found = entries(read, length)
    start, size = found.get("data.pkl") or _missing("data.pkl")
    if size > _MOST_DESCRIPTION_BYTES:
        raise BadRecord(f"a description of {size} bytes")
    if "byteorder" in found and read(*found["byteorder"]) != b"little":
        raise BadRecord("it was not written by a little-endian machine")
    layout = _describe(read(start, size))
    if layout is None:
        return FoundTensor(None, 0)
    start, size = found.get(f"data/{layout.storage}") or _missing(f"data/{layout.storage}")
    if size != layout.storage_bytes:
        raise BadRecord(f"a storage of {layout.storage_bytes} bytes with {size} bytes of data")
    return FoundTensor(layout, start + layout.offset * layout.dtype.itemsize)


def _missing(name: str) -> tuple[int, int]:
    raise BadRecord(f"its archive has no {name}")


class _TooSpecial(Exception):
    """A pickle holds more than a plain tensor."""


def _plain(args: Sequence[Any], dtype: Any, bits: Sequence[Any]) -> tuple[Any, ...]:
    if any(bits):
        # Conjugate and negative views: what is stored is not what they stand for.
        raise _TooSpecial(f"a tensor with {bits}")
    storage, offset, shape, stride = args
    return storage, offset, shape, stride, dtype


class _Description(pickle.Unpickler):
    """Reads what the pickle of a tensor says, and makes nothing of it.

    Everything that it could call is made here and for this one pickle, so that there is nothing
    that a hostile one could change.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return lambda *args: _plain(args[:4], None, args[6:7])
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return lambda *args: _plain(args[:4], args[6], args[7:8])
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: None
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        for dtype, cls in STORAGE_CLASSES.items():
            if module == "torch" and cls.__name__ == name:
                return dtype
        raise _TooSpecial(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, name, _, size = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise BadRecord("its description is damaged")
        return dtype, name, size


_ANY_STORAGE = Checks(storage=lambda _: 0)  # what it says of its storage is looked at afterwards


@lru_cache(maxsize=1024)
def _describe(content: bytes) -> StoredLayout | None:
    try:
        check_pickle(content, checks=_ANY_STORAGE)
        storage, offset, shape, stride, dtype = _Description(io.BytesIO(content)).load()
        stored, name, size = storage
        numbers = (offset, size, *shape, *stride)
        plain = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        if not plain or type(name) is not str or len(shape) != len(stride):
            raise BadRecord("its description is damaged")
    except _TooSpecial:
        return None
    except BadRecord:
        raise
    except Exception as error:
        raise BadRecord(f"its description cannot be read: {error}") from error
    dtype = dtype or stored
    layout = StoredLayout(name, dtype, size * stored.itemsize, offset, tuple(shape), tuple(stride))
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > layout.storage_bytes:
        raise BadRecord("its tensor sticks out of its storage")
    return layout
