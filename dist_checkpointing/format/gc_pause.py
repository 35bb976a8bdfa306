"""Python's garbage collector, held back while many small objects are made that all live on."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
