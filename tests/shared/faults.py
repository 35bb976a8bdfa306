"""Faults at the boundaries of the system: calls and requests that fail, wait, lie, or are the last.

Only functions that are public outside of this library are replaced: of ``os``, ``fcntl``, ``io``,
``time`` and obstore. Each function here is a context manager; the faults end with its body.
"""

import errno
import fcntl
import os
import pkgutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Act = Callable[..., Any]
_devices = count(1 << 40)
REQUESTS = ("get", "put", "head", "delete", "list", "list_with_delimiter")


def path_of(subject: object, *, dir_fd: int | None = None) -> Path:
    """The path that a call is about, of which it may have a descriptor."""
    if isinstance(subject, int):
        return Path(f"/proc/self/fd/{subject}").readlink()
    above = Path() if dir_fd is None else path_of(dir_fd)
    return above / os.fsdecode(subject)  # type: ignore[arg-type]


@contextmanager
def replaced(name: str, act: Act) -> Iterator[None]:
    """Call ``act(real, *arguments, **options)`` in place of a function or method, ``os.fsync``."""
    owner_name, _, function = name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    real = getattr(owner, function)

    def call(*arguments: Any, **options: Any) -> Any:  # no partial, which is no method
        return act(real, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, call)
        yield


@contextmanager
def failing(
    *names: str,
    code: int = errno.EIO,
    error: BaseException | None = None,
    nth: int = 1,
    times: int | None = None,
    at: Callable[..., object] = lambda *_, **__: True,
) -> Iterator[list[Any]]:
    """Let calls fail from the ``nth`` one on, ``times`` times or always.

    Args:
        names: the functions, such as ``os.fsync``.
        code: number of the OSError.
        error: what is raised instead of an OSError.
        nth: number of the first call that fails, from 1.
        times: how many calls fail; None for all.
        at: called with the arguments of each call; one that it does not say yes to is not counted.

    Yields:
        The first argument of each call that was counted.
    """
    calls: list[Any] = []

    def act(real: Act, *arguments: Any, **options: Any) -> Any:
        if at(*arguments, **options):
            calls.append(arguments[0])
            if nth <= len(calls) < nth + (len(calls) if times is None else times):
                raise error or OSError(code, os.strerror(code), str(arguments[0]))
        return real(*arguments, **options)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(name, act))
        yield calls


@contextmanager
def killed(name: str, nth: int = 1) -> Iterator[None]:
    """Kill this process, a fork of the test, at the ``nth`` call of a function."""
    left = [nth]

    def act(real: Act, *arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    with replaced(name, act):
        yield


@contextmanager
def ended_before_the_pointer(step: Path) -> Iterator[None]:
    """End the process after the commit of a step, before the record of its run is replaced."""

    def is_pointer(_: object, target: object) -> bool:
        return path_of(target).name == "manager.json" and (step / "metadata.json").exists()

    with pytest.raises(SystemExit), failing("os.replace", error=SystemExit(), at=is_pointer):
        yield


@contextmanager
def commits_waiting(gate: threading.Event) -> Iterator[None]:
    """Saves wait at a gate before their commit, on a disk and in a store."""

    def act(real: Act, source: object, target: object) -> None:
        assert path_of(target).name != "metadata.json" or gate.wait(60)
        real(source, target)

    def request(name: str, key: str, go: Act) -> Any:
        assert not (name.startswith("put") and "/.dckpt/commits/" in key) or gate.wait(60)
        return go()

    with replaced("os.replace", act), store_requests(request):
        yield


@contextmanager
def before_first(name: str, work: Callable[..., object]) -> Iterator[list[Any]]:
    """Do something once, before the first call of a function, with its arguments."""
    done: list[Any] = []

    def act(real: Act, *arguments: Any, **options: Any) -> Any:
        if not done:
            done.append(arguments)
            work(*arguments)
        return real(*arguments, **options)

    with replaced(name, act):
        yield done


@contextmanager
def strange_flock(code: int | None) -> Iterator[None]:
    """A file system without ``flock``; for None one that locks for writers only, as NFS does.

    It has a device number of its own, for whoever asks for that of an open folder, because it is
    remembered which devices have no locks.
    """
    device = next(_devices)

    def act(real: Act, file: int, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if code is not None or (operation & fcntl.LOCK_EX and mode == os.O_RDONLY):
            number = errno.EBADF if code is None else code
            raise OSError(number, os.strerror(number))
        real(file, operation)

    def stat(real: Act, *arguments: Any, **options: Any) -> os.stat_result:
        kind, (values, more) = real(*arguments, **options).__reduce__()
        found: os.stat_result = kind((*values[:2], device, *values[3:]), more)
        return found

    with replaced("fcntl.flock", act), replaced("os.fstat", stat):
        yield


@contextmanager
def without_links(*, kernel_copies: bool) -> Iterator[list[int]]:
    """A file system without links; yields the bytes of each copy of the kernel."""
    copied: list[int] = []

    def copy(real: Act, *arguments: Any) -> int:
        if not kernel_copies:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        copied.append(real(*arguments))
        return copied[-1]

    with failing("os.link", code=errno.EXDEV), replaced("os.copy_file_range", copy):
        yield copied


@contextmanager
def full_disk(folder: Path = Path("/")) -> Iterator[None]:
    """A file system with sixteen bytes left, at a folder and below it."""

    def act(real: Act, path: Any) -> Any:
        if not Path(path).is_relative_to(folder):
            return real(path)
        return SimpleNamespace(f_blocks=real(path).f_blocks, f_bavail=1, f_frsize=16)

    with replaced("os.statvfs", act):
        yield


@contextmanager
def without_waiting() -> Iterator[None]:
    """Let nobody sleep, before another try or while a dead claim is watched."""
    with replaced("time.sleep", lambda *_: None):
        yield


@contextmanager
def store_requests(act: Callable[[str, str, Act], Any]) -> Iterator[None]:
    """Call ``act(name, key, go)`` for each request to an object store; ``go()`` carries it out.

    The names are get, get_range, put, put_if_absent, head, delete, list and list_folder; the
    key is that of the object, the prefix of a list, or the text of a list of keys.
    """

    def requesting(function: str, real: Act, client: Any, *arguments: Any, **options: Any) -> Any:
        key = arguments[0] if arguments else options.get("prefix")
        name = {"list_with_delimiter": "list_folder"}.get(function, function)
        if "range" in options.get("options", {}):
            name = "get_range"
        elif options.get("mode") == "create":
            name = "put_if_absent"
        return act(name, str(key), partial(real, client, *arguments, **options))

    import obstore

    with pytest.MonkeyPatch.context() as patch:
        for function in REQUESTS:
            real = getattr(obstore, function)
            patch.setattr(obstore, function, partial(requesting, function, real))
        yield


@contextmanager
def store_down(
    nth: int = 1,
    times: int | None = None,
    *,
    at: Callable[[str, str], object] = lambda name, key: (
        name.startswith("put") and not key.endswith("manager.json")
    ),
    carries_out: bool = False,
    error: type[OSError] = OSError,
) -> Iterator[list[str]]:
    """A store that does not answer from the ``nth`` request on, ``times`` times or always.

    Args:
        nth: number of the first request that fails, from 1.
        times: how many fail; None for all.
        at: which requests are counted, by name and key; by default those that put, but for records
            of a run.
        carries_out: whether only the answers are lost.
        error: what is raised.

    Yields:
        The keys of those that were counted.
    """
    keys: list[str] = []

    def act(name: str, key: str, go: Act) -> Any:
        if at(name, key):
            keys.append(key)
            if nth <= len(keys) < nth + (len(keys) if times is None else times):
                if carries_out:
                    go()
                raise error(5, "the server is on fire", key)
        return go()

    with store_requests(act):
        yield keys


@contextmanager
def counted_requests() -> Iterator[Counter[str]]:
    """How often each kind of request is made in the body."""
    counts: Counter[str] = Counter()

    def act(name: str, _: str, go: Act) -> Any:
        counts[name] += 1
        return go()

    with store_requests(act):
        yield counts
