"""What stands in for functions of ``os``, ``io``, ``fcntl``, ``time`` and ``socket`` in a world.

Code that runs in a simulated process calls these without knowing it. Paths below ``/sim`` are on
its disks, and so are the descriptors of files there; all else goes to the operating system.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from dist_checkpointing.testing.simulation.disk import Disk, Inode, Look

if TYPE_CHECKING:
    from dist_checkpointing.testing.simulation.world import World

ROOT: Final = "/sim"
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_KEPT_OPTIONS: Final = os.O_ACCMODE | os.O_APPEND | os.O_CLOEXEC
_TIME: Final = 1_700_000_000.0


@dataclass(slots=True, eq=False)
class OpenFile:
    """What a descriptor stands for."""

    inode: Inode
    disk: Disk
    path: str
    pid: int


class Entry:
    """A name in a folder, like ``os.DirEntry``."""

    def __init__(self, status: Callable[..., os.stat_result], path: str, inode: Inode) -> None:
        self.name: str = path.rpartition("/")[2]
        self.path: str = path
        self.stat = status
        self._inode = inode

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        del follow_symlinks
        return self._inode.is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_dir(follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return False

    def inode(self) -> int:
        return self._inode.number


class Entries(Iterator[Entry]):
    """What ``os.scandir`` returns."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._left = iter(entries)

    def __next__(self) -> Entry:
        return next(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())


class SystemCalls:
    """The operating system of a world.

    Each method does what the function of its name in ``os`` does, for files of the world.
    """

    def __init__(self, world: World) -> None:
        self._world, self._scheduler = world, world.scheduler
        self._files: dict[int, OpenFile] = {}
        self._real = {name: getattr(os, name) for name in _OF_FILES}
        self._open_file = io.open
        self._folder = os.open("/", os.O_RDONLY)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that stand in, by the names of those that they stand in for."""
        own: dict[str, Callable[..., Any]] = {
            f"os.{name}": self._routed(name, getattr(self, name)) for name in _OF_FILES
        }
        for name in _OF_A_PROCESS:
            own[name] = self._in_world(
                getattr(self, f"_{name.partition('.')[2]}"), pkgutil.resolve_name(name)
            )
        own["io.open"] = own["builtins.open"] = self._open_stream
        return own

    def close_all(self) -> None:
        """Close what is still open, such as files of processes that were killed."""
        for descriptor in [*self._files]:
            if self._is_open(descriptor):
                self.close(descriptor)
        self._real["close"](self._folder)

    def _in_world(self, own: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return (real if self._scheduler.task is None else own)(*args, **options)

        return call

    def _routed(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """Calls ``own`` for files of the world, in a process of it, and the real function else."""
        real, is_close = self._real[name], name == "close"

        def call(*args: Any, **options: Any) -> Any:
            subject = args[0] if args else options.get("path")
            if isinstance(subject, int):
                is_own = subject in self._files and (is_close or self._is_open(subject))
            else:
                folder = options.get("dir_fd", options.get("src_dir_fd")) if options else None
                is_own = folder in self._files
                is_own = is_own or (subject is not None and os.fspath(subject)[:5] == "/sim/")
            if not is_own or (self._scheduler.task is None and not is_close):
                return real(*args, **options)
            return own(*args, **options)

        return call

    def _is_open(self, descriptor: int) -> bool:
        """Whether a descriptor still is of its file: C code may have closed it."""
        file = self._files[descriptor]
        try:
            now = self._real["fstat"](descriptor)
            known = self._folder if file.inode.descriptor is None else file.inode.descriptor
            is_same: bool = now.st_ino == self._real["fstat"](known).st_ino
        except OSError:
            is_same = False
        if not is_same:
            self._forget(descriptor)
        return is_same

    def _forget(self, descriptor: int) -> None:
        file = self._files.pop(descriptor)
        if file.inode.lock is file:
            file.inode.lock = None

    @property
    def _machine(self) -> str:
        return self._scheduler.running.process.machine

    def _parts(self, path: Any, dir_fd: int | None) -> tuple[Disk, Inode, list[str], str]:
        """The disk of a path, where the way begins, its parts, and what the log calls it."""
        text = os.fspath(path)
        if dir_fd is not None and not text.startswith("/"):
            above = self._files[dir_fd]
            return above.disk, above.inode, _split(text), f"{above.path}/{text}"
        disk, parts = self._world.disk_of(self._machine, _split(text)[1:])
        disk.now = self._scheduler.now
        return disk, disk.root, parts, text

    def _find(self, path: Any, look: Look, dir_fd: int | None = None) -> tuple[Disk, Inode, str]:
        disk, start, parts, shown = self._parts(path, dir_fd)
        return disk, disk.find(self._machine, parts, look, start), shown

    def _parent(self, path: Any, dir_fd: int | None) -> tuple[Disk, Inode, str, str]:
        """The folder that a path is in, and its last part; of what is to be changed."""
        disk, start, parts, shown = self._parts(path, dir_fd)
        if not parts:
            raise _error(errno.EBUSY, shown)
        folder = disk.find(self._machine, parts[:-1], Look.NOW, start)
        if not folder.is_folder:
            raise _error(errno.ENOTDIR, shown)
        return disk, folder, parts[-1], shown

    def _about(self, operation: str, path: str, disk: Disk | None = None) -> None:
        """Let others go on before an operation, which may fail."""
        self._world.before(operation, path)
        if disk is not None:
            disk.now = self._scheduler.now

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        del mode
        makes = bool(flags & os.O_CREAT)
        disk, start, parts, shown = self._parts(path, dir_fd)
        self._about("create" if makes else "open", shown, disk)
        look = Look.NOW if makes else Look.OPEN
        try:
            inode = disk.find(self._machine, parts, look, start)
        except FileNotFoundError:
            if not makes:
                raise
            disk, folder, name, _ = self._parent(path, dir_fd)
            inode = disk.make(self._machine, folder, name, is_folder=False)
        else:
            if makes and flags & os.O_EXCL:
                raise _error(errno.EEXIST, shown)
            if not inode.is_folder and flags & os.O_DIRECTORY:
                raise _error(errno.ENOTDIR, shown)
        writes = bool(flags & _WRITES)
        if inode.descriptor is None:
            if writes:
                raise _error(errno.EISDIR, shown)
            descriptor = os.dup(self._folder)
        else:
            if flags & os.O_TRUNC:
                inode.content = b""
            source = f"/proc/self/fd/{inode.descriptor}"
            descriptor = self._real["open"](source, flags & _KEPT_OPTIONS)
        if writes:
            inode.writers.add(self._machine)
            inode.modified = inode.changed = disk.nanoseconds
        self._files[descriptor] = OpenFile(inode, disk, shown, self._getpid())
        return descriptor

    def _open_stream(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        is_path = not isinstance(file, int) and self._scheduler.task is not None
        text = os.fspath(file) if is_path else ""
        if text[:6] == "/proc/":
            shown = self._world.proc_file(text)
            if shown is not None:
                return io.StringIO(shown)
        if text[:5] == "/sim/" and "opener" not in options:
            options["opener"] = self.open
        return self._open_file(file, mode, *args, **options)

    def close(self, descriptor: int) -> None:
        self._forget(descriptor)
        self._real["close"](descriptor)

    def stat(self, path: Any, *, dir_fd: int | None = None, **_: Any) -> os.stat_result:
        if isinstance(path, int):
            return self.fstat(path)
        disk, start, parts, shown = self._parts(path, dir_fd)
        self._about("stat", shown, disk)
        return disk.status(disk.find(self._machine, parts, Look.STATUS, start))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return self.stat(path, dir_fd=dir_fd)

    def fstat(self, descriptor: int) -> os.stat_result:
        file = self._files[descriptor]
        return file.disk.status(file.inode)

    def access(self, path: Any, mode: int, **_: Any) -> bool:
        del mode
        return self._find(path, Look.STATUS)[1] is not None

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> str:
        shown = self._find(path, Look.STATUS, dir_fd)[2]
        raise _error(errno.EINVAL, shown)

    def statvfs(self, path: Any) -> os.statvfs_result:
        if not isinstance(path, int):
            self._find(path, Look.STATUS)
        return os.statvfs_result((4096, 1, *[1 << 40] * 3, *[1 << 20] * 3, 0, 255))

    def scandir(self, path: Any = ".") -> Entries:
        at = path if isinstance(path, int) else None
        if at is None:
            disk, folder, shown = self._find(path, Look.LIST)
        else:
            file = self._files[at]
            disk, folder, shown = file.disk, file.inode, file.path
        self._about("list", shown, disk)
        if not folder.is_folder:
            raise _error(errno.ENOTDIR, shown)
        above = "" if at is not None else f"{os.fspath(path).rstrip('/')}/"
        entries = [
            Entry(partial(self.stat, f"{above}{name}", dir_fd=at), f"{above}{name}", inode)
            for name, inode in disk.listed(self._machine, folder).items()
        ]
        self._scheduler.random.shuffle(entries)  # no order is promised
        return Entries(entries)

    def listdir(self, path: Any = ".") -> list[str]:
        return [entry.name for entry in self.scandir(path)]

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        del mode
        self._about("mkdir", self._parts(path, dir_fd)[3])
        disk, folder, name, _ = self._parent(path, dir_fd)
        disk.make(self._machine, folder, name, is_folder=True)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    remove = unlink

    def _remove(self, operation: str, path: Any, dir_fd: int | None) -> None:
        self._about(operation, self._parts(path, dir_fd)[3])
        disk, folder, name, shown = self._parent(path, dir_fd)
        found = disk.named(self._machine, folder, name)
        if found is None:
            raise _error(errno.ENOENT, shown)
        if found.is_folder != (operation == "rmdir"):
            raise _error(errno.EISDIR if found.is_folder else errno.ENOTDIR, shown)
        if found.names:
            raise _error(errno.ENOTEMPTY, shown)
        disk.change(self._machine, [(folder, name, None)])

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        src_dir_fd, dst_dir_fd = options.get("src_dir_fd"), options.get("dst_dir_fd")
        self._about("link", self._parts(dst, dst_dir_fd)[3])
        disk, inode, _ = self._find(src, Look.NOW, src_dir_fd)
        other, folder, name, shown = self._parent(dst, dst_dir_fd)
        if disk is not other or inode.is_folder:
            raise _error(errno.EPERM if inode.is_folder else errno.EXDEV, shown)
        if other.named(self._machine, folder, name) is not None:
            raise _error(errno.EEXIST, shown)
        disk.change(self._machine, [(folder, name, inode)])

    def rename(self, src: Any, dst: Any, **options: Any) -> None:
        src_dir_fd, dst_dir_fd = options.get("src_dir_fd"), options.get("dst_dir_fd")
        self._about("rename", self._parts(dst, dst_dir_fd)[3])
        disk, folder, old_name, _ = self._parent(src, src_dir_fd)
        other, target, new_name, new = self._parent(dst, dst_dir_fd)
        inode = disk.named(self._machine, folder, old_name)
        there = other.named(self._machine, target, new_name)
        if inode is None or disk is not other:
            code = errno.ENOENT if inode is None else errno.EXDEV
        elif there is None or there.is_folder == inode.is_folder:
            code = errno.ENOTEMPTY if there is not None and there.names else 0
        else:
            code = errno.EISDIR if there.is_folder else errno.ENOTDIR
        if code:
            raise _error(code, new)
        if there is not inode:
            disk.change(self._machine, [(folder, old_name, None), (target, new_name, inode)])

    replace = rename

    def utime(self, path: Any, *_: Any, **options: Any) -> None:
        self._find(path, Look.NOW, options.get("dir_fd"))[1].changed += 1

    def fsync(self, descriptor: int) -> None:
        file = self._files[descriptor]
        try:
            self._about("fsync", file.path, file.disk)
        except OSError:
            file.disk.sync(self._machine, file.inode, fails=True)
            raise
        file.disk.sync(self._machine, file.inode)

    def write(self, descriptor: int, data: Any) -> int:
        return self._written(descriptor, [data], None)

    def writev(self, descriptor: int, parts: Sequence[Any]) -> int:
        return self._written(descriptor, parts, None)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return self._written(descriptor, [data], offset)

    def _written(self, descriptor: int, parts: Sequence[Any], offset: int | None) -> int:
        file = self._files[descriptor]
        self._about("write", file.path, file.disk)
        whole = b"".join(bytes(memoryview(part).cast("B")) for part in parts)
        most = len(whole)
        if most > 1 and self._world.is_short():
            most = self._scheduler.random.randrange(1, most)
        file.inode.modified = file.inode.changed = file.disk.nanoseconds
        if offset is None:
            return int(self._real["write"](descriptor, whole[:most]))
        return int(self._real["pwrite"](descriptor, whole[:most], offset))

    def posix_fallocate(self, descriptor: int, offset: int, num_bytes: int) -> None:
        file = self._files[descriptor]
        self._about("allocate", file.path, file.disk)
        self._real["posix_fallocate"](descriptor, offset, num_bytes)

    def ftruncate(self, descriptor: int, length: int) -> None:
        file = self._files[descriptor]
        self._about("truncate", file.path, file.disk)
        file.inode.modified = file.inode.changed = file.disk.nanoseconds
        self._real["ftruncate"](descriptor, length)

    def copy_file_range(self, src: int, dst: int, *args: Any, **options: Any) -> int:
        file = self._files[dst]
        self._about("copy", file.path, file.disk)
        return int(self._real["copy_file_range"](src, dst, *args, **options))

    def _flock(self, descriptor: Any, operation: int) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        file = self._files[number]
        self._about("flock", file.path, file.disk)
        if not file.disk.has_flock:
            raise _error(errno.ENOLCK, file.path)
        inode = file.inode
        if operation & fcntl.LOCK_UN:
            inode.lock = None if inode.lock is file else inode.lock
        elif inode.lock not in (None, file):
            if operation & fcntl.LOCK_NB:
                raise _error(errno.EWOULDBLOCK, file.path)
            self._scheduler.wait(lambda: inode.lock is None)
            inode.lock = file
        else:
            inode.lock = file

    def release_locks(self, pid: int) -> None:
        """Release the locks of a process that has ended."""
        for file in self._files.values():
            if file.pid == pid and file.inode.lock is file:
                file.inode.lock = None

    def _getpid(self) -> int:
        return self._scheduler.running.process.pid

    def _kill(self, pid: int, signal: int) -> None:
        assert signal == 0, "only to ask whether a process is there"
        if not self._world.is_running(pid, self._machine):
            raise _error(errno.ESRCH, str(pid))

    def _urandom(self, size: int) -> bytes:
        return self._scheduler.random.randbytes(size)

    def _gethostname(self) -> str:
        return self._machine

    def _time(self) -> float:
        return _TIME + self._monotonic() + self._world.clock_error(self._machine)

    def _time_ns(self) -> int:
        return int(self._time() * 1e9)

    def _monotonic(self) -> float:
        self._scheduler.now += 1e-6
        return self._scheduler.now

    _perf_counter = _monotonic

    def _monotonic_ns(self) -> int:
        return int(self._monotonic() * 1e9)

    _perf_counter_ns = _monotonic_ns

    def _sleep(self, seconds: float) -> None:
        self._scheduler.wait(lambda: False, seconds)


_OF_FILES: Final = (
    *("open", "close", "stat", "lstat", "fstat", "access", "readlink", "statvfs", "scandir"),
    *("listdir", "mkdir", "unlink", "remove", "rmdir", "link", "rename", "replace", "utime"),
    *("fsync", "write", "writev", "pwrite", "posix_fallocate", "ftruncate"),
    "copy_file_range",
)
_OF_A_PROCESS: Final = (
    *("os.getpid", "os.kill", "os.urandom", "fcntl.flock", "socket.gethostname", "time.time"),
    *("time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter"),
    *("time.perf_counter_ns", "time.sleep"),
)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
