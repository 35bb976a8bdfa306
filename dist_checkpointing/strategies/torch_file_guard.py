"""Checks a file of ``torch.save`` before torch reads it: its archive, pickles and storages.

PyTorch trusts what the pickle says about the memory of a tensor. A storage that is larger than its
bytes in the file would crash the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing.strategies.pickle_calls import check_call, check_state
from dist_checkpointing.strategies.pickle_guard import (
    BadPickle,
    Checks,
    StorageCheck,
    Stub,
    check_pickle,
)
from dist_checkpointing.strategies.torch_archive import BadRecord, Read, entries

_ARCHIVE_START = b"PK\x03\x04"
_NUM_HEADERS = 3  # pickles of the magic number, the protocol and the machine
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C


def _itemsizes() -> dict[str, int]:
    """Bytes of an element of each class of storage, by its name in pickles."""
    typed = torch.storage._dtype_to_storage_type_map()  # noqa: SLF001 - torch has no public list
    names = {f"torch.{name}": dtype.itemsize for dtype, name in typed.items()}
    return names | {"torch.storage.UntypedStorage": 1, "torch.storage.TypedStorage": 1}


_ITEMSIZES = _itemsizes()


def check_torch_file(source: bytes | Path) -> None:
    """Check what ``torch.load(weights_only=True)`` is about to read.

    Raises:
        ValueError: if it is damaged, or would build what no state dict holds.
        OSError: if it cannot be read.
    """
    if isinstance(source, bytes):
        _check(source)
        return
    with source.open("rb") as file:
        if not file.read(1):
            raise BadRecord("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            _check(mapped)


def _check(data: Any) -> None:
    if data[: len(_ARCHIVE_START)] == _ARCHIVE_START:
        _check_archive(data)
    else:
        _check_legacy(data)


def _reader(data: Any) -> Read:
    def read(start: int, count: int) -> bytes:
        if start < 0 or start + count > len(data):
            raise BadRecord("it refers to bytes outside of it")
        return bytes(data[start : start + count])

    return read


def _check_archive(data: Any) -> None:
    read = _reader(data)
    found = entries(read, len(data))
    if "data.pkl" not in found:
        raise BadRecord("its archive has no data.pkl")
    sizes = {name: size for name, (_, size) in found.items()}
    check_pickle(read(*found["data.pkl"]), checks=_checks(_storages_of_archive(sizes)))


def _check_legacy(data: Any) -> None:
    """Check a file in the format before PyTorch 1.6: several pickles, then the storages."""
    position = 0
    for number in range(_NUM_HEADERS):
        header = check_pickle(data, position, _checks())
        if number == 0 and header.value != _MAGIC_NUMBER:
            raise BadRecord("it does not begin like a file of torch.save")
        position = header.end
    position = check_pickle(data, position, _checks(_legacy_storages(len(data)))).end
    check_pickle(data, position, _checks())  # the order of the storages


def _checks(storage: StorageCheck | None = None) -> Checks:
    if storage is None:
        return Checks(check_call, check_state)
    return Checks(check_call, check_state, storage)


def _storage_id(pid: Any, least: int) -> tuple[int, str, int, Any]:
    """Bytes of an element, name, and number of elements of the storage with this id; and the id."""
    if not isinstance(pid, Stub) or pid.kind != "tuple" or not pid.items or len(pid.items) < least:
        raise BadPickle("it refers to something that is not a storage")
    kind, cls, key, _, count = pid.items[:5]
    itemsize = _ITEMSIZES.get(cls.name) if isinstance(cls, Stub) and cls.kind == "global" else None
    known = kind in ("storage", b"storage") and itemsize is not None
    if not known or type(count) is not int or count < 0:
        raise BadPickle("it refers to something that is not a storage")
    assert itemsize is not None
    name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
    return itemsize, name, count, pid.items


def _storages_of_archive(sizes: Mapping[str, int]) -> StorageCheck:
    def check(pid: Any) -> int:
        itemsize, name, count, _ = _storage_id(pid, 5)
        size = sizes.get(f"data/{name}")
        if size is None or count * itemsize > size:
            found = "none" if size is None else f"{size} bytes"
            raise BadRecord(f"storage {name} of {count * itemsize} bytes, found {found}")
        return count

    return check


def _legacy_storages(num_bytes: int) -> StorageCheck:
    """A check of the storages in an old file of ``num_bytes`` bytes."""
    known: dict[str, tuple[int, int]] = {}
    total = 0

    def check(pid: Any) -> int:
        itemsize, name, count, items = _storage_id(pid, 6)
        view = items[5]
        nonlocal total
        if name not in known:
            total += count * itemsize
        own = known.setdefault(name, (count, itemsize))
        if own != (count, itemsize):
            raise BadRecord(f"storage {name} has two sizes")
        if total > num_bytes:
            raise BadRecord(f"storages of {total} bytes in a file of {num_bytes}")
        if view is None:
            return count
        parts = view.items if isinstance(view, Stub) and view.kind == "tuple" else None
        if not parts or len(parts) != 3 or any(type(n) is not int or n < 0 for n in parts[1:]):
            raise BadPickle("an invalid view of a storage")
        if parts[1] + parts[2] > count:
            raise BadRecord(f"a view that sticks out of storage {name}")
        return int(parts[2])

    return check
