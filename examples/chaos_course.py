"""One training from its first step to its last, in as many lives as the kills leave it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chaos_life import (
    LONGEST_RESUMING_SECONDS,
    LONGEST_SECONDS,
    RESUMING_SHARE,
    WHOM,
    ChaosError,
    Job,
    Kill,
    Life,
    Story,
)
from dist_checkpointing import CheckpointingException, CheckpointManager
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.filesystem.object_store import ObjectPath


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
        whom = self._random.choice(WHOM)
        rank = self._random.randrange(self._world_size)
        if self._random.random() < RESUMING_SHARE:
            return Kill(whom, rank, "meeting", self._random.uniform(0, LONGEST_RESUMING_SECONDS))
        longest = job.slowness * LONGEST_SECONDS
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
    place.store.delete([info.key for info in place.store.list_below(place.prefix)])


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
