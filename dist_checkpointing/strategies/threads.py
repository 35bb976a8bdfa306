"""The one way in which backends spread their I/O over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_BATCHES_PER_THREAD = 8


def in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int) -> list[R]:
    """``work`` done for all tasks, a few at a time; the first error ends it.

    Tasks go to the threads in batches: handing over one costs as much as writing a small file.
    """
    size = max(1, len(tasks) // (threads * _BATCHES_PER_THREAD))
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    with ThreadPoolExecutor(threads, thread_name_prefix="chunk-io") as pool:
        futures = [pool.submit(lambda b: [work(task) for task in b], batch) for batch in batches]
        try:
            return [result for future in futures for result in future.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
