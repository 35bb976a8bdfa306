"""Files of one checkpoint in the folder of another: hard links, else copies that the kernel makes.

A hard link is a second name of the same file. Each name can be removed by itself; the file system
frees the bytes with the last one. Nothing may write into a file that has several names.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import Final

_NO_LINK: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
    | {errno.ENOTSUP}
)
"""Errors of a file system that is another one, or that has no links, or no more of them."""
_COPIED_BYTES: Final = 1 << 30


def share_file(source: Path, target: Path) -> int | None:
    """Give a file that does not change any more a second name, or make a copy in the kernel.

    Several processes may share one file under one name. A copy is durable, its name is not.

    Returns:
        Size of the file in bytes; None if neither is possible here, or ``source`` is gone.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except FileExistsError:
        pass  # made by another process of the same save
    except OSError as error:
        if error.errno not in _NO_LINK:
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
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
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
            temporary.replace(target)
        return is_done
    finally:
        os.close(read)
        temporary.unlink(missing_ok=True)


def copy_range(read: int, offset: int, num_bytes: int, write: int) -> bool:
    """Append bytes of a file to another one, in the kernel; whether that is possible here.

    Raises:
        EOFError: if the file ends before the last byte.
    """
    begin, end = offset, offset + num_bytes
    while offset < end:
        try:
            copied = os.copy_file_range(read, write, min(end - offset, _COPIED_BYTES), offset)
        except OSError as error:
            if offset == begin and error.errno in {*_NO_LINK, errno.EINVAL}:
                return False
            raise
        if not copied:
            raise EOFError(f"the file ends at {offset}")
        offset += copied
    return True
