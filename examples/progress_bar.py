"""A progress bar for ``save`` and ``load``: what ``progress=`` is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

from dist_checkpointing.storage import Progress as Report


@contextmanager
def progress_bar(*, visible: bool) -> Iterator[Callable[[Report], None]]:
    """One line a phase that moves bytes, on the first rank; nothing on the others.

    What it yields is for ``progress=``.
    """
    columns = ("{task.description:>9}", BarColumn(30), DownloadColumn(), TransferSpeedColumn())
    # Without a terminal rich prints the lines once, at the end.
    bar = Progress(*columns, console=Console(width=100, highlight=False), disable=not visible)
    lines: dict[str, TaskID] = {}
    lock = threading.Lock()

    def show(report: Report) -> None:
        if report.bytes_total:
            with lock:  # reports come from any thread
                if report.phase not in lines:
                    lines[report.phase] = bar.add_task(report.phase)
            line = lines[report.phase]
            bar.update(line, completed=report.bytes_done, total=report.bytes_total)

    with bar:
        yield show
