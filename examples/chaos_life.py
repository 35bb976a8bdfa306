"""One life of a training: from its start to its end, or to the kill that is meant for it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dist_checkpointing import CheckpointManager, Retention
from dist_checkpointing.comm import Comm, SingleProcess, TorchComm
from harness import Launch, LaunchError, Tell
from managed_training import train_managed
from tensor_parallel import Ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState

Whom = Literal["rank", "all"]
Since = Literal["meeting", "first step"]

SMALL = GPTConfig(width=64, num_layers=2, num_heads=4, mlp_width=128, context_length=64)
"""The model of the demo with fewer and smaller layers: 13 ms a step on one core."""

WHOM: Sequence[Whom] = ("rank", "all")

DEAD_AFTER_SECONDS = 3.0
"""How long ranks wait for one another before they say that one is gone."""

LONGEST_SECONDS = 1.5
"""A kill comes so long after the first step, or earlier."""

LONGEST_RESUMING_SECONDS = 0.5
RESUMING_SHARE = 0.2
"""How many of the kills come so soon after the ranks have met, when they resume."""


class ChaosError(Exception):
    """What must not happen has happened."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of a life do.

    Attributes:
        folder: Folder of the run, its checkpoints; a text is the URL of an object store.
        backend: Backend that they are saved with.
        steps: Number of steps to reach.
        save_every: Steps between two saves.
        incremental: Whether the embedding is frozen, and checkpoints share what has not changed.
    """

    folder: Path | str
    backend: str
    steps: int
    save_every: int
    incremental: bool = False

    @property
    def slowness(self) -> float:
        """How much longer saves take than those on a disk."""
        return 1.0 if isinstance(self.folder, Path) else 4.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill -9.

    Attributes:
        whom: One rank, or all ranks at once.
        rank: Which rank; of no meaning for all ranks.
        since: When the clock starts: when all ranks have met, which is when they begin to look for
            a checkpoint, or when they have trained a step.
        seconds: How long after that.
    """

    whom: Whom
    rank: int
    since: Since
    seconds: float


@dataclass(slots=True)
class Story:
    """What happened in a life.

    Attributes:
        exit_codes: Exit codes of all ranks.
        resumed: The step that was loaded; None if the training began.
        skipped: (step, why) of the checkpoints that were passed over.
        losses: (step, loss as hexadecimal) in the order they came.
        errors: Rank -> what it ended with by itself.
        killed: Who was killed indeed; None if everything was over by then.
    """

    exit_codes: list[int] = field(default_factory=list)
    resumed: int | None = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    losses: list[tuple[int, str]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    killed: Whom | None = None

    @property
    def has_finished(self) -> bool:
        return set(self.exit_codes) == {0}


class Life:
    """One launch of the ranks, which ends by itself or by a kill.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._launch = Launch(size)
        self._size = size
        self.end = self._launch.end

    def run(self, job: Job, kill: Kill | None, after_kill: Callable[[], None]) -> Story:
        """Train until all ranks have ended.

        Args:
            job: What to do.
            kill: Whom to kill and when, if the training is not done by then.
            after_kill: Called while the survivors find out.

        Raises:
            ChaosError: If a rank that was not killed hangs, or dies of a signal.
        """
        story, ready = Story(), set[int]()
        kill_at: float | None = None

        def look() -> None:
            nonlocal kill_at
            if kill is None or story.killed is not None:
                return
            begun = len(ready) == self._size if kill.since == "meeting" else bool(story.losses)
            if kill_at is None and begun:
                kill_at = time.monotonic() + kill.seconds
            if kill_at is not None and time.monotonic() >= kill_at:
                self._launch.kill(None if kill.whom == "all" else [kill.rank])
                story.killed = kill.whom
                after_kill()

        self._launch.begin(train, job)
        try:
            for rank, word, value in self._launch.heard(look):
                if word == "ready":
                    ready.add(rank)
                elif word == "resumed":
                    story.resumed = value
                elif word == "error":
                    story.errors[rank] = value
                else:
                    {"skipped": story.skipped, "loss": story.losses}[word].append(value)
        except LaunchError as error:
            raise ChaosError(str(error)) from error
        story.exit_codes = self._launch.exit_codes()
        if -signal.SIGKILL not in story.exit_codes:
            story.killed = None  # they had ended before
        died = [code for code in story.exit_codes if code < 0 and code != -signal.SIGKILL]
        if died:
            raise ChaosError(f"a rank died of a signal that nobody sent: {died}")
        return story


def train(job: Job, ranks: Ranks, tell: Tell) -> None:
    """What each rank does."""
    comm: Comm = SingleProcess()
    if ranks.size > 1:
        comm = TorchComm(torch.distributed.new_group(), job.slowness * DEAD_AFTER_SECONDS)
    retention = Retention(keep_last=3, keep_every=50)
    manager = CheckpointManager(
        job.folder,
        job.backend,
        comm=comm,
        retention=retention,
        incremental=job.incremental,
    )
    state = TrainingState(SMALL, ranks)
    state.model.embedding.weight.requires_grad_(not job.incremental)
    if ranks.rank == 0:
        logging.getLogger("dist_checkpointing").addHandler(_Skipped(tell))
    tell("ready", None)

    def tell_once(word: str, value: Any) -> None:
        if ranks.rank == 0:
            tell(word, value)

    train_managed(
        state,
        Text(),
        manager,
        until=job.steps,
        save_every=job.save_every,
        on_resume=lambda step: tell_once("resumed", step),
        on_step=lambda step, loss: tell_once("loss", (step, loss.hex())),
    )


class _Skipped(logging.Handler):
    """What the manager logs about checkpoints that it passes over."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if "is skipped" in record.msg and isinstance(record.args, Sequence):
            step, error = record.args
            self._tell("skipped", (step, str(error).splitlines()[0]))
