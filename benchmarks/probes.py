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

MIB = 2**20
_INTERVAL_SECONDS = 0.002
_PACKAGES = (
    "torch",
    "tensorstore",
    "zarr",
    "numpy",
    "safetensors",
    "xxhash",
    "megatron-core",
    "torch_checkpointing",
)


class Watch:
    """What a call costs besides time; see ``watched``.

    Attributes:
        peak_mib: The most memory that was added. Pages of mapped files do not count.
        read_bytes: What read calls returned, to any thread; mapped reads do not count.
        written_bytes: What write calls took, of any thread.
    """

    def __init__(self, *, helpers: bool) -> None:
        self.peak_mib = 0.0
        self.read_bytes = 0
        self._helpers = helpers
        self._own_bytes = 0
        self._read_before = self._sum("self/io", "rchar:")
        self.written_bytes = -self._sum("self/io", "wchar:")
        self._before = self._memory()

    def sample(self) -> None:
        self.peak_mib = max(self.peak_mib, self._memory() - self._before)

    def kept_mib(self) -> float:
        """What of the memory is still there."""
        _give_back_memory()
        return self._memory() - self._before

    def end(self) -> None:
        self.sample()
        self.written_bytes += self._sum("self/io", "wchar:")
        own = self._own_bytes
        self.read_bytes = max(0, self._sum("self/io", "rchar:") - self._read_before - own)

    def _memory(self) -> float:
        if not self._helpers:
            return self._sum("self/status", "RssAnon:") / 1024
        # Not what a forked helper still shares with its parent.
        helpers = sum(self._sum(f"{p}/smaps_rollup", "Private_Dirty:") for p in _descendants())
        return (self._sum("self/status", "RssAnon:", "RssShmem:") + helpers) / 1024

    def _sum(self, name: str, *fields: str) -> int:
        """Sum of the lines in a file below /proc that begin so; 0 where there is none."""
        try:
            text = Path(f"/proc/{name}").read_text()
        except OSError:
            return 0
        self._own_bytes += len(text)
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(fields))


@contextmanager
def watched(*, helpers: bool = False) -> Iterator[Watch]:
    """Sample the memory in a thread; memory that is free but still held is given back first.

    Args:
        helpers: Count shared memory and the processes that were started, too.
    """
    _give_back_memory()
    watch, ended = Watch(helpers=helpers), threading.Event()

    def repeat() -> None:
        while not ended.wait(_INTERVAL_SECONDS):
            watch.sample()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        watch.end()


def resident_mib() -> float:
    """Anonymous memory of this process, after what is free was given back."""
    _give_back_memory()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def available_mib() -> float:
    """Memory that the machine can still give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _give_back_memory() -> None:
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


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


def environment() -> dict[str, Any]:
    """The machine and the versions, for the JSON."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "threads_of_torch": torch.get_num_threads(),
        "packages": versions,
    }
