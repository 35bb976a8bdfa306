"""One training from its first step to its last, in as many lives as the kills leave it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from dist_checkpointing import CheckpointingException, CheckpointManager, Retention
from dist_checkpointing.comm import Comm, SingleProcess, TorchComm
from dist_checkpointing.filesystem.object_path import ObjectPath
from harness import Launch, LaunchError, Tell
from managed_training import train_managed
from tensor_parallel import Ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState

Whom = Literal["rank", "all", "worker"]
Worker = Literal["thread", "process"]
Since = Literal["meeting", "first step"]

SMALL = GPTConfig(width=64, num_layers=2, num_heads=4, mlp_width=128, context_length=64)
"""The model of the demo with fewer and smaller layers: 13 ms a step on one core."""

DEAD_AFTER_SECONDS: Mapping[Worker, float] = {"thread": 3.0, "process": 6.0}
"""How long ranks wait for one another before they say that one is gone; workers start slowly."""

LONGEST_SECONDS: Mapping[Worker, float] = {"thread": 1.5, "process": 4.0}
"""A kill comes so long after the first step, or earlier; a worker has to start first."""

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
        worker: Who writes, see ``AsyncSaver``.
        incremental: Whether the embedding is frozen, and checkpoints share what has not changed.
    """

    folder: Path | str
    backend: str
    steps: int
    save_every: int
    worker: Worker = "thread"
    incremental: bool = False

    @property
    def slowness(self) -> float:
        """How much longer saves take than those on a disk."""
        return 1.0 if isinstance(self.folder, Path) else 4.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill -9.

    Attributes:
        whom: One rank, all ranks at once, or only the process that writes for one rank.
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
            if kill_at is not None and time.monotonic() >= kill_at and self._strike(kill):
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
        if story.killed != "worker" and -signal.SIGKILL not in story.exit_codes:
            story.killed = None  # they had ended before
        died = [code for code in story.exit_codes if code < 0 and code != -signal.SIGKILL]
        if died:
            raise ChaosError(f"a rank died of a signal that nobody sent: {died}")
        return story

    def _strike(self, kill: Kill) -> bool:
        """Kill; False if there is no such process yet."""
        if kill.whom == "worker":
            pid = self._launch.writer_of(kill.rank)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return pid is not None
        self._launch.kill(None if kill.whom == "all" else [kill.rank])
        return True


def train(job: Job, ranks: Ranks, tell: Tell) -> None:
    """What each rank does."""
    comm: Comm = SingleProcess()
    if ranks.size > 1:
        comm = TorchComm(
            torch.distributed.new_group(), job.slowness * DEAD_AFTER_SECONDS[job.worker]
        )
    retention = Retention(keep_last=3, keep_every=50)
    manager = CheckpointManager(
        job.folder,
        job.backend,
        comm=comm,
        retention=retention,
        worker=job.worker,
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


@dataclass(frozen=True, slots=True)
class Ending:
    """A life and its end.

    Attributes:
        story: What happened.
        kill: Who should die; None if nobody.
        was_saving: A save that never became a checkpoint was under way at the end.
    """

    story: Story
    kill: Kill | None
    was_saving: bool


@dataclass(slots=True)
class Course:
    """One training.

    Attributes:
        job: What its ranks do.
        endings: Ends of its lives, in order.
        losses: Step -> loss as hexadecimal.
        reached: The newest step that was ever committed.
        verified: Number of checkpoints that were left and found whole.
        shared: Number of files that these share.
    """

    job: Job
    endings: list[Ending] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    reached: int = 0
    verified: int = 0
    shared: int = 0

    @property
    def kills(self) -> list[Ending]:
        return [ending for ending in self.endings if ending.story.killed]

    @property
    def resumes(self) -> int:
        return sum(ending.story.resumed is not None for ending in self.endings)

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """(step, why) of the checkpoints that were passed over when resuming."""
        return [skip for ending in self.endings for skip in ending.story.skipped]

    @property
    def num_trained(self) -> int:
        """Steps, also those that were trained once more."""
        return sum(len(ending.story.losses) for ending in self.endings)


class Mayhem:
    """Runs trainings and kills them until there were enough kills, or the time is over.

    Args:
        world_size: Ranks of a training.
        random: Decides who dies and when.
        kills: Number of kills.
        deadline: ``time.monotonic()`` after which nobody is killed.
    """

    def __init__(self, *, world_size: int, random: Random, kills: int, deadline: float) -> None:
        self.kills_done = 0
        self._world_size = world_size
        self._random = random
        self._kills = kills
        self._deadline = deadline
        self._standby: Life | None = None

    @property
    def goes_on(self) -> bool:
        return self.kills_done < self._kills and time.monotonic() < self._deadline

    def run(
        self,
        course: Course,
        expected: Mapping[int, str] | None,
        tell: Callable[[Course], None],
    ) -> None:
        """Train to the last step.

        Args:
            course: Filled with what happens.
            expected: Step -> loss of an undisturbed training; None to be that one.
            tell: Called after every life.

        Raises:
            ChaosError: If anything is not as it must be.
        """
        while True:
            kill = None
            if expected is not None and self.goes_on and course.reached < course.job.steps:
                kill = self._next_kill(course.job)
            life, self._standby = self._standby or Life(self._world_size), None
            try:
                story = life.run(course.job, kill, self._prepare)
            finally:
                life.end()
            committed_before = course.reached
            course.endings.append(Ending(story, kill, _check_folder(course)))
            self.kills_done += story.killed is not None
            _check_story(course, story, expected, committed_before)
            tell(course)
            if story.has_finished:
                break
        _check_whole(course)

    def end(self) -> None:
        """End processes that wait for a life that never comes."""
        if self._standby is not None:
            self._standby.end()

    def _next_kill(self, job: Job) -> Kill:
        choices: list[Whom] = ["rank", "all"]
        if job.worker == "process":
            choices.append("worker")
        whom = self._random.choice(choices)
        rank = self._random.randrange(self._world_size)
        if whom != "worker" and self._random.random() < RESUMING_SHARE:
            return Kill(whom, rank, "meeting", self._random.uniform(0, LONGEST_RESUMING_SECONDS))
        longest = job.slowness * LONGEST_SECONDS[job.worker]
        return Kill(whom, rank, "first step", self._random.uniform(0, longest))

    def _prepare(self) -> None:
        """The next processes import torch while the survivors of this life find out."""
        self._standby = Life(self._world_size)


def _check_folder(course: Course) -> bool:
    """That no checkpoint is lost; whether there is one that was begun and not committed."""
    committed = CheckpointManager(course.job.folder, comm=SingleProcess()).steps()
    newest = max(committed, default=0)
    if newest < course.reached:
        raise ChaosError(f"step {course.reached} was committed, and now the newest is {newest}")
    course.reached = newest
    steps = (name for name in _names_in(course.job.folder) if name.startswith("step-"))
    return any(int(name.removeprefix("step-")) > newest for name in steps)


def _names_in(folder: Path | str) -> list[str]:
    """Names of the folders in a folder."""
    if isinstance(folder, Path):
        return [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    place = ObjectPath.of(folder)
    return place.store.list_folder(place.prefix)[0]


def remove_run(folder: Path | str) -> None:
    """Delete all checkpoints of a training."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    place = ObjectPath.of(folder)
    place.store.delete(info.key for info in place.store.list_below(place.prefix))


def _check_story(
    course: Course, story: Story, expected: Mapping[int, str] | None, committed: int
) -> None:
    """That it went on from the newest commit before it, with the losses that it should have."""
    if (story.losses or story.resumed is not None) and (story.resumed or 0) != committed:
        raise ChaosError(f"resumed from step {story.resumed}, but step {committed} was committed")
    if story.killed is None and not story.has_finished:
        raise ChaosError(f"nobody was killed, and yet it ended: {story.errors}")
    for step, loss in story.losses:
        right = course.losses.setdefault(step, loss) if expected is None else expected[step]
        if loss != right:
            found, wanted = float.fromhex(loss), float.fromhex(right)
            raise ChaosError(
                f"{course.job.backend}, step {step}: loss {found!r} after resuming from "
                f"{story.resumed}, undisturbed {wanted!r}"
            )
        course.losses[step] = loss


def _check_whole(course: Course) -> None:
    job, manager = course.job, CheckpointManager(course.job.folder, comm=SingleProcess())
    for step in manager.steps():
        try:
            manager.verify(step)
        except CheckpointingException as error:
            raise ChaosError(f"step {step} is committed, but not whole: {error}") from error
        course.verified += 1
    if isinstance(job.folder, Path):
        files = {path.stat() for path in job.folder.rglob("*") if path.is_file()}
        course.shared = len({status.st_ino for status in files if status.st_nlink > 1})
    if job.incremental and not course.shared:
        raise ChaosError(f"{job.backend}: the checkpoints share nothing")
    if course.losses.keys() != set(range(1, job.steps + 1)) or course.reached != job.steps:
        raise ChaosError(f"{job.backend}: the training ended before its last step")
