"""SaveHandle: what the caller holds of a save that goes on behind the training."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.storage.progress import Progress
from dist_checkpointing.threads import Ownership, run_in_background

logger: logging.Logger = logging.getLogger(__name__)


class _Captured(threading.Event):
    """An event that nobody waits for where it cannot come."""

    def __init__(self, owner: Ownership) -> None:
        super().__init__()
        self._owner = owner

    def wait(self, timeout: float | None = None) -> bool:
        self._owner.require()
        return super().wait(timeout)


class SaveHandle:
    """A save that goes on behind the training. Any thread may ask, but no forked process.

    Its saver makes it and calls ``report``, ``run`` and ``finish``. One object a rank. ``await
    handle`` is ``handle.result()`` without blocking the event loop (with ``finalize="caller"``, it
    blocks for the commit).

    Attributes:
        checkpoint_dir: Folder of the checkpoint.
        step: Step that the caller named.
        captured: Set once the state has been copied (or could not be, which ``result`` raises):
            ``captured.wait()`` before anything may change it.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, async_save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> handle = async_save(state, "ckpt", capture="background")
        >>> handle.captured.wait()  # before the state changes
        True
        >>> handle.result()
        >>> handle.done()
        True
    """

    def __init__(self, checkpoint_dir: Location, step: int | None, comm: Comm) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.step = step
        self._owner = Ownership("the asynchronous save")
        self.captured: threading.Event = _Captured(self._owner)
        self._progress = Progress("planning", 0, 0, 0)
        self._outcome: Future[None] = Future()
        self._comm = comm
        self._finish: Callable[[Comm], None] | None = None
        self._forgotten: weakref.finalize[..., SaveHandle] | None = None
        self._is_raised = False
        self._finishing = threading.Lock()

    @property
    def progress(self) -> Progress:
        """How far it is, on this rank."""
        return self._progress

    def done(self) -> bool:
        """Whether ``result`` would return (or raise) at once; not collective.

        With ``finalize="caller"``: whether this rank has written its part, so that ``result`` only
        has to wait for the other ranks and the commit.
        """
        self._owner.require()
        return self._outcome.done()

    def result(self, timeout_seconds: float | None = None) -> None:
        """Wait for the checkpoint to be committed. Collective with ``finalize="caller"`` only.

        Raises:
            TimeoutError: if this rank is not through in time; the save goes on, and a later call
                may succeed.
            CheckpointingException: if it failed on any rank, the same on all of them, with the
                tracebacks (nothing was committed then); or in a forked process.
        """
        self._owner.require()
        failure = self._outcome.exception(timeout_seconds)
        with self._finishing:
            if self._finish is not None:
                finish, self._finish = self._finish, None
                if self._forgotten is not None:
                    self._forgotten.detach()
                try:
                    finish(self._comm)
                except BaseException as error:
                    self._outcome = Future()
                    self._outcome.set_exception(error)
                    self._is_raised = True
                    raise
        if failure is not None:
            self._is_raised = True
            raise failure

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Like ``result``, but return the error, or None, instead of raising it.

        Raises:
            TimeoutError: see ``result``.
        """
        if not self.wait(timeout_seconds):
            raise TimeoutError(f"the save into {self.checkpoint_dir} goes on")
        try:
            self.result()
        except Exception as error:  # noqa: BLE001 - it is the answer
            return error
        return None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ``done()`` is True, however the save ends; return whether it is by then.

        Not collective.
        """
        self._owner.require()
        return bool(wait_for([self._outcome], timeout_seconds).done)

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call ``callback(handle)`` when ``done()`` becomes True, or now if it is.

        It is called in the thread that saves; what it raises is logged.

        Example:
            >>> handle = async_save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, "a")
            >>> ended = []
            >>> handle.add_done_callback(lambda handle: ended.append(handle.exception()))
            >>> handle.result()
            >>> ended
            [None]
        """
        self._owner.require()
        self._outcome.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, None]:
        self._owner.require()
        with suppress(Exception):  # ``result`` raises it
            # Shielded, so that a task that is cancelled does not cancel the save.
            yield from asyncio.shield(asyncio.wrap_future(self._outcome)).__await__()
        self.result()

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next ``optimizer.step()`` wait until the state has been captured."""

        def wait(*_: object) -> None:
            if self._owner.is_here:  # a forked process has a copy of the state
                self.captured.wait()
            hook.remove()

        hook = optimizer.register_step_pre_hook(wait)

    def report(self, progress: Progress) -> None:
        """Remember how far the save is."""
        self._progress = progress

    def run(self, work: Callable[[], None], finish: Callable[[Comm], None] | None = None) -> None:
        """Let a thread do this rank's work.

        Args:
            work: what is done behind the training.
            finish: called by ``result`` or ``finish``, on all ranks, once the work is done.
        """
        if finish is not None:
            self._finish = finish
            self._forgotten = weakref.finalize(self, _warn_of_forgotten, self.checkpoint_dir)
        self._outcome = run_in_background(work, f"async-save-{self.checkpoint_dir.name}")

    def finish(self, comm: Comm) -> None:
        """Finish what nobody has finished, or raise what nobody has seen. Collective.

        Raises:
            CheckpointingException: what failed on any rank, on all of them, unless ``result`` has
                raised it on all.
        """
        if self._finish is not None:
            self.result()
            return
        with comm.agreed("the save before"):
            self._owner.require()
            self._outcome.exception()  # only to wait
            with self._finishing:  # another thread may be at it
                error = self._outcome.exception()
            if error is not None and not self._is_raised:
                raise error


def _warn_of_forgotten(folder: Location) -> None:
    logger.warning("%s was written and never committed: nobody asked for its result", folder)
