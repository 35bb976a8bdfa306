"""Where files are: a folder of a mounted file system, or a prefix in an object store.

What works in both is here, and nothing above asks which of the two it is. ``local_folder`` has what
works on mounted file systems only. An object store has no folders, no links and no half-written
objects, and what it has answered is durable.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash

from dist_checkpointing.errors import (
    CheckpointExistsError,
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
    parse_json,
    raise_unless_gone,
    status_of,
    write_content,
)
from dist_checkpointing.filesystem.object_store import Location, ObjectPath, check_size
from dist_checkpointing.threads import in_threads

# One slash: pathlib removes the second.
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_MOST_NAMED: Final = 16
_MAX_REPLACED_BYTES: Final = 1 << 26
_MORE_ROOM: Final = "Delete old checkpoints, or save to another disk."
_MOST_SYNCS, _SYNCS_A_THREAD = 16, 8
VISIBLE_SECONDS: Final = 30.0
"""How long a file may take to be seen by another machine of a network file system."""
T = TypeVar("T")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, such as ``s3://bucket/x`` or, as a Path, ``s3:/bucket/x``."""
    return isinstance(path, ObjectPath) or _URL.match(os.fspath(path)) is not None


def as_location(path: str | os.PathLike[str]) -> Location:
    """Where a path of a user is: on a mounted file system, without ".." and "~", or in an object
    store.

    UnsupportedFormatError for a URL of a scheme that is not known; CheckpointingException if it
    names no bucket, is empty, or is no path.
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
    elif not (text := os.fspath(path)):
        finding = Finding("the path is empty", remedy="Name a folder; '.' is the current one.")
    elif _URL.match(text) is not None:
        return ObjectPath.of(text)
    else:
        # Of "./~" a Path keeps only "~".
        plain = (
            path if isinstance(path, Path) and text[0] != "~" else Path(os.path.expanduser(text))
        )
        # TensorStore refuses paths with "..", and a relative "~" would be expanded the next time.
        is_above = ".." in text and ".." in plain.parts
        return plain.resolve() if is_above or str(plain)[0] == "~" else plain
    raise CheckpointingException("not a path of a checkpoint", [finding])


def require_local(
    path: Location,
    what: str,
    remedy: str = "Leave base= and incremental= out, or save to a local or a shared disk.",
) -> Path:
    """Refuse, by UnsupportedFormatError, what works on a mounted file system only."""
    if isinstance(path, Path):
        return path
    problem = f"{what} works on a mounted file system only"
    finding = Finding(problem, found=str(path), remedy=remedy)
    raise UnsupportedFormatError("not for an object store", [finding])


def as_local_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint or file of tensors on a mounted file system, without "..".

    A function that takes such a path from a user calls this or ``as_location``. Without it,
    ``s3://bucket/x`` would be the relative path ``./s3:/bucket/x``. UnsupportedFormatError for it.
    """
    match = _URL.match(os.fspath(path))
    if match is None:
        folder = as_location(os.fspath(path) or ".")
        assert isinstance(folder, Path)
        return folder
    finding = Finding(
        f"URLs of scheme {match[1]!r} are not supported",
        expected="a folder of a mounted file system",
        found=os.fspath(path),
        remedy="Save to a local or a shared disk and copy the folder, or mount the object store. "
        "A local folder of this name is reached by its absolute path.",
    )
    raise UnsupportedFormatError("not a local path", [finding])


def check_one_destination(destinations: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks save into the same folder (absolute paths), in the same format."""
    what, names = "format", [saved_as for _, saved_as in destinations]
    remedy = "Pass the same strategy on every rank."
    if len({*names}) == 1:
        what, names = "folder", [os.path.normpath(folder) for folder, _ in destinations]
        remedy = "Give every rank the same path; broadcast a name that holds the time or date."
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks_of.setdefault(name, []).append(rank)
    if len(ranks_of) > 1:
        problem = f"this is the {what} on some ranks only"
        findings = [
            Finding(problem, found=name, ranks=tuple(ranks[:_MOST_NAMED]), remedy=remedy)
            for name, ranks in ranks_of.items()
        ]
        message = f"the ranks name different {what}s for one checkpoint"
        raise CheckpointingException(message, findings)


def read_bytes(path: Location, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``.

    CorruptCheckpointError if it is larger, or than the memory, or a pipe or a device, which may
    have no end.
    """
    if isinstance(path, ObjectPath):
        return path.store.get(path.key, max_bytes)
    try:
        if (data := _content(path, max_bytes)) is not None:
            return data
        finding = Finding("not a regular file", path=str(path))
    except MemoryError:
        finding = Finding("larger than the memory", found=size_of(path), path=str(path))
    raise CorruptCheckpointError("refused to read a file", [finding])


def _content(
    path: Path, max_bytes: int, *, follows_links: bool = True, is_start: bool = False
) -> bytes | None:
    # A pipe would be waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            return None
        if not is_start:
            check_size(status.st_size, path, max_bytes)
        parts, left = [], max_bytes
        while left and (part := os.read(descriptor, min(left, status.st_size + 1))):
            parts.append(part)
            left -= len(part)
            if len(part) == status.st_size:
                break  # else the file grows, or its size is not known before
        return b"".join(parts)
    finally:
        os.close(descriptor)


def blocks(path: Location, num_bytes: int = 1 << 22) -> Iterator[bytes | memoryview]:
    if isinstance(path, ObjectPath):
        yield from path.store.blocks(path.key)
        return
    with path.open("rb") as file:
        while data := file.read(num_bytes):
            yield data


def read_json(path: Location, max_bytes: int) -> Any:
    """What a JSON file says that must not be larger than ``max_bytes``; see ``parse_json``."""
    return parse_json(read_bytes(path, max_bytes))


def read_version(path: Location) -> tuple[bytes, Any]:
    """The content of a small file, and which version of it that is, for ``replace``."""
    if isinstance(path, ObjectPath):
        return path.store.get_version(path.key, _MAX_REPLACED_BYTES)
    data = read_bytes(path, _MAX_REPLACED_BYTES)
    return data, xxhash.xxh3_128_hexdigest(data)


def replace(path: Location, data: bytes, version: Any) -> bool:
    """Write a file if it still has the version that was read, or is not there (None); whether so.

    There is no lock that a stopped process could have. What follows on a version has a name of it,
    which one process alone can create; any process that finds it there puts it in its place.
    """
    if isinstance(path, ObjectPath):
        return path.store.replace(path.key, data, version)
    name = path.name if version is None else f"{path.name}.{version}"
    following, is_mine = path.with_name(name), True
    try:
        write_content(path.parent, name, data, Durability.FSYNC, is_new=True)
    except (FileExistsError, FileNotFoundError):  # it was there, and may be in its place by now
        is_mine = False
    if version is None:
        return is_mine
    if read_version(path)[1] != version:  # by now: this process was stopped, or was late
        if is_mine:
            following.unlink(missing_ok=True)
        return False
    with suppress(FileNotFoundError):  # another process has done it
        os.replace(following, path)
    return is_mine


def read_regular(path: Location, max_bytes: int, *, is_start: bool = False) -> bytes | None:
    """The content of a file, no link to one; None if there is no such regular file.

    CorruptCheckpointError if it is larger than ``max_bytes``, unless only its start is read.
    """
    try:
        if isinstance(path, ObjectPath):
            if is_start:
                return bytes(path.store.get_range(path.key, 0, max_bytes)[0])
            return path.store.get(path.key, max_bytes)
        return _content(path, max_bytes, follows_links=False, is_start=is_start)
    except OSError as error:
        if isinstance(error, IsADirectoryError) or error.errno in NOT_THERE:
            return None
        raise


def is_there(path: Location) -> bool:
    """Whether anything has this path, even a link to nothing.

    OSError if that is not known, which is not the same as no.
    """
    if isinstance(path, ObjectPath):
        return is_file(path) or is_folder(path)
    return status_of(path, follows=False) is not None


def is_file(path: Location) -> bool:
    """Like ``is_there``, whether the path is a file or a link to one."""
    return size_of(path) is not None


def is_folder(path: Location) -> bool:
    """Like ``is_there``, whether the path is a folder or a link to one."""
    if isinstance(path, ObjectPath):
        return any(True for _ in path.objects())
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def moments() -> Iterator[None]:
    """When to look for what another machine has written, which may be seen a little later."""
    deadline, pause = time.monotonic() + VISIBLE_SECONDS, 0.001
    yield
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
        yield


def is_seen(look: Callable[[], bool]) -> bool:
    """Whether a look finds something, if need be after a while."""
    return any(look() for _ in moments())


def when_visible(look: Callable[[], T]) -> T:
    """What a look at files gives, if need be after a while; FileNotFoundError at last."""
    for _ in moments():
        with suppress(FileNotFoundError):
            return look()
    return look()


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
    if not isinstance(folder, Path):
        return None
    marks: list[int] = []
    try:
        for name in names:
            path = f"{folder}/{name}"
            if opens:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    status = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
            else:
                status = os.stat(path)
            marks += (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    except OSError:
        return None
    return marks


def _raise(error: OSError) -> None:
    raise error


def folders_with(root: Location, name: str, skipped: str) -> Iterator[str]:
    """Folders below ``root`` that hold a file of this name, by relative name, from the top down.

    Folders whose names end in ``skipped`` are left out; one that cannot be listed is an OSError.
    """
    if isinstance(root, ObjectPath):
        for path in files_below(root):
            *above, last = path.split("/")
            if last == name and not any(part.endswith(skipped) for part in above):
                yield "/".join(above) or "."
        return
    for folder, names, files in os.walk(root, onerror=_raise):
        names[:] = sorted(below for below in names if not below.endswith(skipped))
        if name in files:
            yield Path(folder).relative_to(root).as_posix()


def names_in(folder: Location) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    OSError if the folder cannot be read, which is not the same as empty: ``Path.glob`` finds
    nothing then.
    """
    if isinstance(folder, ObjectPath):
        return sorted({name for names in folders_and_files(folder) for name in names})
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise_unless_gone(error)
        return []


def folders_and_files(folder: Location) -> tuple[list[str], list[str]]:
    """Like ``names_in``, the names of the folders in it, and those of all else."""
    if isinstance(folder, ObjectPath):
        below, objects = folder.store.list_folder(folder.prefix)
        return below, [info.key.rpartition("/")[2] for info in objects]
    names = names_in(folder)
    folders = [name for name in names if is_folder(folder / name)]
    return folders, sorted({*names}.difference(folders))


def relative(path: Location, root: Location) -> str:
    """Name of a file relative to a folder that it is in, with ``/``."""
    if isinstance(path, Path):
        assert isinstance(root, Path)
        return "." if path is root else path.relative_to(root).as_posix()
    return path.key.removeprefix(root.prefix) if isinstance(root, ObjectPath) else path.key


def overlap(one: Location, other: Location) -> bool:
    """Whether one of two files or folders is, or is in, the other."""
    if isinstance(one, Path) and isinstance(other, Path):
        first, second = one.resolve(), other.resolve()
        return first.is_relative_to(second) or second.is_relative_to(first)
    first_name, second_name = f"{one}/", f"{other}/"
    return first_name.startswith(second_name) or second_name.startswith(first_name)


def files_below(folder: Location, names: Iterable[str] = ("",)) -> dict[str, int | None]:
    """The size of each file in a folder, or in some files and folders of it, by its relative name.

    Where it is no regular file, such as a link, None stands for the size. Links are not followed,
    but for those that ``names`` are. OSError if a folder cannot be read.
    """
    if isinstance(folder, ObjectPath):
        return {info.key.removeprefix(folder.prefix): info.num_bytes for info in folder.objects()}
    return {
        name: status.st_size if stat.S_ISREG(status.st_mode) else None
        for name, status in _statuses_below(folder, names, raise_unless_gone).items()
    }


def _statuses_below(
    root: Path, names: Iterable[str], on_error: Callable[[OSError], None]
) -> dict[str, os.stat_result]:
    """All but folders, see ``files_below``."""
    statuses, folders = {}, []
    for name in names:
        path = f"{root}/{name}"
        status = status_of(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            statuses[name] = status
        elif status is not None:
            folders.append(path)
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except OSError as error:
            on_error(error)
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with suppress(FileNotFoundError):  # a save that is going on renames files
                    name = entry.path.removeprefix(f"{root}/")
                    statuses[name] = entry.stat(follow_symlinks=False)
    return statuses


@dataclass(frozen=True, slots=True)
class FileUse:
    """What a file takes.

    ``num_bytes_stored`` are those of its disk blocks, fewer for files with holes; ``modified`` is
    in seconds since 1970. Of a file that has another name elsewhere, as in other checkpoints,
    ``inode`` is the device and inode.
    """

    num_bytes: int
    num_bytes_stored: int
    modified: float
    inode: tuple[int, int] | None = None


def use_below(folder: Location) -> dict[str, FileUse]:
    """What each file below a folder takes, by its relative name; of a file what it takes itself."""
    if isinstance(folder, ObjectPath):
        return {
            info.key.removeprefix(folder.prefix): FileUse(
                info.num_bytes, info.num_bytes, info.modified
            )
            for info in folder.objects()
        }
    root, name = (folder.parent, folder.name) if folder.is_file() else (folder, "")
    return {
        name: FileUse(
            status.st_size,
            status.st_blocks * 512,  # blocks of 512 bytes on every file system
            status.st_mtime,
            (status.st_dev, status.st_ino) if status.st_nlink > 1 else None,
        )
        for name, status in _statuses_below(root, [name], lambda _: None).items()
    }


def sizes_in(
    root: Location, names: Collection[str] | None, reported: Mapping[str, int]
) -> dict[str, int]:
    """Size of each regular file that is ``reported``, or in files and folders of which nothing is,
    by name relative to ``root``.

    None stands for all that is there. In an object store ``reported`` is all that is in ``names``:
    it has answered for each, and is not asked again.
    """
    if isinstance(root, ObjectPath) and names is not None:
        return dict(reported)
    wanted = {""} if names is None else {*reported, *names} - folders_of(reported)
    return {name: size for name, size in files_below(root, wanted).items() if size is not None}


def make_folder(path: Location) -> None:
    if isinstance(path, Path):
        path.mkdir(parents=True, exist_ok=True)


write = local_folder.write_atomic
fsync_file = fsync_folder = local_folder.fsync_folder


def remove_temporaries(names: Iterable[str], root: Location) -> None:
    """Delete the temporary files that killed writers of these files below ``root`` have left."""
    if isinstance(root, ObjectPath):
        return
    targets = {root / name for name in names}
    for folder in sorted({target.parent for target in targets}):
        if local_folder.is_real_folder(folder, root):
            for name in names_in(folder):
                match = TEMPORARY_NAME.fullmatch(name)
                is_ours = match is not None and folder / match[1] in targets
                status = status_of(folder / name, follows=False) if is_ours else None
                if status is not None and stat.S_ISREG(status.st_mode):
                    local_folder.remove(folder / name, root)


def folders_of(names: Iterable[str]) -> set[str]:
    """The folders that files with these relative names lie in, and those that these are in."""
    folders = {""}
    for name in names:
        folder = name.rpartition("/")[0]
        while folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders - {""}


def fsync_folders(names: Iterable[str], root: Location, *, to_root: bool = False) -> None:
    """Make the names of files durable in every folder from them up to ``root``.

    Those in ``root`` itself, unless ``to_root``, are made durable by the commit, once. Folders that
    only other machines have, and those that are gone with the files, are left out.
    """
    if isinstance(root, ObjectPath):
        return
    folders = sorted(folders_of(names) | ({""} if to_root else set()))

    def sync(folder: str) -> None:
        with suppress(FileNotFoundError):
            fsync_folder(f"{root}/{folder}")

    # Each waits for the disk, which serves those that wait together at once.
    in_threads(sync, folders, min(_MOST_SYNCS, 1 + len(folders) // _SYNCS_A_THREAD))


def remove_all(names: Iterable[str], root: Path) -> None:
    """Delete files and folders, see ``local_folder.remove``; none comes back with a power cut."""
    gone = list(names)
    for name in gone:
        local_folder.remove(root / name, root)
    fsync_folders(gone, root, to_root=True)


def check_room(folder: Location, num_bytes: int) -> None:
    """Check before a save that ``num_bytes`` can be written below a folder, where that is known.

    CheckpointingException if it is write-protected, or its file system too full; a
    CheckpointExistsError if a file is in the way. Quotas are not checked.
    """
    if isinstance(folder, ObjectPath):
        return
    above, status = _nearest(folder)
    findings, is_folder = [], stat.S_ISDIR(status.st_mode)
    if not is_folder:
        findings.append(Finding("a file is in the way", path=str(above)))
    elif not os.access(above, os.W_OK | os.X_OK):
        problem = "this process may not write here"
        findings.append(Finding(problem, path=str(above), remedy="Change the permissions."))
    free = _free_bytes(above)
    if free is not None and free < num_bytes:
        problem, sizes = "not enough free space", (f"{num_bytes} bytes", f"{free} bytes")
        findings.append(Finding(problem, None, *sizes, path=str(above), remedy=_MORE_ROOM))
    if findings:
        kind = CheckpointingException if is_folder else CheckpointExistsError
        raise kind(f"cannot save into {folder}", findings)


def _nearest(folder: Path) -> tuple[Path, os.stat_result]:
    """A folder or file, or the nearest one above that exists; and its status."""
    paths = itertools.chain([folder], folder.parents)
    return next((path, found) for path in paths if (found := status_of(path)))


def _free_bytes(folder: Path) -> int | None:
    room = os.statvfs(folder)
    # Some file systems do not say how large they are.
    return room.f_bavail * room.f_frsize if room.f_blocks else None


@contextmanager
def explained_full_disk(folder: Location, what: str) -> Iterator[None]:
    """Let the error of a full disk in the body name ``what`` did not fit, and what to do."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full or isinstance(folder, ObjectPath):
            raise
        free = _free_bytes(_nearest(folder)[0])
        room = "" if free is None else f", with {free} bytes free"
        text = f"{error.strerror}: {what} did not fit into {folder}{room}. {_MORE_ROOM[:-1]}"
        raise OSError(error.errno, text) from error
