"""How far a save or load is: phases, bytes and seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """A report to the caller.

    Attributes:
        phase: "planning", "copying", "writing", "reading", "verifying" or "committing".
        bytes_done: Bytes of this rank that are done in this phase.
        bytes_total: Bytes of this rank in this phase; 0 for a phase that moves no data.
        rank: Whose report it is.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    rank: int


ProgressCallback = Callable[[Progress], None]
ProgressOption = ProgressCallback | Literal["bar"]
"""A function that gets each report, or a bar of rank 0 on the standard error."""
_BAR_SECONDS: Final = 0.1


def _bar(operation: str) -> ProgressCallback:
    """One line for each phase that moves bytes; without a terminal, when the phase is done."""
    # Not at the top: few callers want a bar.
    from rich import progress as rich  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True, force_jupyter=False)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(30),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
    )
    # Never started: an error in the middle would leave its thread and the hidden cursor behind.
    bar = rich.Progress(*columns, console=console, auto_refresh=False)
    lock, shown_at, phase = threading.Lock(), 0.0, ""
    bar.add_task("")
    (task,) = bar.tasks

    def show(report: Progress) -> None:
        nonlocal shown_at, phase
        with lock:
            if report.phase != phase:
                phase = report.phase
                bar.reset(task.id, description=f"{operation}: {phase}")
            if task.finished or not report.bytes_total:
                return
            bar.update(task.id, completed=report.bytes_done, total=report.bytes_total)
            is_done = report.bytes_done >= report.bytes_total
            is_due = console.is_terminal and time.monotonic() - shown_at > _BAR_SECONDS
            if is_done or is_due:
                shown_at = time.monotonic()
                with console.capture() as line:
                    console.print(bar.make_tasks_table([task]))
                begin, end = "\r" * console.is_terminal, "\n" * is_done
                console.file.write(f"{begin}{line.get().rstrip()}{end}")
                console.file.flush()

    return show


class Meter:
    """Counts bytes from any thread, reports them, and logs what each phase took.

    Raises:
        TypeError: if ``progress`` is neither a function nor ``"bar"``.
    """

    def __init__(self, operation: str, rank: int, progress: ProgressOption | None) -> None:
        if progress == "bar":
            progress = _bar(operation) if rank == 0 else None
        elif progress is not None and not callable(progress):
            raise TypeError(
                f"progress must be 'bar' or a function that takes a Progress, not {progress!r}"
            )
        self._operation, self._rank, self._callback = operation, rank, progress
        self._lock = threading.Lock()
        self._phase, self._done, self._total = "", 0, 0
        self._seconds: dict[str, float] = {}

    @property
    def progress(self) -> Progress:
        """How far this rank is."""
        return Progress(self._phase, self._done, self._total, self._rank)

    @contextmanager
    def phase(self, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Run the body as a phase that moves so many bytes, unless ``expect`` names them later."""
        start = time.perf_counter()
        with self._lock:
            self._phase, self._done, self._total = name, 0, num_bytes
        self._report()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def expect(self, num_bytes: int) -> None:
        """Say how many bytes this phase will move."""
        self._total = num_bytes
        self._report()

    def add(self, num_bytes: int) -> None:
        """Say that so many more bytes have been moved."""
        with self._lock:
            self._done += num_bytes
        self._report()

    def log(self) -> None:
        """Log the time of every phase."""
        if logger.isEnabledFor(logging.INFO):
            phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self._seconds.items())
            logger.info("%s on rank %d: %s", self._operation, self._rank, phases)

    def _report(self) -> None:
        if self._callback is None:
            return
        try:
            self._callback(self.progress)
        except Exception:
            # Raised here, on one rank, it would leave the others waiting for that rank.
            logger.exception("the progress callback failed, and is not called any more")
            self._callback = None
