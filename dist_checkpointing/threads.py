"""Thread pools, background threads, forked processes, and pauses of the garbage collector."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, thread
from contextlib import contextmanager
from threading import Thread
from typing import Final, TypeVar

from dist_checkpointing.errors import CheckpointingException, Finding

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
EXIT_PATIENCE_SECONDS: Final = 300.0
"""How long the end of the interpreter waits for what is still running."""


class Ownership:
    """That something, named in messages, belongs to this process: what is under way here ends in no
    forked one.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that it belongs to."""
        return self._process == os.getpid()

    def require(self) -> None:
        """Refuse to go on in a forked process, which would wait for ever."""
        if not self.is_here:
            finding = Finding(
                "its threads run in the process from which this one was forked",
                expected=f"process {self._process}",
                found=f"process {os.getpid()}",
                remedy="Use it there, and make another one here.",
            )
            raise CheckpointingException(f"{self._what} belongs to another process", [finding])


_running: set[Thread] = set()


def fill(future: Future[T], work: Callable[[], T]) -> None:
    """Give a future what ``work()`` returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - the future is how it gets out
        future.set_exception(error)


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """``work()`` in a thread of its own.

    The thread is a daemon, so that one that hangs cannot keep the interpreter alive for ever; but
    the interpreter waits ``EXIT_PATIENCE_SECONDS`` for it before it ends. Where no thread is to be
    had, the work is done before this returns: other ranks count on it.
    """
    future: Future[T] = Future()
    worker = Thread(target=fill, args=(future, work), name=name, daemon=True)
    try:
        worker.start()
    except RuntimeError as error:
        logger.warning("%s is done in the foreground: %s", name, error)
        fill(future, work)
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


_lock = threading.Lock()
_holders = 0


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running in the body, on any thread.

    A plan of thousands of items would start full collections, which find nothing and, in a process
    that has a model, cost more than the plan. Reference counting goes on, so memory is freed as
    ever. Only for computing of our own, which takes well under a second, and never around a wait
    for other ranks: the training's garbage would pile up meanwhile.
    """
    global _holders  # noqa: PLW0603 - the collector is one a process, and ranks may be threads
    with _lock:
        own = _holders > 0 or gc.isenabled()
        if own:
            _holders += 1
            gc.disable()
    try:
        yield
    finally:
        if own:
            with _lock:
                _holders = max(0, _holders - 1)  # 0 already in a process forked in the body
                if _holders == 0:
                    gc.enable()


def _resume_in_child() -> None:
    """The threads that hold the collector back are not in a forked process."""
    global _lock, _holders  # noqa: PLW0603 - as above
    _lock = threading.Lock()
    if _holders:
        _holders = 0
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)


R = TypeVar("R")


def in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int) -> list[R]:
    """``work`` done for all tasks, a few at a time; the first error ends it.

    This thread works too, and each takes the next task when it is done with one: an executor
    takes longer to hand over a task than a small file takes to write.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    left = deque(range(len(tasks)))

    def run() -> None:
        while left and not errors:
            try:
                number = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = work(tasks[number])
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                errors[number] = error

    others = [Thread(target=run, name="chunk-io") for _ in range(min(threads, len(tasks)) - 1)]
    started: list[Thread] = []
    try:
        for thread in others:
            thread.start()
            started.append(thread)
        run()
    finally:
        left.clear()
        for thread in started:
            thread.join()
    if errors:
        # Tasks begin in order, so this is the same one each time.
        raise errors[min(errors)]
    return [results[number] for number in range(len(tasks))]
