"""The checkpoints of a run that can be loaded: found by reading them, newest first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from dist_checkpointing.checkpoint.verify_checkpoint import verify_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.manager.checks import (
    asks_for_all,
    check_sealed_files,
    check_structure,
    is_verifiable,
    judge,
)
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.manager.tiers import TieredRun
from dist_checkpointing.mapping import ShardedStateDict, ShardedStateful, StateDict
from dist_checkpointing.serialization.load import load

logger: logging.Logger = logging.getLogger(__name__)


class ValidSteps:
    """Which steps of a run can be loaded. All methods are collective.

    Args:
        files: the folder of the run.
        comm: the ranks of the run.
        trusted: see ``load``.

    Attributes:
        damaged: Step -> number of its save that was found damaged.
    """

    def __init__(self, files: RunFolder | TieredRun, comm: Comm, *, trusted: bool) -> None:
        self._files = files
        self._comm = comm
        self._trusted = trusted
        self.damaged: dict[int, int] = {}

    def latest(self, check: Literal["contents", "structure"]) -> int | None:
        """See ``CheckpointManager.latest_valid``."""
        for step, number in self._saves():
            try:
                if check == "contents":
                    self.verify(step)
                else:
                    judge(self._comm, step, partial(check_structure, self._files.ready(step)))
            except CheckpointingException as error:
                self._skip(step, number, error)
            else:
                return step
        return None

    def verify(self, step: int) -> None:
        """See ``CheckpointManager.verify``."""
        rank, world_size = self._comm.rank, self._comm.world_size
        folder = self._files.ready(step, near=False)
        judge(
            self._comm,
            step,
            lambda: verify_checkpoint(
                folder, rank=rank, world_size=world_size, trusted=self._trusted
            ),
        )
        self._note_valid(step, is_valid=rank == 0)

    def load_newest(
        self, template: ShardedStateDict | ShardedStateful, options: Mapping[str, Any]
    ) -> StateDict:
        """See ``CheckpointManager.load``."""
        comm = self._comm
        skipped: list[Finding] = []
        given = [options.get(name) for name in ("sharded_strategy", "common_strategy")]
        # Of a strategy of the caller this says nothing about the checkpoint.
        unreadable = (UnsupportedFormatError,) if given == [None, None] else ()
        for step, number in self._saves():
            try:
                folder = self._files.ready(step)
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
        raise CheckpointNotFoundError(f"{self._files.root} holds no valid checkpoint", skipped)

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
        folder = self._files.place(step)
        self._files.skip(step)
        if isinstance(error, CorruptCheckpointError):
            self.damaged[step] = number
        return Finding(str(error), path=str(folder))
