"""Where files are: a folder of a mounted file system, or a prefix in an object store.

What works in both is here, and nothing above asks which of the two it is. ``local_folder`` has what
works on mounted file systems only. An object store has no folders, no links and no half-written
objects, and what it has answered is durable.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.local_folder import (
    NOT_THERE,
    TEMPORARY_NAME,
    Durability,
    check_size,
    parse_json,
    raise_unless_gone,
    status_of,
)
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
        CheckpointingException: if it names no bucket, is empty, or is no path.
    """
    if isinstance(path, ObjectPath):
        return path
    given: object = path
    finding = None
    if not isinstance(given, str | os.PathLike):
        finding = Finding(
            "a path is a str or an os.PathLike",
            found=f"{type(given).__module__}.{type(given).__qualname__}",
            remedy="The state dict comes first: save(state, path), load(template, path).",
        )
    elif not os.fspath(path):
        finding = Finding("the path is empty", remedy="Name a folder; '.' is the current one.")
    if finding is not None:
        raise CheckpointingException("not a path of a checkpoint", [finding])
    text = os.fspath(path)
    return _without_dots(path) if _URL.match(text) is None else ObjectPath.of(text)


def _without_dots(path: str | os.PathLike[str]) -> Path:
    plain = Path(path)
    # TensorStore refuses paths with "..".
    return plain.resolve() if ".." in plain.parts else plain


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

    A function that takes such a path from a user calls this or ``as_location``. Without it,
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
    """Check that all ranks save into the same folder (absolute paths), in the same format.

    Raises:
        CheckpointingException: if they differ.
    """
    ranks: dict[str, list[int]] = {}
    formats: dict[str, list[int]] = {}
    for rank, (name, saved_as) in enumerate(destinations):
        ranks.setdefault(os.path.normpath(name), []).append(rank)
        formats.setdefault(saved_as, []).append(rank)
    if len(formats) > 1:
        problem, remedy = "this is the format on some ranks only", "Pass the same strategy on every"
        findings = [
            Finding(problem, found=name, ranks=tuple(of[:_MOST_NAMED]), remedy=f"{remedy} rank.")
            for name, of in formats.items()
        ]
        raise CheckpointingException("the ranks save in different formats", findings)
    if len(ranks) > 1:
        problem = "this is the folder on some ranks only"
        remedy = "Give every rank the same path; broadcast a name that holds the time or date."
        findings = [
            Finding(problem, path=name, ranks=tuple(of[:_MOST_NAMED]), remedy=remedy)
            for name, of in ranks.items()
        ]
        message = "the ranks name different folders for one checkpoint"
        raise CheckpointingException(message, findings)


def read_bytes(path: Location, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``.

    Raises:
        CorruptCheckpointError: if it is larger, or than the memory, or a pipe or a device, which
            may have no end.
        OSError: if it cannot be read.
    """
    if isinstance(path, ObjectPath):
        return path.store.get(path.key, lambda size: check_size(size, path, max_bytes))
    status = path.stat()
    finding = Finding("not a regular file", path=str(path))
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        check_size(status.st_size, path, max_bytes)
        try:
            return path.read_bytes()
        except MemoryError:
            finding = Finding("larger than the memory", found=status.st_size, path=str(path))
    raise CorruptCheckpointError("refused to read a file", [finding])


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
    return parse_json(read_bytes(path, max_bytes))


def read_own(path: Location, max_bytes: int) -> bytes | None:
    """The content of a file that only this library writes; None if there is no regular file.

    Raises:
        CorruptCheckpointError: if it is larger than ``max_bytes``.
        OSError: if it cannot be read.
    """
    if isinstance(path, ObjectPath):
        with suppress(FileNotFoundError):
            return read_bytes(path, max_bytes)
        return None
    with suppress(FileNotFoundError), _opened_own(path) as file:
        check_size(os.fstat(file.fileno()).st_size, path, max_bytes)
        return file.read()
    return None


def read_own_start(path: Location, num_bytes: int) -> bytes | None:
    """Like ``read_own``, but the first bytes of a file of any size."""
    with suppress(FileNotFoundError):
        if isinstance(path, ObjectPath):
            return bytes(path.store.get_range(path.key, 0, num_bytes)[0])
        with _opened_own(path) as file:
            return file.read(num_bytes)
    return None


def _opened_own(path: Path) -> IO[bytes]:
    """A regular file, opened without following a link.

    Raises:
        FileNotFoundError: if it is something else.
        OSError: if it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in NOT_THERE:
            raise FileNotFoundError from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def is_there(path: Location) -> bool:
    """Whether anything has this path, even a link to nothing.

    Raises:
        OSError: if that cannot be told, which is not the same as no.
    """
    if isinstance(path, ObjectPath):
        return is_file(path) or is_folder(path)
    return status_of(path, follows=False) is not None


def is_file(path: Location) -> bool:
    """Like ``is_there``, whether the path is a file or a link to one."""
    if isinstance(path, ObjectPath):
        return size_of(path) is not None
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Location) -> bool:
    """Like ``is_there``, whether the path is a folder or a link to one."""
    if isinstance(path, ObjectPath):
        return any(True for _ in path.store.list_below(path.prefix))
    return local_folder.is_folder(path)


def size_of(path: Location) -> int | None:
    """Bytes of a file; None if there is none."""
    if isinstance(path, ObjectPath):
        info = path.store.head(path.key) if path.key else None
        return None if info is None else info.num_bytes
    status = status_of(path)
    return None if status is None or not stat.S_ISREG(status.st_mode) else status.st_size


def marks_of(folder: Location, names: Iterable[str], *, opens: bool) -> object:
    """What changes with any of some files; None if one is not there, or would have to be asked for.

    Some network file systems look for changes only where a file ``opens``.
    """
    marks: list[int] = []
    for name in names:
        if isinstance(folder, ObjectPath):
            return None
        try:
            if not opens:
                status = os.stat(f"{folder}/{name}")  # noqa: PTH116 - for each slice
            else:
                descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    status = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
        except OSError:
            return None
        marks += (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return marks


def folders_with(
    root: Location, name: str, skipped: str, on_error: Callable[[OSError], None]
) -> Iterator[str]:
    """Folders below ``root`` that hold a file of this name, by relative name, from the top down.

    Folders whose names end in ``skipped`` are left out; ``on_error`` is called for those that
    cannot be listed.
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

    ``Path.glob`` is not used: it finds nothing in a folder that it may not read.

    Raises:
        OSError: if the folder cannot be read, which is not the same as empty.
    """
    if isinstance(folder, ObjectPath):
        return sorted({name for names in folders_and_files(folder) for name in names})
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - for each checkpoint that is opened
    except OSError as error:
        raise_unless_gone(error)
        return []


def folders_in(folder: Location) -> list[str]:
    """Like ``names_in``, the names of the folders in it."""
    return folders_and_files(folder)[0]


def folders_and_files(folder: Location) -> tuple[list[str], list[str]]:
    """Like ``names_in``, the names of the folders in it, and those of all else."""
    if isinstance(folder, ObjectPath):
        found, objects = folder.store.list_folder(folder.prefix)
        return found, [info.key.rpartition("/")[2] for info in objects]
    names = names_in(folder)
    folders = [name for name in names if is_folder(folder / name)]
    return folders, sorted({*names}.difference(folders))


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

    Raises:
        OSError: if a folder cannot be read.
    """
    if isinstance(path, ObjectPath):
        assert isinstance(root, ObjectPath)
        for info in path.store.list_below(path.prefix):
            yield info.key.removeprefix(root.prefix), info.num_bytes
        return
    pending = [str(path)]
    while pending:
        try:
            entries = os.scandir(pending.pop())
        except OSError as error:
            raise_unless_gone(error)
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                    continue
                is_regular = entry.is_file(follow_symlinks=False)
                size = entry.stat(follow_symlinks=False).st_size if is_regular else None
                yield os.path.relpath(entry.path, str(root)), size


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
    """What each file below a folder takes, by its relative name; of a file its own."""
    if isinstance(folder, ObjectPath):
        return {
            info.key.removeprefix(folder.prefix): FileUse(
                info.num_bytes, info.num_bytes, info.modified
            )
            for info in folder.store.list_below(folder.prefix)
        }
    statuses = {}
    if folder.is_file():
        statuses[folder.name] = folder.stat()
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)  # noqa: PTH118 - Paths cost ten times more
            with suppress(FileNotFoundError):  # a save that is going on renames files
                statuses[os.path.relpath(path, folder)] = os.lstat(path)
    return {
        name: FileUse(
            status.st_size,
            status.st_blocks * 512,  # units of 512 bytes on every file system
            status.st_mtime,
            (status.st_dev, status.st_ino) if status.st_nlink > 1 else None,
        )
        for name, status in statuses.items()
    }


def sizes_in(
    root: Location, names: Collection[str] | None, reported: Mapping[str, int]
) -> dict[str, int]:
    """Size of each file that lies in one of these files and folders, by name relative to ``root``.

    None stands for all that is there. In an object store ``reported`` is all that is in ``names``:
    it has answered for each, and is not asked again.
    """
    if isinstance(root, ObjectPath) and names is not None:
        return dict(reported)
    sizes: dict[str, int] = {}
    for name in [""] if names is None else sorted(names):
        path = root / name
        status = status_of(path) if isinstance(path, Path) else None
        if status is not None and stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
        elif names is None or status is not None:
            found = files_below(path, root)
            sizes.update((own, size) for own, size in found if size is not None)
    return sizes


def make_folder(path: Location) -> None:
    """Make a folder and those that it is in, where there are folders."""
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)


def write(path: Location, data: bytes, durability: Durability = Durability.FSYNC) -> str | None:
    """Write a file such that readers see all of it or none; its ETag in an object store."""
    if isinstance(path, ObjectPath):
        return path.store.put(path.key, data)
    local_folder.write_atomic(path, data, durability)
    return None


def write_content(path: Location, data: bytes, durability: Durability) -> None:
    """Like ``write``, but a power cut takes the file until its folder is synced."""
    if isinstance(path, ObjectPath):
        path.store.put(path.key, data)
    else:
        local_folder.write_content(path, data, durability)


def temporaries(names: Iterable[str], root: Location) -> list[Path]:
    """Temporary files that killed writers of these files below ``root`` have left.

    Raises:
        OSError: if a folder cannot be read.
    """
    if isinstance(root, ObjectPath):
        return []
    by_folder: dict[Path, set[str]] = {}
    for name in names:
        target = root / name
        by_folder.setdefault(target.parent, set()).add(target.name)
    found = []
    for folder, wanted in sorted(by_folder.items()):
        if not local_folder.is_real_folder(folder, root):
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                match = TEMPORARY_NAME.fullmatch(entry.name)
                if match and match[1] in wanted and entry.is_file(follow_symlinks=False):
                    found.append(folder / entry.name)
    return found


def fsync_folders(files: Iterable[Location], root: Location) -> None:
    """Make the names of files durable in every folder from them up to ``root``, but not there.

    The names in ``root`` are made durable by the commit, once. Folders that only other machines
    have are left out.
    """
    folders = {root}
    for file in files if isinstance(root, Path) else ():
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    below = [f for f in folders - {root} if isinstance(f, Path) and f.is_dir()]
    for folder in sorted(below, key=lambda f: len(f.parts), reverse=True):
        local_folder.fsync_folder(folder)


def fsync_folder(folder: Location) -> None:
    """Make the names in a folder durable."""
    if isinstance(folder, Path):
        local_folder.fsync_folder(folder)


fsync_file = fsync_folder
"""Makes the content of a file durable."""


def check_room(folder: Location, num_bytes: int) -> None:
    """Check before a save that ``num_bytes`` can be written below a folder, where that is known.

    Quotas are not checked.

    Raises:
        CheckpointingException: if it is write-protected or a file, or its file system too full.
    """
    if isinstance(folder, ObjectPath):
        return
    place = next(place for place in (folder, *folder.parents) if place.exists())
    findings = []
    if not place.is_dir():
        findings.append(Finding("a file is in the way", path=str(place)))
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = "this process may not write here"
        findings.append(Finding(problem, path=str(place), remedy="Change the permissions."))
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    # Some file systems do not say how large they are.
    if room.f_blocks and free < num_bytes:
        problem, remedy = "not enough free space", "Delete old checkpoints, or keep fewer."
        expected, found = f"{num_bytes} bytes", f"{free} bytes"
        findings.append(Finding(problem, None, expected, found, path=str(place), remedy=remedy))
    if findings:
        raise CheckpointingException(f"cannot save into {folder}", findings)
