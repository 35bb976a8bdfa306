"""SaveHandle: what the caller holds of a save that goes on behind the training."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.storage.background import Ownership
from dist_checkpointing.storage.progress import Progress

logger = logging.getLogger(__name__)


class _Captured(threading.Event):
    """An event that nobody waits for where it cannot come."""

    def __init__(self, owner: Ownership) -> None:
        super().__init__()
        self._owner = owner

    def wait(self, timeout: float | None = None) -> bool:
        self._owner.require()
        return super().wait(timeout)


class PendingSave:
    """What a handle shows of a save, and its saver knows of it. One object a rank.

    Attributes:
        folder: where the checkpoint will be.
        step: what the caller named it.
        captured: see ``SaveHandle``.
        progress: the last report.
        outcome: of what this rank does behind the training.
        owner: the process in which it goes on.
    """

    def __init__(self, folder: Path, step: int | None, comm: Comm) -> None:
        self.folder = folder
        self.step = step
        self.owner = Ownership("the asynchronous save")
        self.captured: threading.Event = _Captured(self.owner)
        self.progress = Progress("planning", 0, 0, 0)
        self.outcome: Future[None] = Future()
        self._comm = comm
        self._complete: Callable[[Comm], None] | None = None
        self._forgotten: weakref.finalize[..., PendingSave] | None = None
        self._is_told = False
        self._settling = threading.Lock()

    def await_completion(self, complete: Callable[[Comm], None]) -> None:
        """Let ``settle`` call ``complete``, on all ranks, once the outcome is there."""
        self._complete = complete
        self._forgotten = weakref.finalize(self, _warn_of_forgotten, self.folder)

    @property
    def needs_completion(self) -> bool:
        """Whether ``settle`` is still to be called, on all ranks."""
        return self._complete is not None

    def is_through_in(self, timeout_seconds: float | None) -> bool:
        """Wait, and tell whether this rank is through by then. Not collective."""
        self.owner.require()
        return bool(wait_for([self.outcome], timeout_seconds).done)

    def settle(self, timeout_seconds: float | None) -> None:
        """``SaveHandle.result``, which see."""
        self.owner.require()
        failure = self.outcome.exception(timeout_seconds)
        with self._settling:
            if self._complete is not None:
                complete, self._complete = self._complete, None
                if self._forgotten is not None:
                    self._forgotten.detach()
                try:
                    complete(self._comm)
                except BaseException as error:
                    self.outcome = Future()
                    self.outcome.set_exception(error)
                    self._is_told = True
                    raise
        if failure is not None:
            self._is_told = True
            raise failure

    def untold_error(self) -> BaseException | None:
        """An error that nobody has seen yet; waits for the outcome."""
        self.owner.require()
        self.outcome.exception()  # only to wait
        with self._settling:  # another thread may be at it
            error = self.outcome.exception()
        return None if self._is_told else error


class SaveHandle:
    """A save that goes on behind the training. Any thread may ask, but no forked process.

    Attributes:
        checkpoint_dir: where the checkpoint will be.
        step: what the caller named it.
        captured: set once the state has been copied (or could not be, which ``result`` raises):
            ``captured.wait()`` before anything may change it.
    """

    def __init__(self, pending: PendingSave) -> None:
        self.checkpoint_dir = pending.folder
        self.step = pending.step
        self.captured = pending.captured
        self._pending = pending

    @property
    def progress(self) -> Progress:
        """How far it is, on this rank."""
        return self._pending.progress

    def done(self) -> bool:
        """Whether ``result`` would return (or raise) at once; not collective.

        With ``finalize="caller"``: whether this rank has written its part, so that ``result`` only
        has to wait for the other ranks and the commit.
        """
        self._pending.owner.require()
        return self._pending.outcome.done()

    def result(self, timeout_seconds: float | None = None) -> None:
        """Wait for the checkpoint to be committed. Collective with ``finalize="caller"`` only.

        Raises:
            TimeoutError: if this rank is not through in time; the save goes on, and whoever is not
                in time asks again.
            CheckpointingException: if it failed on any rank, the same on all of them, with the
                tracebacks (nothing was committed then); or in a forked process.
        """
        self._pending.settle(timeout_seconds)

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next ``optimizer.step()`` wait until the state has been captured."""

        def wait(*_: object) -> None:
            if self._pending.owner.is_here:  # a forked process has a copy of the state
                self.captured.wait()
            hook.remove()

        hook = optimizer.register_step_pre_hook(wait)


def _warn_of_forgotten(folder: Path) -> None:
    logger.warning("%s was written and never committed: nobody asked for its result", folder)
