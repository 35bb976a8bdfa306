"""One training from its first step to its last, in as many lives as the kills leave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos_ranks import ChaosError, Job, Kill, Life, Story, Whom, Worker
from dist_checkpointing import CheckpointingException, CheckpointManager
from dist_checkpointing.comm import SingleProcess

LONGEST_SECONDS: Mapping[Worker, float] = {"thread": 1.5, "process": 4.0}
"""A kill comes so long after the first step, or earlier; a worker has to start first."""

LONGEST_RESUMING_SECONDS = 0.5
RESUMING_SHARE = 0.2
"""How many of the kills come so soon after the ranks have met, when they resume."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A life and its end.

    Attributes:
        story: what happened.
        kill: who should die; None if nobody.
        was_saving: a save that never became a checkpoint was under way at the end.
    """

    story: Story
    kill: Kill | None
    was_saving: bool


@dataclass(slots=True)
class Course:
    """One training.

    Attributes:
        folder: of its checkpoints.
        backend: they are saved with.
        steps: number of steps to reach.
        save_every: steps between two saves.
        worker: who writes them.
        endings: of its lives, in order.
        losses: step -> loss as hexadecimal.
        reached: the newest step that was ever committed.
        verified: number of checkpoints that were left and found whole.
    """

    folder: Path
    backend: str
    steps: int
    save_every: int
    worker: Worker = "thread"
    endings: list[Ending] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)
    reached: int = 0
    verified: int = 0

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
        world_size: ranks of a training.
        random: decides who dies and when.
        kills: number of kills.
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
            course: filled with what happens.
            expected: step -> loss of an undisturbed training; None to be that one.
            tell: called after every life.

        Raises:
            ChaosError: if anything is not as it must be.
        """
        job = Job(course.folder, course.backend, course.steps, course.save_every, course.worker)
        while True:
            kill = None
            if expected is not None and self.goes_on and course.reached < course.steps:
                kill = self._next_kill(course.worker)
            life, self._standby = self._standby or Life(self._world_size), None
            try:
                story = life.run(job, kill, self._prepare)
            finally:
                life.end()
            committed_before = course.reached
            course.endings.append(Ending(story, kill, _check_folder(course)))
            self.kills_done += story.killed is not None
            _check_resumed(story, committed_before)
            _check_story(course, story, expected)
            tell(course)
            if story.has_finished:
                break
        _check_whole(course)

    def end(self) -> None:
        """End processes that wait for a life that never comes."""
        if self._standby is not None:
            self._standby.end()

    def _next_kill(self, worker: Worker) -> Kill:
        choices: list[Whom] = ["rank", "all"] if worker == "thread" else ["rank", "all", "worker"]
        whom = self._random.choice(choices)
        rank = self._random.randrange(self._world_size)
        if whom != "worker" and self._random.random() < RESUMING_SHARE:
            return Kill(whom, rank, "meeting", self._random.uniform(0, LONGEST_RESUMING_SECONDS))
        return Kill(whom, rank, "first step", self._random.uniform(0, LONGEST_SECONDS[worker]))

    def _prepare(self) -> None:
        """The next processes import torch while the survivors of this life find out."""
        self._standby = Life(self._world_size)


def _check_folder(course: Course) -> bool:
    """That no checkpoint is lost; whether there is one that was begun and not committed."""
    committed = CheckpointManager(course.folder, comm=SingleProcess()).steps()
    newest = max(committed, default=0)
    if newest < course.reached:
        raise ChaosError(f"step {course.reached} was committed, and now the newest is {newest}")
    course.reached = newest
    folders = [path for path in course.folder.glob("step-*") if path.is_dir()]
    return any(int(path.name.removeprefix("step-")) > newest for path in folders)


def _check_resumed(story: Story, committed: int) -> None:
    """That a life that got as far as a step went on from the newest commit before it."""
    if (story.losses or story.resumed is not None) and (story.resumed or 0) != committed:
        raise ChaosError(f"resumed from step {story.resumed}, but step {committed} was committed")


def _check_story(course: Course, story: Story, expected: Mapping[int, str] | None) -> None:
    if story.killed is None and not story.has_finished:
        raise ChaosError(f"nobody was killed, and yet it ended: {story.errors}")
    for step, loss in story.losses:
        right = course.losses.setdefault(step, loss) if expected is None else expected[step]
        if loss != right:
            found, wanted = float.fromhex(loss), float.fromhex(right)
            raise ChaosError(
                f"{course.backend}, step {step}: loss {found!r} after resuming from "
                f"{story.resumed}, undisturbed {wanted!r}"
            )
        course.losses[step] = loss


def _check_whole(course: Course) -> None:
    manager = CheckpointManager(course.folder, comm=SingleProcess())
    for step in manager.steps():
        try:
            manager.verify(step)
        except CheckpointingException as error:
            raise ChaosError(f"step {step} is committed, but not whole: {error}") from error
        course.verified += 1
    if course.losses.keys() != set(range(1, course.steps + 1)) or course.reached != course.steps:
        raise ChaosError(f"{course.backend}: the training ended before its last step")
