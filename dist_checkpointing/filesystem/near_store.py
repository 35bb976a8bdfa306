"""A bucket of which some objects lie on a disk of this machine too, and are read there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_checkpointing.filesystem.object_store import ObjectInfo, ObjectStore

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NearStore(ObjectStore):
    """A bucket whose objects below one prefix are read from a folder, where they are.

    An object that is not in the folder, has another size there, or cannot be read there comes from
    the bucket. All else, and all that is written, is as in the bucket.

    Attributes:
        prefix: How the keys begin of objects that may be in the folder.
        folder: Where they are, by the rest of their keys.
        sizes: Bytes of these objects, by the rest of their keys.
    """

    prefix: str = ""
    folder: Path = Path()
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[Any, ...]]:
        return ObjectStore, ObjectStore.__getstate__(self)  # another process reads the bucket

    def get(self, key: str, check_size: Callable[[int], None] = lambda _: None) -> bytes:
        size = self._size(key)
        if size is not None:
            check_size(size)
            found = self._read(key, 0, size)
            if found is not None:
                return found
        return ObjectStore.get(self, key, check_size)

    def blocks(self, key: str) -> Iterator[memoryview]:
        size, step = self._size(key), self.options.part_bytes
        for offset in range(0, size or 0, step):
            assert size is not None
            found = self._read(key, offset, min(step, size - offset))
            if found is None:  # it was there: what has been handed out is of the same object
                found = bytes(ObjectStore.get_range(self, key, offset, step)[0])
            yield memoryview(found)
        if size is None:
            yield from ObjectStore.blocks(self, key)

    def get_range(self, key: str, offset: int, num_bytes: int) -> tuple[memoryview, int]:
        size = self._size(key)
        if size is not None and offset < size:
            found = self._read(key, offset, min(num_bytes, size - offset))
            if found is not None:
                return memoryview(found), size
        return ObjectStore.get_range(self, key, offset, num_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        size = self._size(key)
        return ObjectStore.head(self, key) if size is None else ObjectInfo(key, size, None)

    def _path(self, key: str) -> Path:
        return self.folder / key.removeprefix(self.prefix)

    def _size(self, key: str) -> int | None:
        """Bytes of an object that is in the folder too; None if it is not."""
        if not key.startswith(self.prefix):
            return None
        size = self.sizes.get(key.removeprefix(self.prefix))
        try:
            is_same = size is not None and self._path(key).stat().st_size == size
        except OSError:
            return None
        return size if is_same else None

    def _read(self, key: str, offset: int, num_bytes: int) -> bytes | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = os.pread(descriptor, num_bytes, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("%s is read from the store: %s", self._path(key), error)
            return None
        return found if len(found) == num_bytes else None
