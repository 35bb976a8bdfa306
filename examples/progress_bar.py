"""A progress bar for ``save`` and ``load``: what ``progress=`` is for."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from dist_checkpointing.storage.progress import Progress as Report


class ProgressBar:
    """One line a phase that moves bytes, on the first rank; nothing on the others.

    Use it as a context manager and pass the object itself as ``progress=``.
    """

    def __init__(self, *, visible: bool) -> None:
        # Without a terminal rich prints the lines once, at the end.
        self._bar = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(30),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=Console(width=100, highlight=False),
            disable=not visible,
        )
        self._lines: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __call__(self, report: Report) -> None:
        if not report.bytes_total:
            return
        with self._lock:  # reports come from any thread
            if report.phase not in self._lines:
                self._lines[report.phase] = self._bar.add_task(report.phase)
            line = self._lines[report.phase]
        self._bar.update(line, completed=report.bytes_done, total=report.bytes_total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
