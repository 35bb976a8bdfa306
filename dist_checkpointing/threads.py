"""Thread pools, background threads that finish before the interpreter ends, forked processes, and
pauses of the garbage collector.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

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


T = TypeVar("T")


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
    try:
        for thread in others:
            thread.start()
        run()
    finally:
        left.clear()
        for thread in others:
            if thread.ident is not None:
                thread.join()
    if errors:
        # Tasks begin in order, so this is the same one each time.
        raise errors[min(errors)]
    return [results[number] for number in range(len(tasks))]
