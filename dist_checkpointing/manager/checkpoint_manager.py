"""CheckpointManager: the checkpoints of one training run, each step in a folder of its own."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, SupportsFloat, get_origin, get_type_hints

from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.object_store import Location, listed_once
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.format.run_steps import NO_STEP, fits
from dist_checkpointing.manager.latest_valid import (
    asks_for_all,
    check_sealed_files,
    is_verifiable,
    judge,
)
from dist_checkpointing.manager.places import Places, as_places
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run import NoRoomError, Run
from dist_checkpointing.manager.save_log import Hooks, Stopwatch
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful, StateDict
from dist_checkpointing.planning.replica_check import OnReplicaMismatch, ReplicaCheck
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.serialization.async_save import AsyncSaver, SaveHandle
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_steps import Capture
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.incremental import require_sharing_strategy
from dist_checkpointing.strategies.selection import Selection

logger: logging.Logger = logging.getLogger(__name__)

OnError = Literal["raise", "warn", "retry"]
_MOST_STEPS: Final = 20


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves, finds, loads and deletes the checkpoints of one run.

    ``ROOT/step-00000100`` is the checkpoint of step 100. ``ROOT/manager.json`` has a pointer to the
    latest one, and lists all steps that were written here. Only one run at a time may use a root.
    Of more places each is such a root. A step is saved to the first, and a thread copies it on.
    All methods are collective, and only one thread at a time may call them.

    A save continues from the step that this manager has loaded or saved last, or else from the
    latest. After ``load(template, 6000)`` and ``save(6500, ...)`` the step 7000 is abandoned: it is
    loaded by number alone, a new save of it replaces it when that commits, and retention deletes it
    as newer steps come. The function ``load`` looks at a step without going back to it.

    The pointer moves after a commit is durable, and old checkpoints are deleted after the pointer
    has moved. If a process was killed in between, the next manager corrects the pointer. The latest
    and the last verified checkpoint are always kept, and so is everything that no manager of this
    root wrote. Verified is what ``verify`` or ``latest_valid`` has read, or a ``load`` without a
    step by ranks that together ask for all of it. A damaged checkpoint that was skipped is replaced
    by a new save of its step. A checkpoint with an I/O error does not count as damaged.

    Args:
        places: folder of the run, made if it is missing, or its URL; or a list of places, nearest
            first: a folder on a disk, and a URL. Each machine may have a disk of its own, and the
            folders any names: ranks find out which of them share one. A step is read from the disks
            as far as it is there.
        sharded_strategy: see ``save``.
        comm: the ranks of the run; by default all of torch.distributed, or this process.
        retention: which checkpoints are kept, where a place does not say; by default all.
        on_error: what the next call does if an asynchronous save has failed. ``"raise"`` the error;
            ``"warn"``: log it and continue; ``"retry"`` the save, and raise if all attempts failed.
        retries: number of repeated attempts, for ``"retry"``.
        trusted: save anything that can be pickled, and unpickle anything when loading; see ``save``
            and ``load``.
        incremental: whether each save shares files with the latest checkpoint, see ``base`` of
            ``save``. A strategy that cannot do that is refused.
        fresh: unless a step is loaded, the first save begins a new history: it may have any number,
            and all other steps are abandoned.
        fingerprints: see ``save``; for all saves that do not say otherwise.
        replicas: likewise.
        on_replica_mismatch: likewise.
        on_saved: functions that rank 0 calls with a SavedStep after each commit, in the thread that
            commits; they must call no collective method of the manager. What they raise is logged.
            ``JsonLinesLog`` is one.

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
        places: Places,
        sharded_strategy: Selection[SaveShardedStrategy] = None,
        *,
        comm: Comm | None = None,
        retention: Retention | None = None,
        on_error: OnError = "raise",
        retries: int = 2,
        trusted: bool = False,
        incremental: bool = False,
        fresh: bool = False,
        fingerprints: bool = False,
        replicas: ReplicaCheck = ReplicaCheck.OFF,
        on_replica_mismatch: OnReplicaMismatch = "raise",
        on_saved: Hooks = (),
    ) -> None:
        given = dict(locals())
        self._strategy = sharded_strategy
        self._comm = chosen_comm(comm)
        for name, kind in _KINDS.items():
            if name != "places" and not fits(value := given.get(name), kind):
                is_choice = get_origin(kind) is Literal and isinstance(value, str)
                error = ValueError if is_choice else TypeError
                raise error(f"{name} must be {kind}, not {value!r}")
        if retries < 0:
            raise ValueError(f"retries must be at least 0, not {retries}")
        # Not relative to a working directory that may change between saves.
        listed = as_places(places, retention or Retention())
        self.root: Any = listed[-1].path
        self._run = Run(listed, on_saved, self._comm, incremental=incremental)
        if fresh:
            self._run.position = NO_STEP
        self._on_error, self._trusted = on_error, trusted
        if incremental:
            require_sharing_strategy(sharded_strategy, self._run.near.folder(0))
        self._save_options = {
            "trusted": trusted,
            "fingerprints": fingerprints,
            "replicas": replicas,
            "on_replica_mismatch": on_replica_mismatch,
        }
        self._plan_cache = PlanCache()
        self._saver = AsyncSaver(
            comm=self._comm,
            retries=retries if on_error == "retry" else 0,
            plan_cache=self._plan_cache,
        )
        self._signalled = threading.Event()

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of a step, or its ObjectPath; whether or not it exists."""
        return self._run.best_place(step)

    def save(
        self,
        step: int,
        state: ShardedStateDict | ShardedStateful,
        *,
        metric: SupportsFloat | None = None,
        **options: Any,
    ) -> None:
        """Save a step and return when it is committed.

        Args:
            step: number of the step, above the one that was loaded or saved last. Without one, it
                must be above the latest.
            state: see ``save``.
            metric: what ``Retention(keep_best=)`` and ``best`` go by, such as a loss. That of rank
                0 counts, and NaN counts as none.
            options: options of ``save``.

        Raises:
            CheckpointExistsError: if another manager has saved here since this one did.
            CheckpointingException: see ``save``; also if the disk is too full.
        """
        watch, given = Stopwatch(), {"comm": self._comm, "plan_cache": self._plan_cache}
        self.wait()
        try:
            self._save(save_with_hooks, state, step, metric, watch, {**given, **options})
        finally:
            self._run.end_replacing()

    def async_save(
        self,
        step: int,
        state: ShardedStateDict | ShardedStateful,
        *,
        metric: SupportsFloat | None = None,
        capture: Capture = "copy",
        **options: Any,
    ) -> SaveHandle:
        """Save a step in the background, after the last asynchronous save has ended.

        Args:
            step: see the method ``save``.
            state: see ``save``.
            metric: see the method ``save``.
            capture: see ``async_save``.
            options: options of ``async_save``.

        Raises:
            CheckpointingException: errors that ``save`` raises before it writes; also the error of
                the last asynchronous save, unless ``on_error="warn"``.
        """
        watch = Stopwatch()
        self.wait()
        save = partial(self._saver._save, step=step, capture=capture)  # noqa: SLF001 - for hooks
        handle: SaveHandle = self._save(save, state, step, metric, watch, options)
        watch.stop_blocking()
        return handle

    def _save(
        self,
        write: Callable[..., Any],
        state: ShardedStateDict | ShardedStateful,
        step: int,
        metric: SupportsFloat | None,
        watch: Stopwatch,
        options: Mapping[str, Any],
    ) -> Any:
        """Save a step to the nearest place that takes it."""
        options = {**self._save_options, "sharded_strategy": self._strategy, **options}
        place = 0
        while True:
            begun = self._run.begin(step, metric, watch, options, first=place)
            hooks, folder, chosen, place = begun
            try:
                return write(hooks, state, folder, **chosen)
            except NoRoomError as error:
                if self._comm.rank == 0:
                    logger.warning("step %d goes to the next place: %s", step, error)

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
            logger.warning("training continues without a checkpoint: %s", error)
        finally:
            self._run.end_replacing()

    def close(self) -> None:
        """Wait for the save in progress, and free the buffers and threads of the manager."""
        try:
            self.wait()
            self._run.close()
            self._comm.agree("closing the manager", None)
        finally:
            self._run.stop()
            self._saver.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error of this rank alone, the others would not come. A save in progress ends by
        # itself.
        if kind is None:
            self.close()

    def steps(self) -> list[int]:
        """All committed steps, oldest first."""
        return self._comm.from_rank0("listing the checkpoints", self._run.committed_steps)

    def latest(self) -> int | None:
        """The step that was committed last; the newest committed step if the pointer is lost."""
        return self._comm.from_rank0("finding the latest checkpoint", self._run.latest)

    def best(self) -> int | None:
        """The committed step with the best metric, as ``best`` of the retention says."""
        return self._comm.from_rank0("finding the best checkpoint", self._run.best)

    def latest_valid(self) -> int | None:
        """The newest step of the history that ``verify`` finds valid; logs why it skips newer ones.

        Raises:
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        for step in self._comm.from_rank0("looking for a valid checkpoint", self._run.tries):
            try:
                self.verify(step)
            except CheckpointingException as error:
                self._skip(step, error)
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
        comm, folder = self._comm, self._listed(step, near=False)
        share = {"rank": comm.rank, "world_size": comm.world_size}
        judge(comm, step, lambda: verify_checkpoint(folder, trusted=self._trusted, **share))
        self._note_valid(step, is_valid=comm.rank == 0)

    def load(
        self, template: ShardedStateDict | ShardedStateful, step: int | None = None, **options: Any
    ) -> StateDict:
        """Load a step, from which the run then continues.

        Args:
            template: see ``load``.
            step: number of the step. None for the newest one of the history in which nothing is
                damaged that the template asks for; the log says why newer ones are skipped, and
                given tensors may have been filled with parts of them before. The result does not
                tell which step that was, unless the training keeps its step in the common state.
            options: options of ``load``. If ``step`` is None, ``verify`` is True by default where
                the checkpoint has checksums.

        Raises:
            CheckpointNotFoundError: if no step can be loaded, with the reason for each; for a step
                that is not there, with those that are.
            StateMismatchError: if the template does not fit the newest of these steps.
            CheckpointingException: see ``load``.
            RankFailedError: if a rank has an I/O error, which does not mean damage.
        """
        self.wait()
        if step is None:
            return self._load_newest(template, options)
        options = {"trusted": self._trusted, **options}
        try:
            folder = self._run.prepare_read(step, template)
            loaded: StateDict = load(template, folder, comm=self._comm, **options)
        except CheckpointNotFoundError as error:
            steps = self.steps()
            if step in steps:
                raise
            known = ", ".join(map(str, steps[-_MOST_STEPS:]))
            others = Finding(f"its last steps are {known or 'none'}", path=str(self.root))
            findings = [*error.findings, others]
            raise CheckpointNotFoundError(f"step {step} is not there", findings) from error
        self._run.loaded(step, is_newest=False)
        return loaded

    def delete(self, step: int) -> None:
        """Delete a checkpoint that this manager, or an earlier one of the same root, wrote.

        Raises:
            CheckpointingException: if neither wrote it, or if it is the last verified one.
        """
        self.wait()
        self._run.delete(step)

    def save_on_signal(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Make ``preempted()`` return True after any rank has received the signal.

        The signal does nothing else: a training loop calls ``preempted()``, saves, and ends. Only
        the main thread may call this.
        """
        signal.signal(signum, lambda *_: self._signalled.set())

    def preempted(self) -> bool:
        """Whether any rank has received the signal of ``save_on_signal``."""
        return not self._comm.all_same(None if self._signalled.is_set() else 0)

    def _load_newest(
        self, template: ShardedStateDict | ShardedStateful, options: Mapping[str, Any]
    ) -> StateDict:
        comm = self._comm
        skipped: list[Finding] = []
        given = [options.get(name) for name in ("sharded_strategy", "common_strategy")]
        # Of a strategy of the caller this says nothing about the checkpoint.
        unreadable = (UnsupportedFormatError,) if given == [None, None] else ()
        for step in comm.from_rank0("looking for the newest checkpoint", self._run.tries):
            # Raised by a load, anything else is about the template.
            kinds: tuple[type[CheckpointingException], ...] = (CheckpointingException,)
            try:
                folder = self._listed(step, template)
                # Else the other ranks would wait for what rank 0 does not see either.
                comm.from_rank0(f"finding step {step}", partial(read_config, folder))
                if not self._run.has_part(folder):  # of which the run has looked at the files
                    check = partial(check_sealed_files, folder, comm.rank, comm.world_size)
                    judge(comm, step, check)
                what = f"looking for checksums of step {step}"
                verify = comm.from_rank0(what, partial(is_verifiable, folder, given[0]))
                if not verify:
                    self.verify(step)  # as far as that goes
                chosen = {"trusted": self._trusted, "verify": verify, **options}
                kinds = (CorruptCheckpointError, *unreadable)
                loaded: StateDict = load(template, folder, comm=comm, **chosen)
            except kinds as error:
                skipped.append(self._skip(step, error))
                continue
            if verify and chosen["verify"] is True:
                self._note_valid(step, is_valid=asks_for_all(template, folder, comm))
            self._run.loaded(step, is_newest=True)
            return loaded
        raise CheckpointNotFoundError(f"{self.root} holds no valid checkpoint", skipped)

    def _listed(self, step: int, wanted: Any = None, *, near: bool = True) -> Location:
        """The folder of a step that is read as a whole; see ``prepare_read``. Collective."""
        folder = self._run.prepare_read(step, wanted, near=near)
        with self._comm.agreed(f"listing step {step}"):
            return listed_once(folder)

    def _note_valid(self, step: int, *, is_valid: bool) -> None:
        """Record that all of a step is valid, on the rank that says so: rank 0. Collective."""
        with self._comm.agreed(f"noting that step {step} is valid"):
            if is_valid:
                self._run.verified(step)

    def _skip(self, step: int, error: CheckpointingException) -> Finding:
        """Log why a step cannot be loaded."""
        if isinstance(error, RankFailedError):
            raise error  # this is about the ranks, not about the checkpoint
        logger.warning("step %d is skipped: %s", step, error)
        finding = Finding(str(error), path=str(self._run.best_place(step)))
        self._run.skip(step, error)
        return finding


_KINDS: Final = get_type_hints(CheckpointManager.__init__)
