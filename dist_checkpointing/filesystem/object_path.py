"""ObjectPath: the place of an object or of a folder of objects, with the words of ``pathlib``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import NoReturn

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.object_store import ObjectStore, ObjectStoreOptions, store_of


@dataclass(frozen=True, slots=True, order=False)
class ObjectPath(PathLike[str]):
    """A key of a bucket, wherever a path of a checkpoint is taken.

    What can only use files of a file system is refused by ``__fspath__``.

    Attributes:
        store: The bucket.
        key: Name within it, without a ``/`` at either end; empty for the whole bucket.

    Example:
        >>> from dist_checkpointing.filesystem.object_path import ObjectPath
        >>> str(ObjectPath.of("memory://bucket/run") / "1000" / "metadata.json")
        'memory://bucket/run/1000/metadata.json'
    """

    store: ObjectStore
    key: str

    @classmethod
    def of(cls, url: str, options: ObjectStoreOptions | None = None) -> ObjectPath:
        """The place that a URL names.

        Args:
            url: such as ``s3://bucket/run/1000``; as a ``Path`` it has one slash.
            options: how the store is reached.

        Raises:
            UnsupportedFormatError: if no object store has such URLs.
        """
        return cls(*store_of(url, ObjectStoreOptions() if options is None else options))

    def __fspath__(self) -> NoReturn:
        finding = Finding(
            "this is in an object store",
            expected="a folder or file of a mounted file system",
            path=str(self),
            remedy="Save to a local or a shared disk, or mount the object store.",
        )
        raise UnsupportedFormatError("not a local path", [finding])

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}"

    def __truediv__(self, name: str | PurePosixPath) -> ObjectPath:
        return replace(self, key=_key(PurePosixPath(self.key, name)))

    @property
    def name(self) -> str:
        """Last part of the key."""
        return PurePosixPath(self.key).name

    @property
    def parent(self) -> ObjectPath:
        """The folder that it is in."""
        return replace(self, key=_key(PurePosixPath(self.key).parent))

    @property
    def prefix(self) -> str:
        """How the keys of all objects in this folder begin."""
        return f"{self.key}/" if self.key else ""

    def absolute(self) -> ObjectPath:
        """Itself: there is no working directory."""
        return self


def _key(path: PurePosixPath) -> str:
    return path.as_posix() if path.parts else ""


Location = Path | ObjectPath
"""Where a checkpoint or a file of it is: on a mounted file system or in an object store."""
