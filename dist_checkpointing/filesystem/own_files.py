"""The folder ``.dckpt`` and the files that only this library writes: links are never followed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from dist_checkpointing.errors import CheckpointExistsError, Finding
from dist_checkpointing.filesystem import local

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
        local.check_size(os.fstat(file.fileno()).st_size, path, max_bytes)
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
        if error.errno in local.NOT_THERE:
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
