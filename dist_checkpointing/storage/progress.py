"""How far a save or load is: phases, bytes and seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from dist_checkpointing.byte_sizes import bytes_text

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
_BAR_WIDTH: Final = 20


def _bar(operation: str) -> ProgressCallback:
    """One line for each phase that moves bytes; without a terminal, when the phase is done."""
    lock, phase, began, shown_at, is_done = threading.Lock(), "", 0.0, 0.0, False

    def show(report: Progress) -> None:
        nonlocal phase, began, shown_at, is_done
        done, total, now = report.bytes_done, report.bytes_total, time.monotonic()
        with lock:
            if report.phase != phase:
                phase, began, shown_at, is_done = report.phase, now, 0.0, False
            is_due = sys.stderr.isatty() and now - shown_at > _BAR_SECONDS
            if is_done or not total or (done < total and not is_due):
                return
            shown_at, is_done = now, done >= total
            bar = ("━" * max(1, _BAR_WIDTH * min(done, total) // total)).ljust(_BAR_WIDTH)
            speed = bytes_text(int(done / max(now - began, 1e-9)))
            line = (
                f"{operation}: {phase} {bar} {bytes_text(done)} of {bytes_text(total)}, {speed}/s"
            )
            begin, end = "\r" * sys.stderr.isatty(), "\n" * is_done
            sys.stderr.write(f"{begin}{line:79}{end}")
            sys.stderr.flush()

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
        self._total = num_bytes
        self._report()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
        self._report()

    def log(self) -> None:
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
