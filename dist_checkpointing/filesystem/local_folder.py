"""Atomic and durable writes, removal, and what works in a folder of a mounted file system only."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final

from dist_checkpointing.errors import CheckpointExistsError, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location, ObjectPath

_renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # of Linux, which alone has this function
NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that mean: nothing has this name, or a link has it. No other error means that."""
TEMPORARY_NAME = re.compile(r"(.+?)\.[0-9a-f]{8}(?:[0-9a-f]{24})?\.tmp")


def status_of(path: Path | str, *, follows: bool = True) -> os.stat_result | None:
    """The status of a file or folder, or of a link to it; None if nothing has this path.

    ``Path.is_file`` and its like say no where the file system cannot tell, on some Pythons.
    """
    try:
        return os.stat(path, follow_symlinks=follows)
    except OSError as error:
        raise_unless_gone(error)
        return None


def raise_unless_gone(error: OSError) -> None:
    """Raise an error, unless it says that a file or folder is not there."""
    if error.errno not in NOT_THERE:
        raise error


def parse_json(data: bytes) -> Any:
    """The value of a JSON text; ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


json_text: Final = json.JSONEncoder(separators=(",", ":")).encode
"""The shortest JSON text of a value."""
_PARSER_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


@contextmanager
def parsing(
    message: str, path: object, key: str | None = None, remedy: str | None = None
) -> Iterator[None]:
    """Raise CorruptCheckpointError with the path for whatever a parser of the content raises."""
    try:
        yield
    except _PARSER_ERRORS as error:
        finding = Finding(f"{type(error).__name__}: {error}", key, path=str(path), remedy=remedy)
        raise CorruptCheckpointError(message, [finding]) from error


class Durability(Enum):
    """What must be true before a save commits."""

    FSYNC = "fsync"
    """Every file and folder is on the disk: the checkpoint survives a power cut."""

    PAGE_CACHE = "page_cache"
    """The operating system has everything: the checkpoint survives a killed process, but not a
    crash of the machine. For scratch disks and tests."""


def write_atomic(path: Location, data: bytes, durability: Durability = Durability.FSYNC) -> None:
    """Write ``data`` to ``path`` such that readers, also after a crash, see all of it or none."""
    write_content(path.parent, path.name, data, durability)
    if durability is Durability.FSYNC:
        fsync_folder(path.parent)


def write_content(folder: Location, name: str, data: bytes, durability: Durability) -> None:
    """Like ``write_atomic``, but a power cut takes the file until its folder is synced."""
    if isinstance(folder, ObjectPath):
        folder.store.put((folder / name).key, data)
        return
    path, rest = f"{folder}/{name}", memoryview(data)
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "xb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            if durability is Durability.FSYNC:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def rename_new(source: Path, target: Path) -> None:
    """Rename a file; FileExistsError if the new name is taken."""
    link_new(source, target, may_move=True)
    source.unlink(missing_ok=True)


def link_new(source: Path, target: Path, *, may_move: bool = False) -> None:
    """Give a file a second name; FileExistsError if it is taken.

    Where there are no links, the file is copied, or moved if it ``may_move``.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in NO_LINK:
            _copy_new(source, target, may_move=may_move)
        # A network file system may say that a link is there which it has just made.
        elif error.errno != errno.EEXIST or not target.samefile(source):
            raise


def _copy_new(source: Path, target: Path, *, may_move: bool) -> None:
    if may_move and _renameat2 is not None:
        names = os.fsencode(source), os.fsencode(target)
        if not _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
        if code not in {*NO_LINK, errno.EINVAL}:
            raise OSError(code, os.strerror(code), str(source), None, str(target))
    # Slow, but this does not replace anything on any file system.
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write)
        write.flush()
        os.fsync(write.fileno())


def fsync_folder(*paths: Location | str) -> None:
    """Make the names in folders durable, in this order; an object already is."""
    for path in paths:
        if not isinstance(path, ObjectPath):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def make_durable_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing; a power cut takes none of them."""
    missing = [*itertools.takewhile(lambda above: status_of(above) is None, (path, *path.parents))]
    nearest = missing[-1].parent if missing else path
    with suppress(PermissionError):  # a folder that may not be listed cannot be synced
        try:
            is_empty = not os.listdir(nearest)
        except FileNotFoundError:  # another machine has just made it, or has deleted it
            is_empty = True
        # Whoever made it was killed before its name was durable, or has put nothing into it yet.
        if is_empty:
            fsync_folder(nearest.parent)
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):
            fsync_folder(folder.parent)


def remove(path: Path, root: Path) -> bool:
    """Delete a file or folder below ``root``, and the parents that are empty then.

    Returns whether it was there, as far as this machine knows. Nothing outside ``root`` is touched:
    a link is deleted and not followed. ValueError for a path that is not below ``root``.
    """
    parts = path.relative_to(root).parts
    if not parts or ".." in parts:
        raise ValueError(f"{path} is not below {root}")
    *above, name = parts
    is_there = False
    with _descended(above, root) as folders:
        if len(folders) <= len(above):
            return False
        with suppress(FileNotFoundError):
            try:  # without a look, which may be older than what another machine has done
                os.unlink(name, dir_fd=folders[-1])
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(os.lstat(name, dir_fd=folders[-1]).st_mode):
                    raise
                shutil.rmtree(name, dir_fd=folders[-1])
            is_there = True
        for depth in reversed(range(len(above))):
            try:
                os.rmdir(above[depth], dir_fd=folders[depth])
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                break
    return is_there


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
            raise_unless_gone(error)
        yield folders
    finally:
        for descriptor in folders:
            os.close(descriptor)


def file_system_type(path: Path) -> str:
    """The kernel's name for the type of the file system of ``path``; "" if it is unknown."""
    try:
        mounts, device = Path("/proc/self/mountinfo").read_text(), path.stat().st_dev
    except OSError:
        return ""
    # Spaces in paths are escaped, so this is the field of the device.
    _, _, rest = mounts.partition(f" {os.major(device)}:{os.minor(device)} ")
    return rest.partition("\n")[0].partition(" - ")[2].partition(" ")[0]


_LOCAL: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)


def is_local(path: Path) -> bool:
    """Whether a file system is known to be that of a disk of this machine."""
    return file_system_type(path) in _LOCAL


DCKPT_FOLDER: Final = ".dckpt"


def make_dckpt_folder(folder: Path) -> bool:
    """Make the folder ``.dckpt`` of a checkpoint; whether there was none.

    CheckpointExistsError if a link or a file has this name.
    """
    path = folder / DCKPT_FOLDER
    with suppress(FileExistsError):
        path.mkdir()
        return True
    if not stat.S_ISDIR(path.lstat().st_mode):
        remedy = "Find out what it is, and delete it."
        finding = Finding("is not a folder, and no save made it", path=str(path), remedy=remedy)
        raise CheckpointExistsError(f"{folder} is not empty", [finding])
    return False


NO_LINK: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
    | {errno.ENOTSUP}
)
"""Errors of a file system that is another one, or that has no links, or no more of them."""
_COPIED_BYTES: Final = 1 << 30


def share_file(source: Path, target: Path) -> int | None:
    """Give a file that does not change any more a second name, or make a copy in the kernel.

    Several processes may share one file under one name. A copy is durable, its name is not. Returns
    the size of the file; None if neither is possible here, or ``source`` is gone.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except FileExistsError:
        pass  # made by another process of the same save
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        if not _copy(source, target):
            return None
    status = target.lstat()
    if not stat.S_ISREG(status.st_mode):
        target.unlink()
        return None
    return status.st_size


def _copy(source: Path, target: Path) -> bool:
    """Let the kernel make a copy, which shares blocks if the file system can; whether it did."""
    temporary = target.with_name(f"{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        write = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            is_done = copy_range(read, 0, os.fstat(read).st_size, write)
            if is_done:
                os.fsync(write)
        finally:
            os.close(write)
        if is_done:
            with suppress(FileExistsError):  # as above
                rename_new(temporary, target)
        return is_done
    finally:
        os.close(read)
        temporary.unlink(missing_ok=True)


def copy_range(read: int, offset: int, num_bytes: int, write: int) -> bool:
    """Append bytes of a file to another one, in the kernel; whether that is possible here.

    EOFError if the file ends before the last byte.
    """
    if not hasattr(os, "copy_file_range"):  # but on Linux
        return False
    begin, end = offset, offset + num_bytes
    while offset < end:
        try:
            copied = os.copy_file_range(read, write, min(end - offset, _COPIED_BYTES), offset)
        except OSError as error:
            if offset == begin and error.errno in {*NO_LINK, errno.EINVAL}:
                return False
            raise
        if not copied:
            raise EOFError(f"the file ends at {offset}")
        offset += copied
    return True
