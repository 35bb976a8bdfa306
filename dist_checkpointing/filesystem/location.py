"""``Location``: the methods of a place where files are (read, write, list, remove, lock, open),
and how a path or URL of a user becomes one.

What works in both places is here, and nothing above asks which of the two it is. What has ``local``
for its module works on mounted file systems only. An object store has no folders, no links and no
half-written objects, and what it has answered is durable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.local_folder import Durability
from dist_checkpointing.filesystem.object_store import Location, ObjectPath

# One slash: pathlib removes the second.
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_MOST_NAMED: Final = 16


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/x`` or, as a Path, ``s3:/bucket/x``."""
    return isinstance(path, ObjectPath) or _URL.match(os.fspath(path)) is not None


def as_location(path: str | os.PathLike[str]) -> Location:
    """Where a path of a user is: on a mounted file system, without "..", or in an object store.

    Raises:
        UnsupportedFormatError: for a URL of a scheme that is not known.
        CheckpointingException: for a URL that names no bucket, an empty path, and for what is
            no path.
    """
    if isinstance(path, ObjectPath):
        return path
    given: object = path
    if not isinstance(given, str | os.PathLike):
        finding = Finding(
            "a path is a str or an os.PathLike",
            found=f"{type(given).__module__}.{type(given).__qualname__}",
            remedy="The state dict comes first: save(state, path), load(template, path).",
        )
        raise CheckpointingException("not a path of a checkpoint", [finding])
    text = os.fspath(path)
    if not text:
        finding = Finding("the path is empty", remedy="Name a folder; '.' is the current one.")
        raise CheckpointingException("not a path of a checkpoint", [finding])
    return _without_dots(path) if _URL.match(text) is None else ObjectPath.of(text)


def _without_dots(path: str | os.PathLike[str]) -> Path:
    plain = path if isinstance(path, Path) else Path(path)
    # TensorStore refuses paths with "..".
    return plain.resolve() if ".." in os.fspath(path) and ".." in plain.parts else plain


def require_local(path: Location, what: str) -> None:
    """Refuse what works on a mounted file system only.

    Raises:
        UnsupportedFormatError: if the path is in an object store.
    """
    if isinstance(path, ObjectPath):
        finding = Finding(
            f"{what} works on a mounted file system only",
            found=str(path),
            remedy="Use the backend tensorstore, or a folder of a local or a shared disk.",
        )
        raise UnsupportedFormatError("not for an object store", [finding])


def as_local_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint or file of tensors on a mounted file system, without "..".

    A function that takes such a path from a user calls this or ``location``. Without it,
    ``s3://bucket/x`` would be the relative path ``./s3:/bucket/x``.

    Raises:
        UnsupportedFormatError: if the path is a URL.
    """
    match = _URL.match(os.fspath(path))
    if match is None:
        return _without_dots(path)
    finding = Finding(
        f"URLs of scheme {match[1]!r} are not supported",
        expected="a folder of a mounted file system",
        found=os.fspath(path),
        remedy="Save to a local or a shared disk and copy the folder, or mount the object store. "
        "A local folder of this name is reached by its absolute path.",
    )
    raise UnsupportedFormatError("not a local path", [finding])


def check_one_destination(destinations: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks save into the same folder, in the same format.

    Args:
        destinations: absolute path and format of each rank, in rank order.

    Raises:
        CheckpointingException: if they differ.
    """
    ranks: dict[str, list[int]] = {}
    formats: dict[str, list[int]] = {}
    for rank, (name, saved_as) in enumerate(destinations):
        ranks.setdefault(os.path.normpath(name), []).append(rank)
        formats.setdefault(saved_as, []).append(rank)
    if len(formats) > 1:
        findings = [
            Finding(
                "this is the format on some ranks only",
                found=saved_as,
                ranks=tuple(of_format[:_MOST_NAMED]),
                remedy="Pass the same strategy on every rank.",
            )
            for saved_as, of_format in formats.items()
        ]
        raise CheckpointingException("the ranks save in different formats", findings)
    if len(ranks) < 2:
        return
    findings = [
        Finding(
            "this is the folder on some ranks only",
            path=name,
            ranks=tuple(of_name[:_MOST_NAMED]),
            remedy="Give every rank the same path; broadcast a name that holds the time or date.",
        )
        for name, of_name in ranks.items()
    ]
    raise CheckpointingException("the ranks name different folders for one checkpoint", findings)


def read_bytes(path: Location, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``."""
    if isinstance(path, Path):
        return local_folder.read_bytes(path, max_bytes)
    return path.store.get(path.key, lambda size: local_folder.check_size(size, path, max_bytes))


def blocks(path: Location, num_bytes: int = 1 << 22) -> Iterator[bytes | memoryview]:
    """The content of a file of any size, block by block."""
    if isinstance(path, ObjectPath):
        yield from path.store.blocks(path.key)
        return
    with path.open("rb") as file:
        while data := file.read(num_bytes):
            yield data


def read_json(path: Location, max_bytes: int) -> Any:
    """What a JSON file says that must not be larger than ``max_bytes``; see ``parse_json``."""
    return local_folder.parse_json(read_bytes(path, max_bytes))


def read_own(path: Location, max_bytes: int) -> bytes | None:
    """The content of a file that only this library writes; None if there is no regular file.

    Raises:
        CorruptCheckpointError: if it is larger than ``max_bytes``.
        OSError: if it cannot be read.
    """
    if isinstance(path, Path):
        return local_folder.read_own(path, max_bytes)
    try:
        return read_bytes(path, max_bytes)
    except FileNotFoundError:
        return None


def read_own_start(path: Location, num_bytes: int) -> bytes | None:
    """Like ``read_own``, but the first bytes of a file of any size."""
    if isinstance(path, Path):
        return local_folder.read_own_start(path, num_bytes)
    try:
        return bytes(path.store.get_range(path.key, 0, num_bytes)[0])
    except FileNotFoundError:
        return None


def is_there(path: Location) -> bool:
    """Whether anything has this path, even a link to nothing.

    Raises:
        OSError: if that cannot be told, which is not the same as no.
    """
    if isinstance(path, Path):
        return local_folder.is_there(path)
    return is_file(path) or is_folder(path)


def is_file(path: Location) -> bool:
    """Like ``is_there``, whether the path is a file or a link to one."""
    return local_folder.is_file(path) if isinstance(path, Path) else size_of(path) is not None


def is_folder(path: Location) -> bool:
    """Like ``is_there``, whether the path is a folder or a link to one."""
    if isinstance(path, Path):
        return local_folder.is_folder(path)
    return any(True for _ in path.store.list_below(path.prefix))


def size_of(path: Location) -> int | None:
    """Bytes of a file; None if there is none."""
    if isinstance(path, Path):
        return path.stat().st_size if local_folder.is_file(path) else None
    info = path.store.head(path.key) if path.key else None
    return None if info is None else info.num_bytes


def marks_of(folder: Location, names: Iterable[str], *, opens: bool) -> object:
    """What changes with any of some files; None if one is not there, or would have to be asked for.

    Args:
        folder: of the files.
        names: of the files.
        opens: open them, because some network file systems look for changes only then.
    """
    return local_folder.marks_of(folder, names, opens=opens) if isinstance(folder, Path) else None


def folders_with(
    root: Location, name: str, skipped: str, on_error: Callable[[OSError], None]
) -> Iterator[str]:
    """Folders below ``root`` that hold a file of this name, by relative name.

    Args:
        root: looked through, in this order: a folder, then those in it.
        name: of the file.
        skipped: folders whose names end so are left out.
        on_error: called where a folder cannot be listed.
    """
    if isinstance(root, ObjectPath):
        for found, _ in files_below(root, root):
            *above, last = found.split("/")
            if last == name and not any(part.endswith(skipped) for part in above):
                yield "/".join(above) or "."
        return
    for folder, names, files in os.walk(root, onerror=on_error):
        names[:] = sorted(below for below in names if not below.endswith(skipped))
        if name in files:
            yield Path(folder).relative_to(root).as_posix()


def names_in(folder: Location) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    Raises:
        OSError: if the folder cannot be read, which is not the same as empty.
    """
    if isinstance(folder, Path):
        return local_folder.names_in(folder)
    return sorted({name for names in folders_and_files(folder) for name in names})


def folders_in(folder: Location) -> list[str]:
    """Like ``names_in``, the names of the folders in it."""
    return folders_and_files(folder)[0]


def folders_and_files(folder: Location) -> tuple[list[str], list[str]]:
    """Like ``names_in``, the names of the folders in it, and those of all else."""
    if isinstance(folder, Path):
        names = local_folder.names_in(folder)
        folders = [name for name in names if local_folder.is_folder(folder / name)]
        return folders, sorted({*names}.difference(folders))
    folders, objects = folder.store.list_folder(folder.prefix)
    return folders, [info.key.rpartition("/")[2] for info in objects]


def relative(path: Location, root: Location) -> str:
    """Name of a file relative to a folder that it is in, with ``/``."""
    if isinstance(path, Path):
        assert isinstance(root, Path)
        return path.relative_to(root).as_posix()
    return path.key.removeprefix(root.prefix) if isinstance(root, ObjectPath) else path.key


def overlap(one: Location, other: Location) -> bool:
    """Whether one of two files or folders is, or is in, the other."""
    if isinstance(one, Path) and isinstance(other, Path):
        first, second = one.resolve(), other.resolve()
        return first.is_relative_to(second) or second.is_relative_to(first)
    names = [f"{place}/" for place in (one, other)]
    return names[0].startswith(names[1]) or names[1].startswith(names[0])


def files_below(path: Location, root: Location) -> Iterator[tuple[str, int | None]]:
    """All files below a folder: name relative to ``root``, and size, None if it is no regular file.

    Links are not followed.
    """
    if isinstance(path, ObjectPath):
        assert isinstance(root, ObjectPath)
        for info in path.store.list_below(path.prefix):
            yield info.key.removeprefix(root.prefix), info.num_bytes
        return
    assert isinstance(root, Path)
    yield from local_folder.files_below(path, root)


@dataclass(frozen=True, slots=True)
class FileUse:
    """What a file takes.

    Attributes:
        num_bytes: Size.
        num_bytes_stored: Bytes of its disk blocks, which are fewer for files with holes.
        modified: When it was written, in seconds since 1970.
        inode: Device and inode of a file that has another name elsewhere, as in other checkpoints.
    """

    num_bytes: int
    num_bytes_stored: int
    modified: float
    inode: tuple[int, int] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether it has another name elsewhere."""
        return self.inode is not None


def use_below(folder: Location) -> dict[str, FileUse]:
    """What each file below a folder takes, by its relative name."""
    if isinstance(folder, ObjectPath):
        return {
            info.key.removeprefix(folder.prefix): FileUse(
                info.num_bytes, info.num_bytes, info.modified
            )
            for info in folder.store.list_below(folder.prefix)
        }
    return {
        name: FileUse(
            status.st_size,
            status.st_blocks * 512,  # units of 512 bytes on every file system
            status.st_mtime,
            (status.st_dev, status.st_ino) if status.st_nlink > 1 else None,
        )
        for name, status in local_folder.statuses_below(folder).items()
    }


def sizes_in(
    root: Location, names: Collection[str] | None, reported: Mapping[str, int]
) -> dict[str, int]:
    """Size of each file that lies in one of these files and folders, by name relative to ``root``.

    Args:
        root: the folder.
        names: of files and folders in it; None for all that is there.
        reported: sizes of the files that have been written. In an object store these are all that
            is in ``names``: it has answered for each, and is not asked again.
    """
    if isinstance(root, ObjectPath) and names is not None:
        return dict(reported)
    sizes: dict[str, int] = {}
    for name in [""] if names is None else sorted(names):
        path = root / name
        size = size_of(path)
        if size is not None:
            sizes[name] = size
        elif names is None or (isinstance(path, Path) and local_folder.is_folder(path)):
            found = files_below(path, root)
            sizes.update((own, size) for own, size in found if size is not None)
    return sizes


def make_folder(path: Location) -> None:
    """Make a folder and those that it is in, where there are folders."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)


def write(path: Location, data: bytes, durability: Durability = Durability.FSYNC) -> str | None:
    """Write a file such that readers see all of it or none; its ETag in an object store."""
    if isinstance(path, Path):
        local_folder.write_atomic(path, data, durability)
        return None
    return path.store.put(path.key, data)


def write_content(path: Location, data: bytes, durability: Durability) -> None:
    """Like ``write``, but a power cut takes the file until its folder is synced."""
    if isinstance(path, Path):
        local_folder.write_content(path, data, durability)
    else:
        path.store.put(path.key, data)


def remove(path: Location, root: Location) -> None:
    """Delete a file or folder below ``root``, and the parents that are empty then."""
    if isinstance(path, Path):
        assert isinstance(root, Path)
        local_folder.remove(path, root)
        return
    assert isinstance(root, ObjectPath)
    if not path.key.startswith(root.prefix) or path.key == root.key:
        raise ValueError(f"{path} is not below {root}")
    remove_below(path)
    path.store.delete([path.key])


def remove_below(folder: ObjectPath) -> None:
    """Delete all objects in a folder."""
    folder.store.delete([info.key for info in folder.store.list_below(folder.prefix)])


def temporaries(names: Iterable[str], root: Location) -> list[Path]:
    """Temporary files that killed writers of these files below ``root`` have left."""
    return local_folder.temporaries(names, root) if isinstance(root, Path) else []


def fsync_file(path: Location) -> None:
    """Make the content of a file durable."""
    if isinstance(path, Path):
        local_folder.fsync_file(path)


def fsync_folders(files: Iterable[Location], root: Location) -> None:
    """Make the names of files durable in every folder from them up to ``root``, but not there."""
    if isinstance(root, Path):
        local_folder.fsync_folders((file for file in files if isinstance(file, Path)), root)


def fsync_folder(folder: Location) -> None:
    """Make the names in a folder durable."""
    if isinstance(folder, Path):
        local_folder.fsync_folder(folder)


def check_room(folder: Location, num_bytes: int) -> None:
    """Check before a save that ``num_bytes`` can be written below a folder, where that is known."""
    if isinstance(folder, Path):
        local_folder.check_room(folder, num_bytes)
