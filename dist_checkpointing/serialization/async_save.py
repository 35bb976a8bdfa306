"""``async_save``, AsyncSaver and SaveHandle: capture, then write and commit behind the training.

``save`` is cut after the plan. To capture and to write concerns this rank alone and may run in any
thread; to finish takes all ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait as wait_for
from contextlib import AbstractContextManager, contextmanager
from os import PathLike
from typing import Final, Unpack

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.serialization.save_steps import (
    AsyncSaveOptions,
    Capture,
    JobOptions,
    SaveJob,
    require_known,
)
from dist_checkpointing.storage.progress import Meter, Progress, ProgressOption
from dist_checkpointing.storage.staging import StagingBuffers
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection
from dist_checkpointing.threads import Ownership, run_in_background

logger: logging.Logger = logging.getLogger(__name__)
_KNOWN = AsyncSaveOptions.__optional_keys__ | {"sharded_strategy", "common_strategy"}


class _Captured(threading.Event):
    """An event that nobody waits for where it cannot come."""

    def __init__(self, owner: Ownership) -> None:
        super().__init__()
        self._owner = owner

    def wait(self, timeout: float | None = None) -> bool:
        self._owner.require()
        return super().wait(timeout)


class SaveHandle:
    """A save in the background. Any thread may ask, but no forked process.

    Its saver makes it and calls ``start`` and ``finish``. One object a rank.

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

    def __init__(self, checkpoint_dir: Location, step: int | None, meter: Meter) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.step = step
        self._owner = Ownership("the asynchronous save")
        self.captured: threading.Event = _Captured(self._owner)
        self._outcome: Future[None] = Future()
        self._meter = meter
        self._is_seen = False

    @property
    def progress(self) -> Progress:
        """How far it is, on this rank."""
        return self._meter.progress

    def done(self) -> bool:
        """Whether ``result`` would return (or raise) at once; not collective."""
        self._owner.require()
        return self._outcome.done()

    def result(self, timeout_seconds: float | None = None) -> None:
        """Wait for the checkpoint to be committed. Not collective.

        Raises:
            TimeoutError: if this rank is not through in time; the save continues, and a later call
                may succeed.
            CheckpointingException: if it failed on any rank, the same on all of them, with the
                tracebacks (nothing was committed then); or in a forked process.
        """
        self._owner.require()
        self._outcome.exception(timeout_seconds)  # only to wait
        self._is_seen = True
        self._outcome.result()

    def exception(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Like ``result``, but return the error, or None, instead of raising it.

        Raises:
            TimeoutError: see ``result``.
        """
        if not self.wait(timeout_seconds):
            raise TimeoutError(f"the save into {self.checkpoint_dir} is still running")
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

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next ``optimizer.step()`` wait until the state has been captured."""

        def wait(*_: object) -> None:
            if self._owner.is_here:  # a forked process has a copy of the state
                self.captured.wait()
            hook.remove()

        hook = optimizer.register_step_pre_hook(wait)

    def start(self, job: SaveJob, comm: Comm, retries: int) -> None:
        """Let a thread write and commit."""

        def work() -> None:
            if not self.captured.is_set():
                try:
                    job.capture_behind()
                finally:
                    self.captured.set()
            try:
                job.finish(comm, job.write_local, retries)
            except BaseException as error:
                # The tracebacks of all ranks are in its text.
                logger.error("the save into %s failed: %s", self.checkpoint_dir, error)  # noqa: TRY400
                raise

        self._outcome = run_in_background(work, f"async-save-{self.checkpoint_dir.name}")

    def finish(self, comm: Comm) -> None:
        """Wait for the save, and raise what nobody has seen. Collective.

        Raises:
            CheckpointingException: what failed on any rank, on all of them, unless ``result`` has
                raised it on all.
        """
        with comm.agreed("the save before"):
            self._owner.require()
            error = self._outcome.exception()
            if error is not None and not self._is_seen:
                raise error


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """What asynchronous saves of one training run share: buffers, plans, a channel of the ranks.

    One save is under way at a time: the next one waits for it. Two savers do not interfere. Threads
    of one process take turns with a saver, and must do so in the same order on all ranks; a forked
    process is refused.

    Args:
        comm: the ranks that save together; by default all of torch.distributed, or this process.
        retries: how often a save that failed is written again, from the same copies. One that
            failed because a rank is gone is not.
        buffers: memory for the copies.
        plan_cache: PlanCache of the run.

    Making one is collective: the thread that writes talks to the other ranks over a CPU group of
    its own, and commits without the training's help.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, AsyncSaver
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> with AsyncSaver(retries=1) as saver:
        ...     for step in (100, 200):
        ...         handle = saver.save(state, f"ckpt/{step}", step=step)
    """

    def __init__(
        self,
        *,
        comm: Comm | None = None,
        retries: int = 0,
        buffers: StagingBuffers | None = None,
        plan_cache: PlanCache | None = None,
    ) -> None:
        self._buffers = StagingBuffers() if buffers is None else buffers
        self._comm = chosen_comm(comm)
        self._background_comm = self._comm.duplicate()
        self._retries = retries
        self._plan_cache = PlanCache() if plan_cache is None else plan_cache
        self._last: SaveHandle | None = None
        self._is_closed = False
        self._owner = Ownership("the saver")
        self._lock = threading.RLock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one thread at a time in, of the process that made the saver."""
        self._owner.require()
        with self._lock:
            yield

    def save(
        self,
        sharded_state_dict: ShardedStateDict | ShardedStateful,
        checkpoint_dir: str | PathLike[str],
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        common_strategy: Selection[SaveCommonStrategy] = None,
        **options: Unpack[AsyncSaveOptions],
    ) -> SaveHandle:
        """See ``async_save``.

        Raises:
            ValueError: if the saver is closed; and see ``async_save``.
        """
        return self._save(
            SaveHooks(),
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy=sharded_strategy,
            common_strategy=common_strategy,
            **options,
        )

    def _save(
        self,
        hooks: SaveHooks,
        state: ShardedStateDict | ShardedStateful,
        checkpoint_dir: str | PathLike[str],
        /,
        *,
        step: int | None = None,
        capture: Capture = "copy",
        progress: ProgressOption | None = None,
        **options: Unpack[JobOptions],
    ) -> SaveHandle:
        """``save`` with hooks, for the rest of the library."""
        with self._turn():
            require_known("AsyncSaver.save", options, _KNOWN)
            comm = self._comm
            meter = Meter("asynchronous save", comm.rank, progress)
            if capture not in ("copy", "background"):
                raise ValueError(f"capture must be 'copy' or 'background', not {capture!r}")
            if self._is_closed:
                raise ValueError("the saver is closed")
            self.wait()
            options["plan_cache"] = self._plan_cache
            job = SaveJob(comm.rank, meter, hooks, options, step)
            job.plan(state, checkpoint_dir, comm)
            handle = SaveHandle(job.folder.path, step, meter)
            try:
                # What is made durable in the background need not be waited for here.
                job.claim(comm, durable=False)
                with comm.agreed("copying the state"):
                    job.prepare_copy(self._buffers, comm)
                    if capture == "copy":
                        job.capture()
                        handle.captured.set()
                    else:
                        job.watch_state()
                # It does not refer to the saver, which may be dropped while this goes on.
                handle.start(job, self._background_comm, self._retries)
            except BaseException as error:
                job.release_buffers()
                job.folder.give_up(error)
                raise
            self._last = handle
            return handle

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one. Collective.

        Args:
            timeout_seconds: the same on all ranks.

        Raises:
            CheckpointingException: what failed on any rank, on all of them, unless ``result`` has
                raised it on all.
            TimeoutError: on all ranks, if any of them is not through in time; the save continues.
        """
        with self._turn():
            last = self._last
            if last is None:
                return
            is_through = last.wait(timeout_seconds)
            if timeout_seconds is not None and not self._comm.all_same(0 if is_through else None):
                folder = last.checkpoint_dir
                raise TimeoutError(f"the save into {folder} still runs after {timeout_seconds:g} s")
            self._last = None
            last.finish(self._comm)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it, and not one forked from that."""
        return self._owner.is_here

    def close(self) -> None:
        """Wait, and give the channel of the ranks back. Collective."""
        with self._turn():
            try:
                self.wait()
            finally:
                self._close_channel()

    def close_alone(self, timeout_seconds: float) -> None:
        """Like ``close``, but without the other ranks: what failed is not raised, it was logged."""
        if self._last is None or self._last.wait(timeout_seconds):
            self._close_channel()

    def _close_channel(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._background_comm is not self._comm:
            self._background_comm.close()

    def use_comm(self, comm: Comm) -> None:
        """From now on the training's side uses ``comm``, which has the same ranks."""
        self._comm = comm

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # In an error of this rank alone the others will not come: what is under way ends by itself.
        if kind is None:
            self.close()


_KEPT_AS: Final = "async saver"
_EXIT_PATIENCE_SECONDS: Final = 1.0
_kept: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()
"""Savers to close at the end of the process."""


def async_save(
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[SaveShardedStrategy] = None,
    common_strategy: Selection[SaveCommonStrategy] = None,
    *,
    saver: AsyncSaver | None = None,
    comm: Comm | None = None,
    **options: Unpack[AsyncSaveOptions],
) -> SaveHandle:
    """Save like ``save``, but write behind the training. Collective.

    Args:
        sharded_state_dict: see ``save``.
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``save``. A strategy of a third party runs in the thread as a whole,
            and must not use the process groups of the training there.
        common_strategy: see ``save``.
        saver: has buffers, plans and a channel of the ranks; by default one with the default
            options, which this process makes on the first call for a set of ranks and keeps until
            it ends. A save waits for the one before it with the same saver. Threads take turns, in
            the same order on all ranks.
        comm: see ``save``; not together with ``saver``, which has its own.
        options: see ``AsyncSaveOptions``.

    Returns:
        A handle. The checkpoint exists once its ``result()`` returns, and not before.

    Raises:
        CheckpointingException: what ``save`` raises before it writes; later errors are raised by
            the handle, and by the next save of the same ``saver``, on all ranks.
        ValueError: for a choice that does not exist, or ``comm`` together with ``saver``.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, async_save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> handle = async_save(state, "ckpt")
        >>> handle.result()
    """
    require_known("async_save", options)
    if saver is not None and comm is not None:
        raise ValueError("the saver has its own comm")
    saver = _saver_for(chosen_comm(comm)) if saver is None else saver
    return saver.save(
        sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy, **options
    )


def _saver_for(comm: Comm) -> AsyncSaver:
    """The saver that is kept for these ranks."""
    # One lock a process and rank: ranks may be threads, and making a saver is collective.
    lock = comm.kept.setdefault(f"{_KEPT_AS}: lock of {os.getpid()}", threading.Lock())
    with lock:
        saver: AsyncSaver | None = comm.kept.get(_KEPT_AS)
        if saver is None or not saver.is_here:
            saver = comm.kept[_KEPT_AS] = AsyncSaver(comm=comm)
            _kept.add(saver)
        saver.use_comm(comm)
    return saver


@atexit.register
def _close_kept() -> None:
    # Saves under way have been waited for by now, see ``background``.
    for saver in list(_kept):
        if saver.is_here:  # a forked process has none of its threads
            saver.close_alone(_EXIT_PATIENCE_SECONDS)
