"""async_save: the line of ``save``, cut after the plan; the rest runs behind the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

import torch

from dist_checkpointing.background import run_in_background
from dist_checkpointing.begun_save import SaveRequest, begin
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.index import Index
from dist_checkpointing.mapping import ShardedStateDict
from dist_checkpointing.planned_save import PlanCache
from dist_checkpointing.progress import Meter, Progress, ProgressCallback
from dist_checkpointing.staged_save import StagedSave, stage
from dist_checkpointing.staging import ChangeDetector, StagingBuffers
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection

logger = logging.getLogger(__name__)

Capture = Literal["copy", "background"]
Finalize = Literal["background", "caller"]
WhenBusy = Literal["wait", "raise"]


class SaveHandle:
    """A save that goes on behind the training.

    Attributes:
        checkpoint_dir: where the checkpoint will be.
        step: what the caller named it.
        captured: set once the state has been copied (or could not be, which ``result`` raises):
            ``captured.wait()`` before anything may change it.
    """

    def __init__(self, checkpoint_dir: Path, step: int | None, comm: Comm | None) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.step = step
        self.captured = threading.Event()
        self._comm = comm
        self._outcome: Future[None] = Future()
        self._complete: Callable[[Comm], None] | None = None
        self._progress = Progress("planning", 0, 0, 0)
        self._is_told = False

    @property
    def progress(self) -> Progress:
        """How far it is, on this rank."""
        return self._progress

    def done(self) -> bool:
        """Whether ``result`` would return (or raise) at once; not collective.

        With ``finalize="caller"``: whether this rank has written its part, so that ``result`` only
        has to wait for the other ranks and the commit.
        """
        return self._outcome.done()

    def result(self, timeout_seconds: float | None = None) -> None:
        """Wait for the checkpoint to be committed. Collective with ``finalize="caller"`` only.

        Raises:
            TimeoutError: if this rank is not through in time; the save goes on.
            CheckpointingException: if it failed on any rank, the same on all of them, with the
                tracebacks. Nothing was committed then.
        """
        self._outcome_in(timeout_seconds)
        if self._complete is not None:
            assert self._comm is not None
            complete, self._complete = self._complete, None
            try:
                complete(self._comm)
            except BaseException as error:
                self._outcome = Future()
                self._outcome.set_exception(error)
                self._is_told = True
                raise
        failure = self._outcome.exception()
        if failure is not None:
            self._is_told = True
            raise failure

    def _outcome_in(self, timeout_seconds: float | None) -> BaseException | None:
        return self._outcome.exception(timeout_seconds)

    def fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next ``optimizer.step()`` wait until the state has been captured."""

        def wait(*_: object) -> None:
            self.captured.wait()
            hook.remove()

        hook = optimizer.register_step_pre_hook(wait)

    def _untold_error(self) -> BaseException | None:
        """An error that nobody has seen yet."""
        return None if self._is_told else self._outcome.exception()


class AsyncSaver:
    """What asynchronous saves of one training run share: buffers, plans, and ranks' own channel.

    One save is under way at a time. Two savers do not interfere.

    Args:
        comm: the ranks that save together; by default all of torch.distributed, or this process.
        finalize: who talks to the other ranks once everything is written. ``"background"``: the
            thread that wrote it, over a CPU group of its own, so that the checkpoint is committed
            without the training's help. ``"caller"``: whoever calls ``handle.result()`` or makes
            the next save, on all ranks; no group is made, and a checkpoint waits for that call.
        when_busy: what a save does while the last one is under way: ``"wait"`` for it, or
            ``"raise"``.
        retries: how often a save that failed is written again, from the same copies.
        buffers: memory for the copies.
        plan_cache: of the run.

    Making one is collective with ``finalize="background"``.
    """

    def __init__(
        self,
        *,
        comm: Comm | None = None,
        finalize: Finalize = "background",
        when_busy: WhenBusy = "wait",
        retries: int = 0,
        buffers: StagingBuffers | None = None,
        plan_cache: PlanCache | None = None,
    ) -> None:
        _check_choice("finalize", finalize, ("background", "caller"))
        _check_choice("when_busy", when_busy, ("wait", "raise"))
        if retries and finalize == "caller":
            raise ValueError("only finalize='background' can retry")
        self._comm = default_comm() if comm is None else comm
        self._own_comm = self._comm.duplicate() if finalize == "background" else None
        self._when_busy = when_busy
        self._retries = retries
        self._buffers = StagingBuffers() if buffers is None else buffers
        self._plan_cache = PlanCache() if plan_cache is None else plan_cache
        self._last: SaveHandle | None = None

    def save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | PathLike[str],
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        common_strategy: Selection[SaveCommonStrategy] = None,
        *,
        step: int | None = None,
        capture: Capture = "copy",
        detect_changes: Literal["versions", "contents"] = "versions",
        validate_access_integrity: bool = True,
        content_metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        progress: ProgressCallback | None = None,
        before_claim: Callable[[Index | None], None] | None = None,
        on_committed: Callable[[], None] | None = None,
    ) -> SaveHandle:
        """``async_save``, which see, and two hooks that run on rank 0.

        ``before_claim`` is that of ``save``. ``on_committed`` is called once the checkpoint is
        there, in whatever thread finalizes; its error is the save's, but the checkpoint stays.
        """
        _check_choice("capture", capture, ("copy", "background"))
        _check_choice("detect_changes", detect_changes, ("versions", "contents"))
        comm = self._comm
        self._settle_last()
        handle = SaveHandle(Path(checkpoint_dir), step, comm)

        def report(state: Progress) -> None:
            handle._progress = state  # noqa: SLF001 - of this module
            if progress is not None:
                progress(state)

        request = SaveRequest(
            state_dict=sharded_state_dict,
            folder=handle.checkpoint_dir,
            sharded_strategy=sharded_strategy,
            common_strategy=common_strategy,
            validate=validate_access_integrity,
            content_metadata=content_metadata,
            overwrite=overwrite,
            plan_cache=self._plan_cache,
            before_claim=before_claim,
        )
        begun = begin(request, comm, Meter("asynchronous save", comm.rank, report))
        try:
            begun.claim(comm)
            if self._own_comm is None:
                begun.secure(comm)
            staged = stage(begun, self._buffers, comm, step=step)
            try:
                detector = None
                if capture == "copy":
                    with comm.agreed("copying the state"):
                        staged.capture()
                    handle.captured.set()
                else:
                    detector = staged.watch(contents=detect_changes == "contents")
                self._start(staged, handle, detector, on_committed)
            except BaseException:
                staged.close()
                raise
        except BaseException as error:
            begun.give_up(error)
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
        comm = self._own_comm
        name = f"async-save-{handle.checkpoint_dir.name}"

        def complete(comm: Comm) -> None:
            try:
                self._complete(staged, comm)
            except BaseException as error:
                # The tracebacks of all ranks are in its text.
                logger.error("the save into %s failed: %s", handle.checkpoint_dir, error)  # noqa: TRY400
                raise
            finally:
                staged.close()
            if on_committed is not None:
                with comm.agreed("after the commit"):
                    if comm.rank == 0:
                        on_committed()

        def write_alone() -> None:
            _capture_behind(staged, handle, detector)
            staged.write_own()

        def write_all() -> None:
            assert comm is not None
            _capture_behind(staged, handle, detector)
            complete(comm)

        if comm is None:
            handle._complete = complete  # noqa: SLF001 - of this module
            handle._outcome = run_in_background(write_alone, name)  # noqa: SLF001
        else:
            handle._outcome = run_in_background(write_all, name)  # noqa: SLF001

    def _complete(self, staged: StagedSave, comm: Comm) -> None:
        if comm is not self._own_comm:
            staged.complete(comm)
            return
        for tries_left in range(self._retries, -1, -1):
            try:
                # Both again for every try: the folder was cleared away.
                if tries_left < self._retries:
                    staged.start_over(comm)
                else:
                    staged.begun.secure(comm)
                staged.write_own()
                staged.complete(comm)
            except CheckpointingException as error:
                staged.begun.give_up(error)
                if not tries_left:
                    raise
                logger.warning("writing once more (%d tries left): %s", tries_left, error)
            else:
                return

    def _settle_last(self) -> None:
        """Wait for the last save, and raise on all ranks what failed and nobody has seen."""
        if self._last is None:
            return
        last = self._last
        with self._comm.agreed("starting a save"):
            if self._when_busy == "raise" and not last.done():
                finding = Finding(
                    "the last asynchronous save is not finished",
                    path=str(last.checkpoint_dir),
                    remedy="Wait for its result, or choose when_busy='wait'.",
                )
                raise CheckpointingException("two asynchronous saves at once", [finding])
        self.wait()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the save under way, if there is one. Collective.

        Raises:
            CheckpointingException: what failed on any rank, unless ``result`` has raised it there.
            TimeoutError: if it is not through in time.
        """
        last = self._last
        if last is None:
            return
        last._outcome_in(timeout_seconds)  # noqa: SLF001 - of this module
        if last._complete is not None:  # noqa: SLF001
            self._last = None
            last.result()
            return
        with self._comm.agreed("the save before"):
            error = last._untold_error()  # noqa: SLF001
            self._last = None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait, and give the ranks' own channel back. Collective."""
        try:
            self.wait()
        finally:
            if self._own_comm is not None and self._own_comm is not self._comm:
                self._own_comm.close()

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


def async_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[SaveShardedStrategy] = None,
    common_strategy: Selection[SaveCommonStrategy] = None,
    *,
    saver: AsyncSaver | None = None,
    step: int | None = None,
    capture: Capture = "copy",
    detect_changes: Literal["versions", "contents"] = "versions",
    validate_access_integrity: bool = True,
    content_metadata: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    comm: Comm | None = None,
) -> SaveHandle:
    """Save like ``save``, but write behind the training. Collective.

    Args:
        sharded_state_dict: see ``save``.
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``save``. A strategy of a third party runs in the thread as a whole,
            and must not use the process groups of the training there.
        common_strategy: see ``save``.
        saver: keeps buffers, plans and the ranks' own channel for the next save; without one all of
            that is made anew for this save alone.
        step: what the save is for; all ranks must name the same.
        capture: ``"copy"`` copies everything before it returns: the state may be changed at once.
            ``"background"`` returns before the copy is made: nothing of the state may change
            before ``handle.captured`` is set.
        detect_changes: with ``capture="background"``, how a change that came too early is noticed,
            which makes the save fail: by torch's own count of in-place operations, or also (slow,
            for debugging) by comparing all contents.
        validate_access_integrity: see ``save``.
        content_metadata: see ``save``.
        overwrite: see ``save``.
        progress: see ``save``.
        comm: see ``save``; not together with ``saver``, which has its own.

    Returns:
        A handle. The checkpoint exists once its ``result()`` returns, and not before.

    Raises:
        CheckpointingException: what ``save`` raises before it writes; later errors are raised by
            the handle, and by the next save of the same ``saver``, on all ranks.
        ValueError: for a choice that does not exist, or ``comm`` together with ``saver``.
    """
    if saver is not None and comm is not None:
        raise ValueError("the saver has its own comm")
    saver = AsyncSaver(comm=comm) if saver is None else saver
    return saver.save(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        step=step,
        capture=capture,
        detect_changes=detect_changes,
        validate_access_integrity=validate_access_integrity,
        content_metadata=content_metadata,
        overwrite=overwrite,
        progress=progress,
    )
