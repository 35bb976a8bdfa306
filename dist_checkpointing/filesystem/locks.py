"""The lock of a local checkpoint folder: flock or lock file, its holder, and takeover.

``.dckpt.lock`` is in the folder while the lock is held. If the file system has ``flock``, that is
the lock: it ends with the process, and a file that a killed process left behind locks nothing. If
it has none (Lustre mounted without ``flock``, some FUSE file systems), the file itself is the lock:
the process that creates it has the lock. The file names its holder, so that another process on the
same machine can take the lock over once the holder is gone. A process on another machine cannot:
it cannot find out whether the holder is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import socket
import weakref
from contextlib import AbstractContextManager, ExitStack, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from dist_checkpointing.errors import CheckpointExistsError, Finding
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.location import read_bytes

logger: logging.Logger = logging.getLogger(__name__)
LOCK_NAME: Final = ".dckpt.lock"
_TOKEN: Final = re.compile(r"[0-9a-f]{32}")
_NO_FLOCK: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
_MAX_BYTES: Final = 1 << 16
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# For writing: network file systems give an exclusive lock only on such a descriptor.
_OPEN: Final = _READ | os.O_RDWR
_CREATE: Final = _OPEN | os.O_CREAT | os.O_EXCL
_without_flock: Final[set[int]] = set()
"""Devices without flock that have been logged."""


class Kind(StrEnum):
    """What the lock is: a ``flock``, or the file itself."""

    FLOCK = "flock"
    FILE = "file"


class Holder(NamedTuple):
    """The content of a lock file: who holds the lock.

    ``token`` is the random name of this one holding of the lock, ``boot`` the id of the last start
    of the machine. Each container numbers its own processes, in a ``pid_space``. The process was
    ``started`` at a tick of the kernel; a later one may have its id.
    """

    token: str
    kind: Kind
    host: str
    boot: str
    pid_space: str
    pid: int
    started: int

    @classmethod
    def current(cls, kind: Kind) -> Holder:
        return cls(os.urandom(16).hex(), kind, *_process(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False on another machine, which cannot know."""
        if not (self.boot and self.is_here):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it exists, and belongs to another user
        return _start_of(self.pid) not in (self.started, None)

    @property
    def is_here(self) -> bool:
        return (self.host, self.boot, self.pid_space) == _process(os.getpid())[:3]

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def parsed(cls, data: bytes) -> Holder | None:
        """The holder that a lock file names; None if it names none."""
        try:
            content = local_folder.parse_json(data)
            holder = cls(**{**content, "kind": Kind(content["kind"])})
        except (ValueError, KeyError, TypeError):
            return None
        if [*map(type, holder)] != [str, Kind, str, str, str, int, int]:
            return None
        # Any other number would mean a group of processes to the kernel.
        return holder if _TOKEN.fullmatch(holder.token) and 0 < holder.pid < 1 << 31 else None


@cache
def _process(pid: int) -> tuple[str, str, str, int, int]:
    """Host, boot, namespace of ids, id and start of this process; a fork has another id."""
    path = Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.exists() else ""
    space = os.readlink("/proc/self/ns/pid") if boot else ""
    return socket.gethostname(), boot, space, pid, _start_of(pid) or 0


def _start_of(pid: int) -> int | None:
    """When a process started; 0 if it has ended but is still listed, None if that is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


class FolderLock(AbstractContextManager["FolderLock"]):
    """A lock that is held until ``release`` or the end of the process.

    It closes the descriptors of the folder and of the locked file; None if the file itself locks.
    """

    def __init__(self, at: int, file: int | None, holder: Holder) -> None:
        # A save may be interrupted, or its request forgotten: the lock ends with this object.
        self._close = weakref.finalize(self, _release, at, file, holder, os.getpid())

    @classmethod
    def acquire(cls, folder: Path) -> FolderLock:
        """Take the lock of a folder, which must exist; CheckpointExistsError names who has it."""
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while (taken := _take(at, folder)) is None:
                pass
            return cls(at, *taken)
        except BaseException:
            os.close(at)
            raise

    @property
    def is_held(self) -> bool:
        return self._close.alive

    def release(self) -> None:
        self._close()

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_of(folder: Path) -> Holder | None:
    """Who has the lock of a folder, or had it and may still be there; takes nothing itself."""
    try:
        other = Holder.parsed(read_bytes(folder / LOCK_NAME, _MAX_BYTES))
    except FileNotFoundError:
        return None
    return None if other is None or other.is_gone else other


def _release(at: int, file: int | None, holder: Holder, owner: int) -> None:
    """Delete the lock file, unlock it, and close it.

    Closing alone would not release the lock if a process has been forked meanwhile, because that
    has the descriptor too. The forked process itself only closes: the lock is not its own.
    """
    try:
        with ExitStack() as steps:  # the last one first; all of them, also if one fails
            steps.callback(os.close, at)
            if file is not None:
                steps.callback(os.close, file)
            if os.getpid() != owner:
                return
            if file is not None:
                steps.callback(fcntl.flock, file, fcntl.LOCK_UN)
            if _names(at, LOCK_NAME, holder):
                _unlink(at, LOCK_NAME)
    except OSError as error:
        # The work under the lock is done: an error would say that it failed.
        logger.warning("the lock %s was not released as it should be: %s", LOCK_NAME, error)


def _take(at: int, folder: Path) -> tuple[int | None, Holder] | None:
    """Take the lock; None if the file has changed meanwhile, and the caller must try again."""
    device = os.fstat(at).st_dev
    if device in _without_flock:  # the file itself is the lock
        holder = Holder.current(Kind.FILE)
        if not _claimed(at, LOCK_NAME, holder, folder):
            return None
        for name in os.listdir(at):
            if name.startswith(f"{LOCK_NAME}."):  # of processes that were killed as they took it
                _unlink(at, name)
        return None, holder
    file, is_new = _lock_file(at, folder)
    if file is None:
        return None
    with ExitStack() as undo:
        undo.callback(os.close, file)
        try:
            held = _take_flock(at, file, folder)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            _without_flock.add(device)
            logger.warning(
                "the file system of %s has no flock: the file %s is the lock, and a killed process "
                "leaves it behind; on another machine it must be deleted by hand",
                folder,
                LOCK_NAME,
            )
            if is_new:
                _unlink(at, LOCK_NAME)  # it names no holder, so no process could take it over
            return None
        if held is None:
            return None
        undo.pop_all()
        return file, held


def _lock_file(at: int, folder: Path) -> tuple[int | None, bool]:
    """The open lock file, and whether this created it; None if it disappeared meanwhile."""
    with suppress(FileExistsError):
        return os.open(LOCK_NAME, _CREATE, 0o666, dir_fd=at), True
    try:
        return os.open(LOCK_NAME, _OPEN, dir_fd=at), False
    except FileNotFoundError:
        return None, False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        problem, remedy = "is a link, which no save made", "Find out what it is, and delete it."
        finding = Finding(problem, path=str(folder / LOCK_NAME), remedy=remedy)
        raise CheckpointExistsError(f"{folder} cannot be locked", [finding]) from error


def _take_flock(at: int, file: int, folder: Path) -> Holder | None:
    """Lock the open lock file, and write into it who has it; None if it is not there any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = Holder.parsed(os.pread(file, _MAX_BYTES, 0))
        remedy = "Wait for it to end."
        if other is not None and other.is_gone:
            remedy = "It is gone, but a process that it forked has the lock: end that process."
        raise _held(folder, other, remedy) from None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None  # deleted meanwhile, on another machine
        raise
    if not _is_at(file, at):
        return None  # its holder has deleted it: the next process creates a new one
    other = Holder.parsed(os.pread(file, _MAX_BYTES, 0))
    if other is not None and other.kind is Kind.FILE and not other.is_gone:
        # Locked by a process that sees the folder without flock.
        raise _held(folder, other)
    holder = Holder.current(Kind.FLOCK)
    os.ftruncate(file, 0)
    os.pwrite(file, holder.to_json(), 0)
    return holder


def _is_at(file: int, at: int) -> bool:
    # Opened, because a network file system may answer everything else from a cache.
    with suppress(FileNotFoundError):
        named = os.open(LOCK_NAME, _OPEN, dir_fd=at)
        try:
            return os.path.sameopenfile(file, named)
        finally:
            os.close(named)
    return False


def _claimed(at: int, name: str, holder: Holder, folder: Path) -> bool:
    """Create a lock file, or replace one whose process is gone; False if it changed meanwhile.

    To replace a lock file, a process must first create a file whose name ends in the token of the
    lock file. So only one process replaces it; a later one finds another token and gives up.
    """
    if _created(at, name, holder):
        return True
    try:
        other = Holder.parsed(_read(at, name))
    except FileNotFoundError:
        return False
    if other is None or not other.is_gone:
        raise _held(folder, other, name=name)
    claim = f"{name}.{other.token}"
    if not _claimed(at, claim, holder._replace(token=os.urandom(16).hex()), folder):
        return False
    try:
        if not _names(at, name, other):
            return False
        logger.warning(
            "%s was locked by process %d on this machine, which is gone: the lock is taken over",
            folder,
            other.pid,
        )
        fresh = f"{name}.{holder.token}"
        _write_new(at, fresh, holder)
        os.rename(fresh, name, src_dir_fd=at, dst_dir_fd=at)
        return True
    finally:
        _unlink(at, claim)


def _created(at: int, name: str, holder: Holder) -> bool:
    """Create a lock file; False if it exists.

    The file appears with its content: a lock file without a holder would stay for ever after a
    kill.
    """
    fresh = f"{LOCK_NAME}.{holder.token}"
    try:
        _write_new(at, fresh, holder)
        os.link(fresh, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except FileExistsError:
        # A network file system may report this although it has made the link.
        return _names(at, name, holder)
    except FileNotFoundError:
        return False  # deleted by a process that has the lock
    except OSError as error:
        if error.errno not in local_folder.NO_LINK:
            raise
    else:
        return True
    finally:
        _unlink(at, fresh)
    with suppress(FileExistsError):
        _write_new(at, name, holder)
        return True
    return False


def _write_new(at: int, name: str, holder: Holder) -> None:
    """Create a file that names the holder, and close it: other machines see the content then."""
    file = os.open(name, _CREATE, 0o666, dir_fd=at)
    try:
        try:
            os.pwrite(file, holder.to_json(), 0)
        finally:
            os.close(file)
    except BaseException:
        _unlink(at, name)
        raise


def _read(at: int, name: str) -> bytes:
    file = os.open(name, _READ, dir_fd=at)
    try:
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def _names(at: int, name: str, holder: Holder) -> bool:
    """Whether a lock file is there, and is of this one holding of the lock."""
    with suppress(FileNotFoundError):
        return holder.token.encode() in _read(at, name)
    return False


def _unlink(at: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def _held(
    folder: Path, holder: Holder | None, remedy: str | None = None, name: str = LOCK_NAME
) -> CheckpointExistsError:
    """The error if another process has the lock, or a lock file that its end leaves behind."""
    if remedy is None:
        remedy = "Wait for it to end."
        if holder is None or not holder.is_here:
            remedy += f" If no such process is left, delete {folder / name}."
    finding = Finding(
        "another save is writing here, or tensors are being removed",
        found=None if holder is None else f"process {holder.pid} on host {holder.host}",
        path=str(folder / LOCK_NAME),
        remedy=remedy,
    )
    return CheckpointExistsError(f"{folder} is being written", [finding])
