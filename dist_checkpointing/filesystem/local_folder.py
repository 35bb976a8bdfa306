"""A folder of a mounted file system: atomic and durable writes, fsync, safe reads of ``.dckpt``,
removal, free space, file system type.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any, Final

from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
)

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors that mean: nothing has this name, or a link has it. No other error means that."""
_TEMPORARY_NAME = re.compile(r"(.+?)(?:\.[0-9a-f]{8}\.tmp|(?:_[0-9a-f]{16})?\.__lock)")
"""Names of temporary files, of ``write_atomic`` and of TensorStore's driver for files."""


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``.

    Raises:
        CorruptCheckpointError: if it is larger, or than the memory, or a pipe or a device, which
            may have no end.
        OSError: if it cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        finding = Finding("not a regular file", path=str(path))
        raise CorruptCheckpointError("refused to read a file", [finding])
    check_size(status.st_size, path, max_bytes)
    try:
        return path.read_bytes()
    except MemoryError as error:
        finding = Finding("larger than the memory", found=status.st_size, path=str(path))
        raise CorruptCheckpointError("refused to read a file", [finding]) from error


def check_size(size: int, path: object, max_bytes: int) -> None:
    """Check that a file is not too large to be what it should be.

    Raises:
        CorruptCheckpointError: if it is.
    """
    if size > max_bytes:
        finding = Finding(
            "file is far too large",
            expected=f"at most {max_bytes} bytes",
            found=size,
            path=str(path),
        )
        raise CorruptCheckpointError("refused to read a file", [finding])


def is_there(path: Path) -> bool:
    """Whether anything has this path, even a link to nothing.

    Raises:
        OSError: if the file system cannot tell, which is not the same as no.
    """
    return _mode(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Like ``is_there``, whether the path is a file or a link to one."""
    mode = _mode(path, follows=True)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Like ``is_there``, whether the path is a folder or a link to one."""
    mode = _mode(path, follows=True)
    return mode is not None and stat.S_ISDIR(mode)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    ``Path.glob`` is not used: it finds nothing in a folder that it may not read.

    Raises:
        OSError: if the folder cannot be read, which is not the same as empty.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - for each checkpoint that is opened
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise


def walked(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from ``root`` down with the names of its files; links are not followed.

    Raises:
        OSError: if a folder cannot be read; ``os.walk`` and ``Path.rglob`` skip it.
    """
    for folder, _, names in os.walk(root, onerror=raise_unless_gone):
        yield Path(folder), names


def files_below(path: Path, root: Path) -> Iterator[tuple[str, int | None]]:
    """All that is not a folder: name relative to ``root``, and size of regular files.

    Links are not followed.

    Raises:
        OSError: if a folder cannot be read.
    """
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
                yield os.path.relpath(entry.path, root), size


def statuses_below(folder: Path) -> dict[str, os.stat_result]:
    """The status of each file below a folder by its relative name; of a file its own."""
    if folder.is_file():
        return {folder.name: folder.stat()}
    statuses = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)  # noqa: PTH118 - Paths cost ten times more
            with suppress(FileNotFoundError):  # a save that is going on renames files
                statuses[os.path.relpath(path, folder)] = os.lstat(path)
    return statuses


def raise_unless_gone(error: OSError) -> None:
    """Raise an error, unless it says that a file or folder is not there."""
    if error.errno not in NOT_THERE:
        raise error


def _mode(path: Path, *, follows: bool) -> int | None:
    try:
        return path.stat(follow_symlinks=follows).st_mode
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise


def marks_of(folder: Path, names: Iterable[str], *, opens: bool) -> list[int] | None:
    """What changes with any of some files; None if one is not there, or cannot be opened."""
    marks: list[int] = []
    for name in names:
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


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: if it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path, max_bytes: int) -> Any:
    """What a JSON file says that must not be larger than ``max_bytes``; see ``parse_json``."""
    return parse_json(read_bytes(path, max_bytes))


@contextmanager
def parsing(
    message: str, path: object, key: str | None = None, remedy: str | None = None
) -> Iterator[None]:
    """Name the file in whose content the body finds something else than it should be.

    Raises:
        CorruptCheckpointError: with this message, for whatever a parser raises.
    """
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        struct.error,
    ) as error:
        finding = Finding(f"{type(error).__name__}: {error}", key, path=str(path), remedy=remedy)
        raise CorruptCheckpointError(message, [finding]) from error


class Durability(Enum):
    """What must be true before a save commits."""

    FSYNC = "fsync"
    """Every file and folder is on the disk: the checkpoint survives a power cut."""

    PAGE_CACHE = "page_cache"
    """The operating system has everything: the checkpoint survives a killed process, but not a
    crash of the machine. For scratch disks and tests."""


def write_atomic(path: Path, data: bytes, durability: Durability = Durability.FSYNC) -> None:
    """Write ``data`` to ``path`` such that readers, also after a crash, see all of it or none."""
    write_content(path, data, durability)
    if durability is Durability.FSYNC:
        fsync_folder(path.parent)


def write_content(path: Path, data: bytes, durability: Durability) -> None:
    """Like ``write_atomic``, but a power cut takes the file until its folder is synced."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durability is Durability.FSYNC:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporaries(names: Iterable[str], root: Path) -> list[Path]:
    """Temporary files that killed writers of these files below ``root`` have left.

    Raises:
        OSError: if a folder cannot be read.
    """
    by_folder: dict[Path, set[str]] = {}
    for name in names:
        target = root / name
        by_folder.setdefault(target.parent, set()).add(target.name)
    found = []
    for folder, wanted in sorted(by_folder.items()):
        if not is_real_folder(folder, root):
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _TEMPORARY_NAME.fullmatch(entry.name)
                if match and match[1] in wanted and entry.is_file(follow_symlinks=False):
                    found.append(folder / entry.name)
    return found


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def fsync_folders(files: Iterable[Path], root: Path) -> None:
    """Make the names of ``files`` durable in every folder from them up to ``root``, but not there.

    The names in ``root`` are made durable by the commit, once. Folders that only other machines
    have are left out.
    """
    folders: set[Path] = {root}
    for file in files:
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    below = filter(Path.is_dir, folders - {root})
    for folder in sorted(below, key=lambda f: len(f.parts), reverse=True):
        fsync_folder(folder)


def remove(path: Path, root: Path) -> None:
    """Delete a file or folder below ``root``, and the parents that are empty then.

    Nothing outside ``root`` is touched: a link is deleted and not followed.

    Raises:
        ValueError: for a path that is not below ``root``.
        OSError: if the file system fails.
    """
    parts = path.relative_to(root).parts
    if not parts or ".." in parts:
        raise ValueError(f"{path} is not below {root}")
    *above, name = parts
    with _descended(above, root) as folders:
        if len(folders) <= len(above):
            return
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=folders[-1], follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                shutil.rmtree(name, dir_fd=folders[-1])
            else:
                os.unlink(name, dir_fd=folders[-1])
        for depth in reversed(range(len(above))):
            try:
                os.rmdir(above[depth], dir_fd=folders[depth])
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return


def remove_all(paths: Iterable[Path], root: Path) -> None:
    """Delete files and folders, see ``remove``, such that none comes back with a power cut."""
    gone = list(paths)
    for path in gone:
        remove(path, root)
    fsync_removal(gone, root)


def fsync_removal(gone: Iterable[Path], root: Path) -> None:
    """Make it durable that files and folders below ``root`` are gone."""
    folders = {root}
    for folder in {path.parent for path in gone}:
        while folder not in folders and not is_folder(folder):
            folder = folder.parent  # noqa: PLW2901 - it went with the file
        folders.add(folder)
    for folder in folders:
        fsync_folder(folder)


def is_real_folder(path: Path, root: Path) -> bool:
    """Whether ``path`` is a folder that is reached from ``root`` without following a link."""
    parts = path.relative_to(root).parts
    with _descended(parts, root) as folders:
        return ".." not in parts and len(folders) > len(parts)


@contextmanager
def _descended(parts: Sequence[str], root: Path) -> Iterator[list[int]]:
    """Descriptors of ``root`` and of the folders on the way down, as far as they exist."""
    options = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folders: list[int] = []
    try:
        try:
            folders.append(os.open(root, options))
            for part in parts:
                folders.append(os.open(part, options | os.O_NOFOLLOW, dir_fd=folders[-1]))
        except OSError as error:
            if error.errno not in NOT_THERE:
                raise
        yield folders
    finally:
        for descriptor in folders:
            os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make everything below a folder durable, files first."""
    for path, names in reversed(list(walked(folder))):
        for name in names:
            fsync_file(path / name)
        fsync_folder(path)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    _fsync(path, os.O_RDONLY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(folder: Path, num_bytes: int) -> None:
    """Check before a save that ``num_bytes`` can be written below a folder.

    Quotas are not checked.

    Raises:
        CheckpointingException: if it is write-protected or a file, or its file system too full.
    """
    place = next(place for place in (folder, *folder.parents) if place.exists())
    findings = []
    if not place.is_dir():
        findings.append(Finding("a file is in the way", path=str(place)))
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = "this process may not write here"
        findings.append(Finding(problem, path=str(place), remedy="Change the permissions."))
    room = os.statvfs(place)
    # Some file systems do not say how large they are.
    if room.f_blocks and room.f_bavail * room.f_frsize < num_bytes:
        findings.append(
            Finding(
                "not enough free space",
                expected=f"{num_bytes} bytes",
                found=f"{room.f_bavail * room.f_frsize} bytes",
                path=str(place),
                remedy="Delete old checkpoints, or keep fewer.",
            )
        )
    if findings:
        raise CheckpointingException(f"cannot save into {folder}", findings)


def file_system_type(path: Path) -> str:
    """The kernel's name for the type of the file system of ``path``; "" if it is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except FileNotFoundError:
        return ""
    device = path.stat().st_dev
    # Spaces in paths are escaped, so this is the field of the device.
    _, _, rest = mounts.partition(f" {os.major(device)}:{os.minor(device)} ")
    return rest.partition("\n")[0].partition(" - ")[2].partition(" ")[0]


OWN_FOLDER: Final = ".dckpt"


def read_own(path: Path, max_bytes: int) -> bytes | None:
    """The content of a file that only this library writes; None if there is no regular file.

    Raises:
        CorruptCheckpointError: if it is larger than ``max_bytes``.
        OSError: if the file system fails.
    """
    file = _opened_own(path)
    if file is None:
        return None
    with file:
        check_size(os.fstat(file.fileno()).st_size, path, max_bytes)
        return file.read()


def read_own_start(path: Path, num_bytes: int) -> bytes | None:
    """Like ``read_own``, but the first bytes of a file of any size."""
    file = _opened_own(path)
    if file is None:
        return None
    with file:
        return file.read(num_bytes)


def _opened_own(path: Path) -> IO[bytes] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def make_own_folder(folder: Path) -> bool:
    """Make the folder ``.dckpt`` of a checkpoint; whether there was none.

    Raises:
        CheckpointExistsError: if a link or a file has this name.
    """
    path = folder / OWN_FOLDER
    with suppress(FileExistsError):
        path.mkdir()
        return True
    if not stat.S_ISDIR(path.lstat().st_mode):
        finding = Finding(
            "is not a folder, and no save made it",
            path=str(path),
            remedy="Find out what it is, and delete it.",
        )
        raise CheckpointExistsError(f"{folder} is not empty", [finding])
    return False
