"""How far a save or load is: phases, bytes and seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """A report to the caller.

    Attributes:
        phase: "planning", "copying" (of an async save), "writing", "reading", "verifying" or
            "committing".
        bytes_done: Bytes of this rank that are done in this phase.
        bytes_total: Bytes of this rank in this phase; 0 for a phase that moves no data.
        rank: Whose report it is.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    rank: int


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Counts bytes from any thread, reports them, and logs what each phase took."""

    def __init__(self, operation: str, rank: int, callback: ProgressCallback | None) -> None:
        self._operation = operation
        self._rank = rank
        self._callback = callback
        self._lock = threading.Lock()
        self._phase, self._done, self._total = "", 0, 0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body as a phase."""
        start = time.perf_counter()
        self._phase, self._done, self._total = name, 0, 0
        self._report()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def expect(self, num_bytes: int) -> None:
        """Say how many bytes this phase will move."""
        with self._lock:
            self._total = num_bytes
        self._report()

    def add(self, num_bytes: int) -> None:
        """Say that so many more bytes have been moved."""
        with self._lock:
            self._done += num_bytes
        self._report()

    def log(self) -> None:
        """Log the time of every phase."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self._seconds.items())
        logger.info("%s on rank %d: %s", self._operation, self._rank, phases)

    def _report(self) -> None:
        if self._callback is None:
            return
        try:
            self._callback(Progress(self._phase, self._done, self._total, self._rank))
        except Exception:
            # Raised here, on one rank, it would leave the others waiting for that rank.
            logger.exception("the progress callback failed, and is not called any more")
            self._callback = None
