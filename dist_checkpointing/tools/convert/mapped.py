"""Files that a library maps into memory, mapped again from time to time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from dist_checkpointing.errors import CorruptCheckpointError, Finding

Content = TypeVar("Content")


class MappedFiles(Generic[Content]):
    """What a library makes of mapped files, made again after so many bytes were read of it.

    Pages that were read count as memory of this process until their file is unmapped. That happens
    when the last reader of the old content has ended.

    Args:
        paths: The files.
        open_files: Maps them.

    Attributes:
        most_bytes: Bytes to read before the files are mapped again.
    """

    def __init__(self, paths: Sequence[Path], open_files: Callable[[], Content]) -> None:
        self.most_bytes: float = 32 * 2**20
        self._paths = tuple(paths)
        self._states = [_state(path) for path in self._paths]
        self._open_files = open_files
        self._lock = threading.Lock()
        self._content: Content | None = None
        self._read_bytes = 0

    def get(self, num_bytes: int) -> Content:
        """The content from which to read the next ``num_bytes``. From any thread.

        Raises:
            CorruptCheckpointError: If the files were changed since the first time.
        """
        with self._lock:
            if self._content is None or self._read_bytes >= self.most_bytes:
                self._content = None  # not held while it is made again
                self.check_unchanged()
                self._content = self._open_files()
                self._read_bytes = 0
            self._read_bytes += num_bytes
            return self._content

    def check_unchanged(self) -> None:
        """Find out whether a file was changed or replaced.

        Raises:
            CorruptCheckpointError: If it was.
        """
        findings = [
            Finding("changed or replaced", path=str(path), remedy="Start again.")
            for path, state in zip(self._paths, self._states, strict=True)
            if _state(path) != state
        ]
        if findings:
            raise CorruptCheckpointError("a file changed while it was converted", findings)

    def close(self) -> None:
        """Let go of the content."""
        self._content = None


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
