"""Work that waits for a disk or a store, a few tasks at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

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
