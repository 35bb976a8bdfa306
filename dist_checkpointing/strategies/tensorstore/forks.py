"""TensorStore's threads do not survive a fork, and it aborts the process that then needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointingException, Finding

_THREADS: Final = Path("/proc/self/task")
_THREAD_NAME: Final = "ts_pool_worker"

_is_in_use = False
_parent: int | None = None


def require_threads() -> None:
    """Note that TensorStore is used in this process, or refuse it.

    Raises:
        CheckpointingException: if a process that used it was forked into this one.
    """
    global _is_in_use  # noqa: PLW0603 - its threads are those of the process
    if _parent is not None:
        finding = Finding(
            "it was used in the process from which this one was forked",
            expected=f"process {_parent}",
            found=f"process {os.getpid()}",
            remedy="Start this process with the method 'spawn' or 'forkserver' "
            "(multiprocessing_context='spawn' of a DataLoader), or fork it before the first save "
            "or load.",
        )
        raise CheckpointingException("TensorStore cannot be used in a forked process", [finding])
    _is_in_use = True


def _look_before() -> None:
    """Find out whether somebody else has used it."""
    global _is_in_use  # noqa: PLW0603 - as above
    if _is_in_use or "tensorstore" not in sys.modules or not _THREADS.is_dir():
        return
    for thread in _THREADS.iterdir():
        try:
            name = (thread / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        if name == _THREAD_NAME:
            _is_in_use = True
            return


def _note_in_child() -> None:
    global _parent  # noqa: PLW0603 - as above
    if _is_in_use and _parent is None:
        _parent = os.getppid()


os.register_at_fork(before=_look_before, after_in_child=_note_in_child)
