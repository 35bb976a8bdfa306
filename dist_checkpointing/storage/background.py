"""Threads that finish what they began, also when the interpreter is about to end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, thread
from typing import Final, TypeVar

from dist_checkpointing.errors import CheckpointingException, Finding

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_PATIENCE_SECONDS: Final = 300.0
"""How long the end of the interpreter waits for what is still running."""


class Ownership:
    """That something belongs to this process: what is under way here ends in no forked one.

    Args:
        what: it is, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it belongs to."""
        return self._process == os.getpid()

    def require(self) -> None:
        """Refuse to go on in a forked process, which would wait for ever.

        Raises:
            CheckpointingException: there.
        """
        if self.is_here:
            return
        finding = Finding(
            "its threads run in the process from which this one was forked",
            expected=f"process {self._process}",
            found=f"process {os.getpid()}",
            remedy="Use it there, and make another one here.",
        )
        raise CheckpointingException(f"{self._what} belongs to another process", [finding])


_running: set[threading.Thread] = set()


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """``work()`` in a thread of its own.

    The thread is a daemon, so that one that hangs cannot keep the interpreter alive for ever; but
    the interpreter waits ``EXIT_PATIENCE_SECONDS`` for it before it ends. Where no thread is to be
    had, the work is done before this returns: other ranks count on it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the future is how it gets out
            future.set_exception(error)

    worker = threading.Thread(target=run, name=name, daemon=True)
    try:
        worker.start()
    except RuntimeError as error:
        logger.warning("%s is done in the foreground: %s", name, error)
        run()
        return future
    # Until it is gone: a thread that frees tensors while the interpreter ends aborts the process.
    _running.difference_update([other for other in list(_running) if not other.is_alive()])
    _running.add(worker)
    return future


def _wait_for_running() -> None:
    deadline = time.monotonic() + EXIT_PATIENCE_SECONDS
    for worker in list(_running):
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            logger.error("%s was still running when the interpreter ended", worker.name)


# Thread pools take no more work once the interpreter ends, and backends write with pools: this must
# be called before their own hook. There is no public way; hooks run last registered first.
assert thread is not None
threading._register_atexit(_wait_for_running)  # type: ignore[attr-defined]  # noqa: SLF001
