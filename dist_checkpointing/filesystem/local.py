"""Where bytes live: names on disk, atomic and durable writes, size-checked reads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
)

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors that say that there is nothing of that name, or a link; any other one says nothing."""
_MAX_NAME_BYTES = 200
_MAX_COMPONENT_BYTES = 255
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{,{_MAX_NAME_BYTES - 1}}}")
_TEMPORARY_NAME = re.compile(r"(.+?)(?:\.[0-9a-f]{8}\.tmp|(?:_[0-9a-f]{16})?\.__lock)")
"""Of ``write_atomic``, and of TensorStore's driver for files."""
_TAKEN_NAMES = frozenset({"metadata.json", "common.pt", "zarr.json"})
_OWN_NAMES = frozenset({".dckpt", ".dckpt.lock"})


def disk_name(key: str) -> str:
    """The folder name of a key: one path component, the same on every file system.

    UTF-8, percent-encoded outside ``[A-Za-z0-9._-]``, for a leading dot and for names that a
    checkpoint uses itself. A name over 200 bytes is cut and ends in ``~`` and 16 hex digits; the
    index maps it back.
    """
    if _PLAIN_NAME.fullmatch(key) and key not in _TAKEN_NAMES:
        return key
    name = quote(key, safe="").replace("~", "%7E")
    if name.startswith(".") or name in _TAKEN_NAMES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"{name[: _MAX_NAME_BYTES - 17]}~{digest}"


def check_raw_key(key: str) -> None:
    """Refuse a key that cannot be used as a relative path as it is.

    Raises:
        InvalidShardingError: for a key that would leave the folder or clash with other files.
    """
    parts = key.split("/")
    problem = None
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        problem = "as a path this key has an empty, '.' or '..' component"
    elif any(len(part.encode()) > _MAX_COMPONENT_BYTES for part in parts):
        problem = f"a component of this key is longer than {_MAX_COMPONENT_BYTES} bytes"
    elif parts[0] in _TAKEN_NAMES | _OWN_NAMES:
        problem = "the checkpoint itself uses this name"
    elif any(part.endswith(".sync") for part in parts):
        problem = "readers take folders that end in .sync for Megatron's locks"
    if problem is not None:
        finding = Finding(problem, key, remedy="Rename the key, or use a backend that encodes it.")
        raise InvalidShardingError("a key cannot be a file name", [finding])


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``."""
    check_size(path.stat().st_size, path, max_bytes)
    return path.read_bytes()


def check_size(size: int, path: Path, max_bytes: int) -> None:
    """Refuse a file that is too large to be what it should be.

    Raises:
        CorruptCheckpointError: naming it.
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
    """Whether there is something of that name, be it a link to nothing.

    Raises:
        OSError: if that cannot be found out, which is not the same as no.
    """
    return _mode(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Whether there is a file, or a link to one.

    Raises:
        OSError: if that cannot be found out, which is not the same as no.
    """
    mode = _mode(path, follows=True)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, or a link to one.

    Raises:
        OSError: if that cannot be found out, which is not the same as no.
    """
    mode = _mode(path, follows=True)
    return mode is not None and stat.S_ISDIR(mode)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder.

    ``Path.glob`` takes a folder that it may not read for an empty one.

    Raises:
        OSError: if the folder cannot be read, which is not the same as empty.
    """
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise


def walked(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from ``root`` down with the names of its files; links are not followed.

    Raises:
        OSError: if a folder cannot be read. ``os.walk`` and ``Path.rglob`` leave it out.
    """
    for folder, _, names in os.walk(root, onerror=_raise_unless_gone):
        yield Path(folder), names


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in NOT_THERE:
        raise error


def _mode(path: Path, *, follows: bool) -> int | None:
    try:
        return path.stat(follow_symlinks=follows).st_mode
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise


def parse_json(data: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """What a JSON text says.

    Args:
        data: the text.
        object_hook: gives what stands for each object, as soon as it is read.

    Raises:
        ValueError: if it is not JSON, or nested too deeply to be one of ours.
    """
    try:
        return json.loads(data, object_hook=object_hook)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class Durability(Enum):
    """When a save may call itself finished."""

    FSYNC = "fsync"
    """Every file and folder is on the disk before the commit: survives a power cut."""

    PAGE_CACHE = "page_cache"
    """The operating system has everything: survives a killed process, not a killed machine. For
    scratch disks and tests."""


def write_atomic(path: Path, data: bytes, durability: Durability = Durability.FSYNC) -> None:
    """Put ``data`` at ``path`` so that a reader, or a crash, sees all of it or nothing new."""
    durable = durability is Durability.FSYNC
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def temporaries(names: Iterable[str], root: Path) -> list[Path]:
    """What was left by writers of these files below ``root`` that were killed.

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


def check_room(folder: Path, num_bytes: int) -> None:
    """Find out, before a byte is written, whether ``num_bytes`` can be written below a folder.

    Raises:
        CheckpointingException: if the place is write-protected or too full. Quotas are not seen.
    """
    place = folder
    while not place.exists():
        place = place.parent
    findings = []
    if not os.access(place, os.W_OK | os.X_OK):
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


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folders(files: Iterable[Path], root: Path) -> None:
    """Make the names of ``files`` durable: every folder between them and ``root``, once."""
    folders: set[Path] = {root}
    for file in files:
        folder = file.parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
        fsync_folder(folder)


def remove(path: Path, root: Path) -> None:
    """Delete a file or folder below ``root`` and the parents that it leaves empty.

    Never leaves ``root``: a link is deleted, not followed, and what lies behind a link to a folder
    is not touched.

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


def is_real_folder(path: Path, root: Path) -> bool:
    """Whether there is a folder at ``path``, and no link on the way to it from ``root``."""
    parts = path.relative_to(root).parts
    with _descended(parts, root) as folders:
        return ".." not in parts and len(folders) > len(parts)


@contextmanager
def _descended(parts: Sequence[str], root: Path) -> Iterator[list[int]]:
    """Descriptors of ``root`` and of the folders on the way down, as far as there are any."""
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system_type(path: Path) -> str:
    """The kernel's name for the file system that ``path`` is on; "" where it does not say."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return ""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        fields, _, source = line.partition(" - ")
        if fields.split()[2] == wanted:
            return source.split()[0]
    return ""
