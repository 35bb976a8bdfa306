"""What the operating system says about this process and about files."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
from collections.abc import Iterator
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
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    watch = Watch()
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            watch.sample()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        watch.end()


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
