"""What the operating system says about this process and about files."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_INTERVAL_SECONDS = 0.002
_PACKAGES = ("torch", "tensorstore", "zarr", "numpy", "safetensors", "xxhash", "megatron-core")


class Watch:
    """What a call costs besides time; see ``watched``.

    Attributes:
        extra_bytes: the most anonymous memory that was added. Mapped file pages do not count.
        read_bytes: what read calls returned, to any thread; what is read through a map is not in
            it. Both are None where the system does not say.
    """

    def __init__(self) -> None:
        self.extra_bytes: int | None = None
        self.read_bytes: int | None = None
        self._own_bytes = 0
        self._read_before = self._number("io", "rchar:")
        self._memory_before = self._number("status", "RssAnon:")
        self.sample()

    def sample(self) -> None:
        now, before = self._number("status", "RssAnon:"), self._memory_before
        if now is not None and before is not None:
            self.extra_bytes = max(self.extra_bytes or 0, (now - before) * 1024)

    def end(self) -> None:
        self.sample()
        own, before = self._own_bytes, self._read_before
        now = self._number("io", "rchar:")
        if now is not None and before is not None:
            self.read_bytes = max(0, now - before - own)

    def _number(self, name: str, field: str) -> int | None:
        try:
            text = Path(f"/proc/self/{name}").read_text()
        except OSError:
            return None
        self._own_bytes += len(text)
        for line in text.splitlines():
            if line.startswith(field):
                return int(line.split()[1])
        return None


@contextmanager
def watched() -> Iterator[Watch]:
    """Sample the memory in a thread; what is free but still held is given back first."""
    _give_back_memory()
    watch = Watch()
    with _sampled(watch.sample):
        yield watch
    watch.end()


def _give_back_memory() -> None:
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _sampled(sample: Callable[[], None]) -> Iterator[None]:
    """Call ``sample`` every few milliseconds, in a thread, and once at the end."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            sample()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sample()


class TreeWatch:
    """Memory of this process and the processes it has started; see ``tree_watched``.

    Attributes:
        extra_bytes: the most that was added: anonymous and shared memory that this process has
            mapped, and what only the others have. None where the system does not say.
    """

    def __init__(self) -> None:
        self.extra_bytes: int | None = None
        self._before = self._now()

    def sample(self) -> None:
        now, before = self._now(), self._before
        if now is not None and before is not None:
            self.extra_bytes = max(self.extra_bytes or 0, (now - before) * 1024)

    def _now(self) -> int | None:
        own = _sum_of("self/status", ("RssAnon:", "RssShmem:"))
        if own is None:
            return None
        # Not what a fork still shares with its parent.
        others = [_sum_of(f"{pid}/smaps_rollup", ("Private_Dirty:",)) for pid in _descendants()]
        return own + sum(number for number in others if number is not None)


@contextmanager
def tree_watched() -> Iterator[TreeWatch]:
    """Like ``watched``, with the processes that were started for the call."""
    _give_back_memory()
    watch = TreeWatch()
    with _sampled(watch.sample):
        yield watch


def _descendants(pid: str = "self") -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue  # that thread has just ended
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _sum_of(name: str, fields: tuple[str, ...]) -> int | None:
    """Of lines in a file below /proc."""
    try:
        lines = Path(f"/proc/{name}").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith(fields))


def folder_size(folder: Path) -> tuple[int, int]:
    """Number of files below, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def environment() -> dict[str, Any]:
    """The machine and the versions, for the JSON."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "threads_of_torch": torch.get_num_threads(),
        "packages": versions,
    }
