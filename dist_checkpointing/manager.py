"""CheckpointManager: the checkpoints of one training run, one folder a step."""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, Self

from dist_checkpointing.async_saving import AsyncSaver, Capture, Finalize, SaveHandle
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.commit import (
    attempt_of,
    check_is_distributed_checkpoint,
    read_config,
    remove_checkpoint,
)
from dist_checkpointing.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
)
from dist_checkpointing.index import Index
from dist_checkpointing.loading import load, open_checkpoint
from dist_checkpointing.mapping import ShardedStateDict, StateDict
from dist_checkpointing.options import Durability
from dist_checkpointing.planned_save import PlanCache
from dist_checkpointing.retention import Retention
from dist_checkpointing.run_record import RunRecord, StepRecord, read_record, write_record
from dist_checkpointing.saving import save
from dist_checkpointing.store import check_room
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection
from dist_checkpointing.verify import verify_checkpoint

logger = logging.getLogger(__name__)

_FOLDER: Final = re.compile(r"step-(\d+)")

OnError = Literal["raise", "warn", "retry"]


class CheckpointManager:
    """Saves, finds, loads and thins out the checkpoints of one run.

    ``ROOT/step-00000100`` is the checkpoint of step 100; ``ROOT/manager.json`` names the latest
    one and all steps that were written here. One run uses a root at a time. All methods are
    collective, and none is for several threads at once.

    The pointer moves only after a commit is durable, and old checkpoints go only after the pointer
    has moved. The latest and the last verified one always stay, and nothing is deleted that the
    manager did not write. A damaged one that ``latest_valid`` has skipped makes room for a new save
    of its step.

    Args:
        root: made if it is missing.
        sharded_strategy: see ``save``.
        comm: the ranks of the run; by default all of torch.distributed, or this process.
        retention: which checkpoints are kept; by default all.
        on_error: what the next call does about an asynchronous save that failed: ``"raise"``;
            ``"warn"``, so that training goes on without that checkpoint; or ``"retry"``: it has
            been written ``retries`` more times by then, and raises if that was in vain.
        retries: how often, for ``"retry"``.
        finalize: see ``AsyncSaver``.
        trusted: unpickle anything when loading, see ``load``.
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
        trusted: bool = False,
    ) -> None:
        if on_error not in ("raise", "warn", "retry"):
            raise ValueError(f"on_error must be 'raise', 'warn' or 'retry', not {on_error!r}")
        self.root = Path(root)
        self._strategy = sharded_strategy
        self._comm = default_comm() if comm is None else comm
        self._retention = Retention() if retention is None else retention
        self._on_error = on_error
        self._trusted = trusted
        self._plan_cache = PlanCache()
        self._saver = AsyncSaver(
            comm=self._comm,
            finalize=finalize,
            retries=retries if on_error == "retry" else 0,
            plan_cache=self._plan_cache,
        )
        self._damaged: set[int] = set()
        self._signalled = threading.Event()
        # The thread that commits moves the pointer while the training may ask for steps.
        self._lock = threading.RLock()

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.root / f"step-{step:08d}"

    def save(self, step: int, state: ShardedStateDict, **options: Any) -> None:
        """Save a step and return when it is committed.

        Args:
            step: its folder must hold no checkpoint.
            state: see ``save``.
            options: of ``save``.

        Raises:
            CheckpointingException: see ``save``; also if there is no room.
        """
        self.wait()
        self._begin(step)
        save(
            state,
            self.folder(step),
            self._strategy,
            comm=self._comm,
            plan_cache=self._plan_cache,
            before_claim=self._preflight(step),
            **options,
        )
        with self._comm.agreed("moving the pointer"):
            if self._comm.rank == 0:
                self._committed(step)

    def async_save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        capture: Capture = "copy",
        **options: Any,
    ) -> SaveHandle:
        """Save a step behind the training, after the last such save has ended.

        Args:
            step: its folder must hold no checkpoint.
            state: see ``save``.
            capture: see ``async_save``.
            options: of ``async_save``.

        Raises:
            CheckpointingException: what ``save`` raises before it writes, and, unless
                ``on_error="warn"``, what the last asynchronous save ended with.
        """
        self.wait()
        self._begin(step)
        return self._saver.save(
            state,
            self.folder(step),
            self._strategy,
            step=step,
            capture=capture,
            before_claim=self._preflight(step),
            on_committed=lambda: self._committed(step),
            **options,
        )

    def wait(self) -> None:
        """Wait for the asynchronous save under way.

        Raises:
            CheckpointingException: what it ended with, unless ``on_error="warn"``.
        """
        try:
            self._saver.wait()
        except CheckpointingException as error:
            if self._on_error != "warn":
                raise
            logger.warning("training goes on without a checkpoint: %s", error)

    def close(self) -> None:
        """Wait, and free what the manager holds."""
        try:
            self.wait()
        finally:
            self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # In an error of this rank alone the others will not come: what is under way ends by itself.
        if kind is None:
            self.close()

    def steps(self) -> list[int]:
        """All committed steps, oldest first."""
        return self._comm.from_rank0("listing the checkpoints", self._committed_steps)

    def latest(self) -> int | None:
        """The step that the pointer names; the newest committed one if the pointer is lost."""

        def find() -> int | None:
            pointer = self._record().latest
            if pointer is not None and check_is_distributed_checkpoint(self.folder(pointer)):
                return pointer
            return max(self._committed_steps(), default=None)

        return self._comm.from_rank0("finding the latest checkpoint", find)

    def latest_valid(self, *, check: Literal["contents", "structure"] = "contents") -> int | None:
        """The newest step that can be loaded; logs why it skipped each one that is newer.

        Args:
            check: ``"contents"`` reads all of a checkpoint, shared out among the ranks, and
                compares its checksums; ``"structure"`` reads only what describes it.
        """
        return self._find_valid(check)[0]

    def verify(self, step: int) -> None:
        """Read all of a checkpoint, shared out among the ranks, and compare its checksums.

        Raises:
            CheckpointNotFoundError: if it is not committed.
            CorruptCheckpointError: with everything that is damaged.
        """
        rank, world_size = self._comm.rank, self._comm.world_size
        with self._comm.agreed(f"verifying step {step}"):
            _as_damage(
                lambda: verify_checkpoint(
                    self.folder(step), rank=rank, world_size=world_size, trusted=self._trusted
                )
            )
        with self._comm.agreed(f"noting that step {step} is valid"):
            if rank == 0:
                self._change(step, lambda known: replace(known, verified=True))

    def load(
        self, template: ShardedStateDict, step: int | None = None, **options: Any
    ) -> StateDict:
        """Load a step.

        Args:
            template: see ``load``.
            step: None for ``latest_valid()``; the common state tells which one it was if the
                training keeps its step there.
            options: of ``load``.

        Raises:
            CheckpointNotFoundError: if there is none; says what is wrong with each that there is.
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
        """Delete a checkpoint that this manager (or one before it, in the same root) wrote.

        Raises:
            CheckpointingException: if it did not, or if the step is the last verified one.
        """
        self.wait()
        with self._comm.agreed(f"deleting step {step}"):
            if self._comm.rank == 0:
                with self._lock:
                    self._delete(step)

    def save_on_signal(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """From now on ``preempted()`` tells when any rank has received the signal.

        The handler only takes a note: a training loop asks, saves, and ends. Main thread only.
        """
        signal.signal(signum, lambda *_: self._signalled.set())

    def preempted(self) -> bool:
        """Whether any rank has received the signal of ``save_on_signal``."""
        return not self._comm.all_same(None if self._signalled.is_set() else 0)

    def _begin(self, step: int) -> None:
        """Note that the folder of a step will be ours, before there is anything in it."""
        with self._comm.agreed("beginning a save"):
            if type(step) is not int or step < 0:
                finding = Finding("a step is an int of at least 0", found=repr(step))
                raise CheckpointingException("cannot save this step", [finding])
            if self._comm.rank == 0:
                check_room(self.root, 0)
                with self._lock:
                    record = self._record()
                    if step in self._damaged and self._is_own(record, step):
                        # Training came here again from an older step: this one is of no use.
                        self._remove(step)
                        record = self._record()
                    taken = self.folder(step).exists()
                    if step not in record.steps and not taken:
                        self._write(record.with_step(step, StepRecord()), Durability.PAGE_CACHE)

    def _preflight(self, step: int) -> Callable[[Index | None], None]:
        def check(index: Index | None) -> None:
            num_bytes = 0
            if index is not None:
                num_bytes = sum(
                    math.prod(index[key].global_shape) * index[key].dtype.itemsize for key in index
                )
            check_room(self.folder(step), num_bytes)

        return check

    def _committed(self, step: int) -> None:
        with self._lock:
            record = self._record()
            known = StepRecord(attempt_of(self.folder(step)))
            if step not in record.steps:
                logger.debug("step %d was saved over the rest of a save that is not ours", step)
            record = replace(record.with_step(step, known), latest=step)
            self._write(record, Durability.FSYNC)
            self._thin_out(record)

    def _thin_out(self, record: RunRecord) -> None:
        committed = self._committed_steps()
        # What was saved after going back to an older step counts; what lies ahead of it stays.
        latest = record.latest
        assert latest is not None
        own = [step for step in committed if self._is_own(record, step) and step <= latest]
        protected = [step for step in (latest, record.last_verified) if step is not None]
        due = self._retention.due(own, protected)
        leftovers = [
            step
            for step in record.steps
            if step < latest and step not in committed and attempt_of(self.folder(step)) is not None
        ]
        for step in (*leftovers, *due.delete):
            self._try_to(self._remove, step)
        for step in due.strip:
            if not record.steps[step].stripped:
                self._try_to(self._strip, step)

    @staticmethod
    def _try_to(work: Callable[[int], None], step: int) -> None:
        """What cannot be deleted must not end a training: the next pass tries again."""
        try:
            work(step)
        except (OSError, CheckpointingException, NotImplementedError) as error:
            logger.warning("retention could not deal with step %d: %s", step, error)

    def _is_own(self, record: RunRecord, step: int) -> bool:
        known = record.steps.get(step)
        return (
            known is not None
            and known.attempt is not None
            and known.attempt == attempt_of(self.folder(step))
        )

    def _delete(self, step: int) -> None:
        record = self._record()
        problem = None
        if not self._is_own(record, step):
            problem = "no manager of this root wrote it"
        elif step == record.last_verified:
            problem = "it is the last checkpoint that is known to be valid"
        if problem is not None:
            finding = Finding(problem, path=str(self.folder(step)), remedy="Delete it by hand.")
            raise CheckpointingException(f"step {step} is not deleted", [finding])
        if record.latest == step:
            others = [other for other in self._committed_steps() if other != step]
            self._write(replace(record, latest=max(others, default=None)), Durability.FSYNC)
        self._remove(step)

    def _remove(self, step: int) -> None:
        remove_checkpoint(self.folder(step))
        self._write(self._record().without_step(step), Durability.PAGE_CACHE)

    def _strip(self, step: int) -> None:
        prefix = self._retention.optimizer_prefix
        folder = self.folder(step)
        open_checkpoint(folder).sharded.remove_sharded_tensors(folder, prefix)
        self._change(step, lambda known: replace(known, stripped=True))

    def _change(self, step: int, change: Callable[[StepRecord], StepRecord]) -> None:
        with self._lock:
            record = self._record()
            known = record.steps.get(step)
            if known is not None:
                changed = record.with_step(step, change(known))
                self._write(changed, Durability.PAGE_CACHE)

    def _find_valid(
        self, check: Literal["contents", "structure"]
    ) -> tuple[int | None, list[Finding]]:
        if check not in ("contents", "structure"):
            raise ValueError(f"check must be 'contents' or 'structure', not {check!r}")
        skipped = []
        for step in self._comm.from_rank0("listing the checkpoints", self._all_steps):
            try:
                if check == "contents":
                    self.verify(step)
                else:
                    with self._comm.agreed(f"checking step {step}"):
                        _as_damage(partial(_check_structure, self.folder(step)))
            except RankFailedError:
                raise  # that says something about the ranks, not about the checkpoint
            except CheckpointingException as error:
                logger.warning("step %d is skipped: %s", step, error)
                skipped.append(Finding(str(error), path=str(self.folder(step))))
                if isinstance(error, CorruptCheckpointError):
                    self._damaged.add(step)
            else:
                return step, skipped
        return None, skipped

    def _all_steps(self) -> list[int]:
        """Every step that has a folder, newest first."""
        if not self.root.is_dir():
            return []
        found = [(_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
        steps = [int(match[1]) for match, path in found if match is not None and path.is_dir()]
        return sorted((s for s in steps if self.folder(s).is_dir()), reverse=True)

    def _committed_steps(self) -> list[int]:
        steps = self._all_steps()
        return [s for s in reversed(steps) if check_is_distributed_checkpoint(self.folder(s))]

    def _record(self) -> RunRecord:
        return read_record(self.root)

    def _write(self, record: RunRecord, durability: Durability) -> None:
        write_record(record, self.root, durability)


def _check_structure(folder: Path) -> None:
    read_config(folder)
    found = open_checkpoint(folder)
    found.common.load_common(folder)
    found.sharded.load_tensors_metadata(folder)


def _as_damage(work: Callable[[], None]) -> None:
    """Whatever cannot be read is a property of the checkpoint, not a failure of the rank."""
    try:
        work()
    except CheckpointNotFoundError:
        raise
    except CheckpointingException as error:
        # Of one class on all ranks, whatever each of them found.
        raise CorruptCheckpointError(error.message, error.findings) from error
    except Exception as error:
        finding = Finding(f"{type(error).__name__}: {error}")
        raise CorruptCheckpointError("the checkpoint cannot be read", [finding]) from error
