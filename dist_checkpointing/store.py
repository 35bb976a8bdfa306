"""Where bytes live: names on disk, atomic and durable writes, size-checked reads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
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

_MAX_NAME_BYTES = 200
_MAX_COMPONENT_BYTES = 255
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{,{_MAX_NAME_BYTES - 1}}}")
_TEMPORARY_NAME = re.compile(r"(.+)\.[0-9a-f]{8}\.tmp")
_TAKEN_NAMES = frozenset({"metadata.json", "common.pt", "zarr.json"})


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
    elif parts[0] in (*_TAKEN_NAMES, ".dckpt"):
        problem = "the checkpoint itself uses this name"
    elif any(part.endswith(".sync") for part in parts):
        problem = "readers take folders that end in .sync for Megatron's locks"
    if problem is not None:
        finding = Finding(problem, key, remedy="Rename the key, or use a backend that encodes it.")
        raise InvalidShardingError("a key cannot be a file name", [finding])


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file that must not be larger than ``max_bytes``."""
    size = path.stat().st_size
    if size > max_bytes:
        finding = Finding(
            "file is far too large",
            expected=f"at most {max_bytes} bytes",
            found=size,
            path=str(path),
        )
        raise CorruptCheckpointError("refused to read a file", [finding])
    return path.read_bytes()


def parse_json(data: bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: if it is none, or nested too deeply to be one of ours.
    """
    try:
        return json.loads(data)
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
    """What calls of ``write_atomic`` for these names below ``root`` left when they were killed."""
    targets = {root / name for name in names}
    found = []
    for folder in sorted({target.parent for target in targets}):
        for path in folder.glob("*.tmp"):
            match = _TEMPORARY_NAME.fullmatch(path.name)
            if match is not None and folder / match[1] in targets and path.is_file():
                found.append(path)
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
    """Delete a file or folder below ``root`` and the parents that it leaves empty."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    parent = path.parent
    while parent != root and parent.is_dir() and not any(parent.iterdir()):
        parent.rmdir()
        parent = parent.parent


def fsync_tree(folder: Path) -> None:
    """Make everything below a folder durable, files first."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_file(Path(path, name))
        fsync_folder(Path(path))


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
