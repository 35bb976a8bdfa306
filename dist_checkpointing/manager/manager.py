"""CheckpointManager: the checkpoints of one training run, each step in a folder of its own."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from dist_checkpointing.checkpoint.verify import verify_checkpoint
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.paths import local_folder
from dist_checkpointing.manager.checks import (
    asks_for_all,
    check_sealed_files,
    check_structure,
    is_verifiable,
    judge,
)
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful, StateDict
from dist_checkpointing.planning.plan_save import PlanCache
from dist_checkpointing.planning.replicas import OnReplicaMismatch, ReplicaCheck
from dist_checkpointing.serialization.async_saver import AsyncSaver, Finalize, Worker
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.save import save
from dist_checkpointing.serialization.save_base import require_sharing_strategy
from dist_checkpointing.serialization.save_handle import SaveHandle
from dist_checkpointing.serialization.save_options import Capture
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection

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
    root wrote. Verified is what ``verify`` or ``latest_valid`` has read, or a ``load`` without a
    step by ranks that together ask for all of it. A damaged checkpoint that was skipped is replaced
    by a new save of its step. A checkpoint with an I/O error does not count as damaged.

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
        incremental: whether each save shares what has not changed with the latest checkpoint, see
            ``base`` of ``save``. A strategy that cannot do that is refused.
        fingerprints: see ``save``; for all saves that do not say otherwise.
        replicas: likewise.
        on_replica_mismatch: likewise.

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
        incremental: bool = False,
        fingerprints: bool = False,
        replicas: ReplicaCheck = ReplicaCheck.OFF,
        on_replica_mismatch: OnReplicaMismatch = "raise",
    ) -> None:
        if on_error not in ("raise", "warn", "retry"):
            raise ValueError(f"on_error must be 'raise', 'warn' or 'retry', not {on_error!r}")
        self.root = local_folder(root)
        self._strategy = sharded_strategy
        self._comm = default_comm() if comm is None else comm
        self._files = RunFolder(self.root, Retention() if retention is None else retention)
        self._on_error = on_error
        self._trusted = trusted
        self._is_incremental = incremental
        if incremental:
            require_sharing_strategy(sharded_strategy)
        self._save_options: dict[str, Any] = {"trusted": trusted, "fingerprints": fingerprints}
        self._save_options |= {"replicas": replicas, "on_replica_mismatch": on_replica_mismatch}
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

    def save(self, step: int, state: ShardedStateDict | ShardedStateful, **options: Any) -> None:
        """Save a step and return when it is committed.

        Args:
            step: number of the step; its folder must hold no checkpoint.
            state: see ``save``.
            options: options of ``save``.

        Raises:
            CheckpointingException: see ``save``; also if the disk is too full.
        """
        options = self._begin(step, options)
        save(
            state,
            self.folder(step),
            self._strategy,
            comm=self._comm,
            plan_cache=self._plan_cache,
            **self._files.hooks(step),
            **options,
        )
        with self._comm.agreed("moving the pointer"):
            if self._comm.rank == 0:
                self._files.committed(step)

    def async_save(
        self,
        step: int,
        state: ShardedStateDict | ShardedStateful,
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
        options = self._begin(step, options)
        return self._saver.save(
            state,
            self.folder(step),
            self._strategy,
            step=step,
            capture=capture,
            on_committed=lambda: self._files.committed(step),
            **self._files.hooks(step),
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
        if check not in ("contents", "structure"):
            raise ValueError(f"check must be 'contents' or 'structure', not {check!r}")
        for step, number in self._saves():
            try:
                if check == "contents":
                    self.verify(step)
                else:
                    judge(self._comm, step, partial(check_structure, self.folder(step)))
            except CheckpointingException as error:
                self._skip(step, number, error)
            else:
                return step
        return None

    def verify(self, step: int) -> None:
        """Read all of a checkpoint, divided among the ranks, and compare its checksums.

        Raises:
            CheckpointNotFoundError: if it is not committed.
            CorruptCheckpointError: with everything that is damaged.
            CheckpointingException: if it cannot be read, see ``load``.
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        rank, world_size = self._comm.rank, self._comm.world_size
        judge(
            self._comm,
            step,
            lambda: verify_checkpoint(
                self.folder(step), rank=rank, world_size=world_size, trusted=self._trusted
            ),
        )
        self._note_valid(step, is_valid=rank == 0)

    def load(
        self, template: ShardedStateDict | ShardedStateful, step: int | None = None, **options: Any
    ) -> StateDict:
        """Load a step.

        Args:
            template: see ``load``.
            step: number of the step. None for the newest one in which nothing is damaged that the
                template asks for; the log says why newer ones are skipped, and given tensors may
                have been filled with parts of them before. The result does not tell which step that
                was, unless the training keeps its step in the common state.
            options: options of ``load``. If ``step`` is None, ``verify`` is True by default where
                the checkpoint has checksums.

        Raises:
            CheckpointNotFoundError: if no step can be loaded; with the reason for each.
            StateMismatchError: if the template does not fit the newest of these steps.
            CheckpointingException: see ``load``.
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        self.wait()
        if step is None:
            return self._load_newest(template, options)
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

    def _begin(self, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Wait, check the step, and record on rank 0 that this manager will write its folder.

        Returns:
            Options of the save. On rank 0 it may overwrite a checkpoint of ours that was found
            damaged: that is deleted when the new one has been planned and has claimed the folder.
        """
        self.wait()
        makes_room = False
        with self._comm.agreed("beginning a save"):
            if type(step) is not int or step < 0:
                finding = Finding("a step must be an int of at least 0", found=repr(step))
                raise CheckpointingException("cannot save this step", [finding])
            if self._comm.rank == 0:
                makes_room = self._files.begin(step, self._damaged.get(step))
        base = None
        if self._is_incremental:
            find = partial(self._files.base_of, step, self._damaged)
            base = self._comm.from_rank0("choosing the base", find)
        return {
            **self._save_options,
            "base": None if base is None else self.folder(base),
            **options,
            "overwrite": options.get("overwrite", False) | makes_room,
        }

    def _load_newest(
        self, template: ShardedStateDict | ShardedStateful, options: Mapping[str, Any]
    ) -> StateDict:
        comm = self._comm
        skipped: list[Finding] = []
        given = [options.get(name) for name in ("sharded_strategy", "common_strategy")]
        # Of a strategy of the caller this says nothing about the checkpoint.
        unreadable = (UnsupportedFormatError,) if given == [None, None] else ()
        for step, number in self._saves():
            folder = self.folder(step)
            try:
                judge(comm, step, partial(check_sealed_files, folder, comm.rank, comm.world_size))
                looking = partial(is_verifiable, folder, given[0])
                verify = comm.from_rank0(f"looking for checksums of step {step}", looking)
                if not verify:
                    self.verify(step)  # as far as that goes
            except CheckpointingException as error:
                skipped.append(self._skip(step, number, error))
                continue
            chosen = {"trusted": self._trusted, "verify": verify, **options}
            try:
                loaded: StateDict = load(template, folder, comm=comm, **chosen)
            except (CorruptCheckpointError, *unreadable) as error:
                skipped.append(self._skip(step, number, error))
                continue
            if verify and chosen["verify"] is True:
                self._note_valid(step, is_valid=asks_for_all(template, folder, comm))
            return loaded
        raise CheckpointNotFoundError(f"{self.root} holds no valid checkpoint", skipped)

    def _note_valid(self, step: int, *, is_valid: bool) -> None:
        """Record that all of a step is valid, on the rank that says so: rank 0. Collective."""
        with self._comm.agreed(f"noting that step {step} is valid"):
            if is_valid:
                self._files.verified(step)

    def _saves(self) -> list[tuple[int, int]]:
        return self._comm.from_rank0("listing the checkpoints", self._files.all_saves)

    def _skip(self, step: int, number: int, error: CheckpointingException) -> Finding:
        """Log why a step cannot be loaded, and remember which save of it is damaged."""
        if isinstance(error, RankFailedError):
            raise error  # this is about the ranks, not about the checkpoint
        logger.warning("step %d is skipped: %s", step, error)
        if isinstance(error, CorruptCheckpointError):
            self._damaged[step] = number
        return Finding(str(error), path=str(self.folder(step)))
