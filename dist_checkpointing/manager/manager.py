"""CheckpointManager: the checkpoints of one training run, each step in a folder of its own."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from dist_checkpointing.checkpoint.verify import verify_checkpoint
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.comm.protocol import Failure, merge_failures
from dist_checkpointing.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
)
from dist_checkpointing.filesystem.local import check_room
from dist_checkpointing.filesystem.paths import local_folder
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.format.index import Index
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.mapping import ShardedStateDict, StateDict
from dist_checkpointing.planning.plan_save import PlanCache
from dist_checkpointing.serialization.async_saver import AsyncSaver, Finalize, Worker
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.save import save
from dist_checkpointing.serialization.save_handle import SaveHandle
from dist_checkpointing.serialization.save_options import Capture
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection, open_checkpoint

logger = logging.getLogger(__name__)

OnError = Literal["raise", "warn", "retry"]


class CheckpointManager:
    """Saves, finds, loads and deletes the checkpoints of one run.

    ``ROOT/step-00000100`` is the checkpoint of step 100. ``ROOT/manager.json`` has a pointer to the
    latest one, and lists all steps that were written here. Only one run at a time may use a root.
    All methods are collective, and only one thread at a time may call them.

    The pointer moves after a commit is durable, and old checkpoints are deleted after the pointer
    has moved. If a process was killed in between, the next manager corrects the pointer. The latest
    and the last verified checkpoint are always kept, and so is everything that no manager of this
    root wrote. A damaged checkpoint that ``latest_valid`` has skipped is replaced by a new save of
    its step. A checkpoint with an I/O error does not count as damaged.

    Args:
        root: folder of the run, made if it is missing.
        sharded_strategy: see ``save``.
        comm: the ranks of the run; by default all of torch.distributed, or this process.
        retention: which checkpoints are kept; by default all.
        on_error: what the next call does if an asynchronous save has failed. ``"raise"``: it raises
            the error. ``"warn"``: it logs the error, and training goes on without that checkpoint.
            ``"retry"``: the save is repeated, and the call raises if all attempts failed.
        retries: number of repeated attempts, for ``"retry"``.
        finalize: see ``AsyncSaver``.
        worker: see ``AsyncSaver``.
        trusted: save anything that can be pickled, and unpickle anything when loading; see ``save``
            and ``load``.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "epoch": 2}
        >>> with CheckpointManager("run", retention=Retention(keep_last=2)) as manager:
        ...     for step in (100, 200, 300):
        ...         _ = manager.async_save(step, state)
        >>> manager.steps(), manager.load(state)["epoch"]
        ([200, 300], 2)
    """

    def __init__(
        self,
        root: str | PathLike[str],
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        *,
        comm: Comm | None = None,
        retention: Retention | None = None,
        on_error: OnError = "raise",
        retries: int = 2,
        finalize: Finalize = "background",
        worker: Worker = "thread",
        trusted: bool = False,
    ) -> None:
        if on_error not in ("raise", "warn", "retry"):
            raise ValueError(f"on_error must be 'raise', 'warn' or 'retry', not {on_error!r}")
        self.root = local_folder(root)
        self._strategy = sharded_strategy
        self._comm = default_comm() if comm is None else comm
        self._files = RunFolder(self.root, Retention() if retention is None else retention)
        self._on_error = on_error
        self._trusted = trusted
        self._plan_cache = PlanCache()
        self._saver = AsyncSaver(
            comm=self._comm,
            finalize=finalize,
            worker=worker,
            retries=retries if on_error == "retry" else 0,
            plan_cache=self._plan_cache,
        )
        self._damaged: dict[int, int] = {}  # step -> number of the save that was found damaged
        self._signalled = threading.Event()

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether or not it exists."""
        return self._files.folder(step)

    def save(self, step: int, state: ShardedStateDict, **options: Any) -> None:
        """Save a step and return when it is committed.

        Args:
            step: number of the step; its folder must hold no checkpoint.
            state: see ``save``.
            options: options of ``save``.

        Raises:
            CheckpointingException: see ``save``; also if the disk is too full.
        """
        self.wait()
        overwrite = options.pop("overwrite", False) | self._begin(step)
        options = {"trusted": self._trusted, **options}
        save(
            state,
            self.folder(step),
            self._strategy,
            comm=self._comm,
            plan_cache=self._plan_cache,
            before_claim=self._preflight(step),
            after_claim=lambda attempt: self._files.claimed(step, attempt),
            overwrite=overwrite,
            **options,
        )
        with self._comm.agreed("moving the pointer"):
            if self._comm.rank == 0:
                self._files.committed(step)

    def async_save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        capture: Capture = "copy",
        **options: Any,
    ) -> SaveHandle:
        """Save a step in the background, after the last asynchronous save has ended.

        Args:
            step: number of the step; its folder must hold no checkpoint.
            state: see ``save``.
            capture: see ``async_save``.
            options: options of ``async_save``.

        Raises:
            CheckpointingException: errors that ``save`` raises before it writes; also the error of
                the last asynchronous save, unless ``on_error="warn"``.
        """
        self.wait()
        overwrite = options.pop("overwrite", False) | self._begin(step)
        options = {"trusted": self._trusted, **options}
        return self._saver.save(
            state,
            self.folder(step),
            self._strategy,
            step=step,
            capture=capture,
            before_claim=self._preflight(step),
            after_claim=lambda attempt: self._files.claimed(step, attempt),
            on_committed=lambda: self._files.committed(step),
            overwrite=overwrite,
            **options,
        )

    def wait(self) -> None:
        """Wait for the asynchronous save in progress.

        Raises:
            CheckpointingException: the error of that save, unless ``on_error="warn"``.
        """
        try:
            self._saver.wait()
        except CheckpointingException as error:
            if self._on_error != "warn":
                raise
            logger.warning("training goes on without a checkpoint: %s", error)

    def close(self) -> None:
        """Wait for the save in progress, and free the buffers and threads of the manager."""
        try:
            self.wait()
        finally:
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error of this rank alone, the others would not come. A save in progress ends by
        # itself.
        if kind is None:
            self.close()

    def steps(self) -> list[int]:
        """All committed steps, oldest first."""
        return self._comm.from_rank0("listing the checkpoints", self._files.committed_steps)

    def latest(self) -> int | None:
        """The step that was committed last; the newest committed step if the pointer is lost."""
        return self._comm.from_rank0("finding the latest checkpoint", self._files.latest)

    def latest_valid(self, *, check: Literal["contents", "structure"] = "contents") -> int | None:
        """The newest step that can be loaded; logs why it skips newer ones.

        Args:
            check: ``"contents"`` reads all of a checkpoint, divided among the ranks, and compares
                its checksums; ``"structure"`` reads only its metadata.

        Raises:
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        return self._find_valid(check)[0]

    def verify(self, step: int) -> None:
        """Read all of a checkpoint, divided among the ranks, and compare its checksums.

        Raises:
            CheckpointNotFoundError: if it is not committed.
            CorruptCheckpointError: with everything that is damaged.
            CheckpointingException: if it cannot be read, see ``load``.
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        rank, world_size = self._comm.rank, self._comm.world_size
        self._judge(
            step,
            lambda: verify_checkpoint(
                self.folder(step), rank=rank, world_size=world_size, trusted=self._trusted
            ),
        )
        with self._comm.agreed(f"noting that step {step} is valid"):
            if rank == 0:
                self._files.verified(step)

    def load(
        self, template: ShardedStateDict, step: int | None = None, **options: Any
    ) -> StateDict:
        """Load a step.

        Args:
            template: see ``load``.
            step: number of the step; None for ``latest_valid()``. The result does not tell which
                step that was, unless the training keeps its step in the common state.
            options: options of ``load``.

        Raises:
            CheckpointNotFoundError: if no step can be loaded; with the reason for each.
            CheckpointingException: see ``load``.
        """
        self.wait()
        if step is None:
            step, skipped = self._find_valid("contents")
            if step is None:
                raise CheckpointNotFoundError(f"{self.root} holds no valid checkpoint", skipped)
        options = {"trusted": self._trusted, **options}
        loaded: StateDict = load(template, self.folder(step), comm=self._comm, **options)
        return loaded

    def delete(self, step: int) -> None:
        """Delete a checkpoint that this manager, or an earlier one of the same root, wrote.

        Raises:
            CheckpointingException: if neither wrote it, or if it is the last verified one.
        """
        self.wait()
        with self._comm.agreed(f"deleting step {step}"):
            if self._comm.rank == 0:
                self._files.delete(step)

    def save_on_signal(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Make ``preempted()`` return True after any rank has received the signal.

        The signal does nothing else: a training loop calls ``preempted()``, saves, and ends. Only
        the main thread may call this.
        """
        signal.signal(signum, lambda *_: self._signalled.set())

    def preempted(self) -> bool:
        """Whether any rank has received the signal of ``save_on_signal``."""
        return not self._comm.all_same(None if self._signalled.is_set() else 0)

    def _begin(self, step: int) -> bool:
        """Check the step, and record on rank 0 that this manager will write its folder.

        Returns:
            On rank 0, whether the save may overwrite a checkpoint of ours that was found damaged.
            It is deleted when the new one has been planned and has claimed the folder.
        """
        makes_room = False
        with self._comm.agreed("beginning a save"):
            if type(step) is not int or step < 0:
                finding = Finding("a step must be an int of at least 0", found=repr(step))
                raise CheckpointingException("cannot save this step", [finding])
            if self._comm.rank == 0:
                makes_room = self._files.begin(step, self._damaged.get(step))
        return makes_room

    def _preflight(self, step: int) -> Callable[[Index | None], None]:
        def check(index: Index | None) -> None:
            num_bytes = 0
            if index is not None:
                num_bytes = sum(
                    math.prod(index[key].global_shape) * index[key].dtype.itemsize for key in index
                )
            check_room(self.folder(step), num_bytes)

        return check

    def _find_valid(
        self, check: Literal["contents", "structure"]
    ) -> tuple[int | None, list[Finding]]:
        if check not in ("contents", "structure"):
            raise ValueError(f"check must be 'contents' or 'structure', not {check!r}")
        skipped = []
        saves = self._comm.from_rank0("listing the checkpoints", self._files.all_saves)
        for step, number in saves:
            folder = self.folder(step)
            try:
                if check == "contents":
                    self.verify(step)
                else:
                    self._judge(step, partial(_check_structure, folder))
            except RankFailedError:
                raise  # this is about the ranks, not about the checkpoint
            except CheckpointingException as error:
                logger.warning("step %d is skipped: %s", step, error)
                skipped.append(Finding(str(error), path=str(folder)))
                if isinstance(error, CorruptCheckpointError):
                    self._damaged[step] = number
            else:
                return step, skipped
        return None, skipped

    def _judge(self, step: int, work: Callable[[], None]) -> None:
        """Raise the errors that ranks find in a checkpoint; if some find damage, only that.

        Collective. Any other exception on a rank becomes a RankFailedError.
        """
        verdicts = self._comm.exchange(f"verifying step {step}", lambda: _verdict(work))
        found = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}
        damaged = {r: e for r, e in found.items() if isinstance(e, CorruptCheckpointError)}
        if found:
            failures = {rank: Failure.of(error) for rank, error in (damaged or found).items()}
            raise merge_failures(f"verifying step {step}", failures, self._comm.world_size)


def _check_structure(folder: Path) -> None:
    read_config(folder)
    found = open_checkpoint(folder)
    found.common.load_common(folder)
    found.sharded.load_tensors_metadata(folder)


def _verdict(work: Callable[[], None]) -> CheckpointingException | None:
    """The error that ``work`` finds in a checkpoint; other exceptions are raised."""
    try:
        work()
    except RankFailedError:
        raise
    except CheckpointingException as error:
        return error
    return None
