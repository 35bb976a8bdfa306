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


def anonymous_bytes() -> int | None:
    """Anonymous memory of this process: file pages that are mapped do not count."""
    return _proc_number("status", "RssAnon:", 1024)


def read_bytes() -> int | None:
    """Bytes that this process ever got from read calls; what is read through a map is not in it."""
    return _proc_number("io", "rchar:", 1)


def _proc_number(name: str, field: str, unit: int) -> int | None:
    try:
        text = Path(f"/proc/self/{name}").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * unit
    return None


class PeakMemory:
    """``with peak_memory() as peak``: ``peak.extra_bytes`` is the most that was added inside."""

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self._peak = self._before or 0

    def sample(self) -> None:
        self._peak = max(self._peak, anonymous_bytes() or 0)

    @property
    def extra_bytes(self) -> int | None:
        return None if self._before is None else self._peak - self._before


@contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Sample the anonymous memory in a thread; memory that is free but kept goes back first."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    peak = PeakMemory()
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            peak.sample()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.sample()
        ended.set()
        thread.join()


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
