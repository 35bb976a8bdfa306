"""``async_save`` and AsyncSaver: capture, then write and commit behind the training; retries.

``save`` is cut after the plan. ``capture`` and ``write_own`` concern this rank alone
and may run in any thread; ``complete`` talks to the other ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from os import PathLike
from typing import Any, Final, Literal, Self, TypeVar, Unpack, cast

import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.defaults import chosen_comm
from dist_checkpointing.errors import CheckpointingException, RankFailedError
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.serialization.save_handle import SaveHandle
from dist_checkpointing.serialization.save_options import (
    AsyncSaveOptions,
    SaveHooks,
    SaveOptions,
    require_known,
)
from dist_checkpointing.serialization.save_planning import prepare
from dist_checkpointing.serialization.save_steps import SaveJob
from dist_checkpointing.storage.progress import Meter, Progress, chosen_callback
from dist_checkpointing.storage.staging import ChangeDetector, StagingBuffers
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection
from dist_checkpointing.threads import Ownership

logger: logging.Logger = logging.getLogger(__name__)


class StagedSave:
    """A save that is cut after the plan.

    Args:
        job: the save, which has claimed its folder.
        buffers: memory for the copies.
        step: what the save is for.
    """

    def __init__(self, job: SaveJob, buffers: StagingBuffers, step: int | None = None) -> None:
        self._job = job
        self._buffers = buffers
        self._holds_buffers = False
        self._stamp = xxhash.xxh3_64_intdigest(f"{job.attempt_id} {step}".encode()) >> 2
        self._error: Exception | None = None
        self._is_lost = False

    def get_ready(self, comm: Comm) -> None:
        """Get ready to copy. The first thing in the body of an agreement.

        Raises:
            CheckpointingException: if the buffers are in use, or the writer cannot get ready.
        """
        self._job.get_ready(comm)
        self._buffers.take()
        self._holds_buffers = True

    def watch(self) -> ChangeDetector:
        """Get ready for a ``capture`` by another thread: what the state is now, to compare."""
        tensors = self._job.own.tensors()
        self._buffers.follow(tensor for held in tensors.values() for tensor in held)
        return ChangeDetector(tensors)

    def capture(self) -> None:
        """Copy what this rank will write, and let go of the caller's state."""
        self._job.capture(self._buffers)

    def write_own(self) -> None:
        """Write what this rank has to write. Not collective.

        An error is kept for ``complete``, which tells it to all ranks.
        """
        if self._error is not None:
            return
        try:
            self._job.write_own()
        except Exception as error:  # noqa: BLE001 - all ranks must hear of it
            self._error = error

    def lose(self, error: Exception) -> None:
        """Let ``complete`` raise this: there is no usable copy, and no second try would help."""
        self._error = error
        self._is_lost = True

    def complete(self, comm: Comm) -> None:
        """Finish and commit, or raise what failed on any rank. Collective."""
        job = self._job
        try:
            job.finish(comm, self._own_number)
            job.commit(comm)
        except BaseException as error:
            job.give_up(error)
            raise

    def _own_number(self) -> int:
        if self._error is not None:
            raise self._error
        return self._stamp

    def write_and_complete(self, comm: Comm, retries: int) -> None:
        """Secure, write, finish and commit; all of it once more for every retry. Collective."""
        for tries_left in range(retries, -1, -1):
            try:
                if tries_left < retries:
                    self._start_over(comm)
                else:
                    self._job.secure(comm)
                self.write_own()
                self.complete(comm)
            except CheckpointingException as error:
                self._job.give_up(error)
                somebody_is_gone = isinstance(error, RankFailedError) and error.silent_ranks
                if not tries_left or somebody_is_gone:
                    raise
                logger.warning("writing once more (%d tries left): %s", tries_left, error)
            else:
                return

    def _start_over(self, comm: Comm) -> None:
        """Get ready to write the same copies once more, after a failure. Collective."""
        with comm.agreed("writing once more"):
            if self._is_lost:
                assert self._error is not None
                raise self._error
        # The folder was cleared away: claim it again, and get ready again.
        self._job.claim(comm)
        self._job.secure(comm)
        self._error = None
        with comm.agreed("writing once more"):
            self._job.get_ready(comm)

    def close(self) -> None:
        """Free the buffers for the next save."""
        if self._holds_buffers:
            self._holds_buffers = False
            self._buffers.give_back()


Finalize = Literal["background", "caller"]


Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """Let one thread at a time in, of the process that made the saver."""

    @wraps(method)
    def taken(self: AsyncSaver, *args: Any, **kwargs: Any) -> Any:
        self._owner.require()
        with self._turns:
            return method(self, *args, **kwargs)

    return cast("Method", taken)


class AsyncSaver:
    """What asynchronous saves of one training run share: buffers, plans, and ranks' own channel.

    One save is under way at a time: the next one waits for it. Two savers do not interfere. Threads
    of one process take turns with a saver, and must do so in the same order on all ranks; a forked
    process is refused.

    Args:
        comm: the ranks that save together; by default all of torch.distributed, or this process.
        finalize: who talks to the other ranks once everything is written. ``"background"``: the
            thread that wrote it, over a CPU group of its own, so that the checkpoint is committed
            without the training's help. ``"caller"``: the thread that calls ``handle.result()`` or
            makes the next save, on all ranks; no group is made, and a checkpoint waits for that
            call.
        retries: how often a save that failed is written again, from the same copies. One that
            failed because a rank is gone is not.
        buffers: memory for the copies.
        plan_cache: PlanCache of the run.

    Making one is collective with ``finalize="background"``.

    Raises:
        ValueError: for choices that do not exist, or do not go together.

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
        finalize: Finalize = "background",
        retries: int = 0,
        buffers: StagingBuffers | None = None,
        plan_cache: PlanCache | None = None,
    ) -> None:
        _check_choice("finalize", finalize, ("background", "caller"))
        if retries and finalize == "caller":
            raise ValueError("only finalize='background' can retry")
        self._buffers = StagingBuffers() if buffers is None else buffers
        self._comm = chosen_comm(comm)
        self._own_comm = self._comm.duplicate() if finalize == "background" else None
        self._retries = retries
        self._plan_cache = PlanCache() if plan_cache is None else plan_cache
        self._last: SaveHandle | None = None
        self._is_closed = False
        self._owner = Ownership("the saver")
        self._turns = threading.RLock()

    def save(
        self,
        sharded_state_dict: ShardedStateDict | ShardedStateful,
        checkpoint_dir: str | PathLike[str],
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        common_strategy: Selection[SaveCommonStrategy] = None,
        *,
        on_committed: Callable[[], None] | None = None,
        **options: Unpack[AsyncSaveOptions],
    ) -> SaveHandle:
        """``async_save`` with a hook that runs on rank 0.

        Args:
            sharded_state_dict: see ``save``.
            checkpoint_dir: see ``save``.
            sharded_strategy: see ``async_save``.
            common_strategy: see ``save``.
            on_committed: called in the thread that finalizes, once the checkpoint is there; its
                error is the save's, but the checkpoint stays.
            options: see ``AsyncSaveOptions``.

        Raises:
            ValueError: if the saver is closed; and see ``async_save``.
        """
        return self.save_with_hooks(
            SaveHooks(),
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            on_committed=on_committed,
            **options,
        )

    @_in_turn
    def save_with_hooks(
        self,
        hooks: SaveHooks,
        sharded_state_dict: ShardedStateDict | ShardedStateful,
        checkpoint_dir: str | PathLike[str],
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        common_strategy: Selection[SaveCommonStrategy] = None,
        *,
        on_committed: Callable[[], None] | None = None,
        **options: Unpack[AsyncSaveOptions],
    ) -> SaveHandle:
        """``save``, for the rest of the library; see there."""
        require_known("AsyncSaver.save", options)
        step, rank = options.pop("step", None), self._comm.rank
        progress = chosen_callback(options.pop("progress", None), "asynchronous save", rank)
        capture = options.pop("capture", "copy")
        _check_choice("capture", capture, ("copy", "background"))
        if self._is_closed:
            raise ValueError("the saver is closed")
        comm = self._comm
        self.wait()
        # Whoever writes may do so when the working directory is another one.
        handle = SaveHandle(as_location(checkpoint_dir).absolute(), step, comm)

        def report(state: Progress) -> None:
            handle.report(state)
            if progress is not None:
                progress(state)

        shared: SaveOptions = options  # the rest of them
        job = prepare(
            sharded_state_dict,
            checkpoint_dir,
            comm,
            Meter("asynchronous save", comm.rank, report),
            hooks,
            sharded_strategy=sharded_strategy,
            common_strategy=common_strategy,
            plan_cache=self._plan_cache,
            **shared,
        )
        try:
            # What is made durable in the background need not be waited for here.
            job.claim(comm, secured=self._own_comm is None)
            staged = StagedSave(job, self._buffers, step)
            try:
                detector = None
                with comm.agreed("copying the state"):
                    staged.get_ready(comm)
                    if self._own_comm is None:
                        job.check_claim()
                    if capture == "copy":
                        staged.capture()
                    else:
                        detector = staged.watch()
                if capture == "copy":
                    handle.captured.set()
                self._start(staged, handle, detector, on_committed)
            except BaseException:
                staged.close()
                raise
        except BaseException as error:
            job.give_up(error)
            raise
        self._last = handle
        return handle

    def _start(
        self,
        staged: StagedSave,
        handle: SaveHandle,
        detector: ChangeDetector | None,
        on_committed: Callable[[], None] | None,
    ) -> None:
        # Nothing below refers to the saver, which may be dropped while this goes on.
        own_comm, retries = self._own_comm, self._retries

        def complete(comm: Comm) -> None:
            try:
                try:
                    if own_comm is None:
                        staged.complete(comm)
                    else:
                        staged.write_and_complete(own_comm, retries)
                finally:
                    staged.close()
                if on_committed is not None:
                    with comm.agreed("after the commit"):
                        if comm.rank == 0:
                            on_committed()
            except BaseException as error:
                # The tracebacks of all ranks are in its text.
                logger.error("the save into %s failed: %s", handle.checkpoint_dir, error)  # noqa: TRY400
                raise

        def write_alone() -> None:
            _capture_behind(staged, handle, detector)
            staged.write_own()

        def write_all() -> None:
            assert own_comm is not None
            _capture_behind(staged, handle, detector)
            complete(own_comm)

        if own_comm is None:
            handle.run(write_alone, complete)
        else:
            handle.run(write_all)

    @_in_turn
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one. Collective.

        Args:
            timeout_seconds: the same on all ranks.

        Raises:
            CheckpointingException: what failed on any rank, on all of them, unless ``result`` has
                raised it on all.
            TimeoutError: on all ranks, if any of them is not through in time; the save goes on.
        """
        last = self._last
        if last is None:
            return
        is_through = last.wait(timeout_seconds)
        if timeout_seconds is not None and not self._comm.all_same(0 if is_through else None):
            raise TimeoutError(
                f"the save into {last.checkpoint_dir} goes on after {timeout_seconds:g} s"
            )
        self._last = None
        last.settle(self._comm)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it, and not one forked from that."""
        return self._owner.is_here

    @_in_turn
    def close(self) -> None:
        """Wait, and give the ranks' own channel back. Collective."""
        try:
            self.wait()
        finally:
            self._let_go()

    def close_alone(self, timeout_seconds: float) -> None:
        """Like ``close``, but without the other ranks: what failed is not raised, it was logged."""
        if self._last is None or self._last.wait(timeout_seconds):
            self._let_go()

    def _let_go(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._own_comm is not None and self._own_comm is not self._comm:
            self._own_comm.close()

    def talk_over(self, comm: Comm) -> None:
        """From now on the training's side talks over ``comm``, which has the same ranks."""
        self._comm = comm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # In an error of this rank alone the others will not come: what is under way ends by itself.
        if kind is None:
            self.close()


def _capture_behind(
    staged: StagedSave, handle: SaveHandle, detector: ChangeDetector | None
) -> None:
    if handle.captured.is_set():
        return
    try:
        staged.capture()
        if detector is not None:
            detector.check()
    except Exception as error:  # noqa: BLE001 - all ranks must hear of it
        staged.lose(error)
    finally:
        handle.captured.set()


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


_KEPT_AS: Final = "async saver"


_EXIT_PATIENCE_SECONDS: Final = 1.0


_kept: weakref.WeakKeyDictionary[AsyncSaver, int] = weakref.WeakKeyDictionary()


"""Savers to close, and the process that made each."""


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
        saver: has buffers, plans and the ranks' own channel; by default one with the default
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
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        **options,
    )


def _saver_for(comm: Comm) -> AsyncSaver:
    """The saver that is kept for these ranks."""
    # One lock a process and rank: ranks may be threads, and making a saver is collective.
    lock = comm.kept.setdefault(f"{_KEPT_AS}: lock of {os.getpid()}", threading.Lock())
    with lock:
        saver: AsyncSaver | None = comm.kept.get(_KEPT_AS)
        if saver is None or not saver.is_here:
            saver = comm.kept[_KEPT_AS] = AsyncSaver(comm=comm)
            _kept[saver] = os.getpid()
        saver.talk_over(comm)
    return saver


@atexit.register
def _close_kept() -> None:
    # Saves under way have been waited for by now, see ``background``.
    for saver, owner in list(_kept.items()):
        if owner == os.getpid():  # and not one forked from it, which has none of its threads
            saver.close_alone(_EXIT_PATIENCE_SECONDS)
