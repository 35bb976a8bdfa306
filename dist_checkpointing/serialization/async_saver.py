"""AsyncSaver: plans and copies like ``save``; the rest runs behind the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import wraps
from os import PathLike
from typing import Any, Literal, Self, TypeVar, Unpack, cast

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.default_comm import chosen_comm
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
from dist_checkpointing.serialization.staged_save import StagedSave
from dist_checkpointing.storage.progress import Meter, Progress, chosen_callback
from dist_checkpointing.storage.staging import ChangeDetector, StagingBuffers
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection
from dist_checkpointing.threads import Ownership

logger: logging.Logger = logging.getLogger(__name__)

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
