"""That chaos sees what must not happen, and one small chaos from end to end."""

import random
import re
import signal
import time
from pathlib import Path

import pytest

import dist_checkpointing
from chaos_course import Course, Mayhem
from chaos_life import ChaosError, Job, Kill, Life, Story
from damage import damage
from dist_checkpointing import CheckpointManager
from dist_checkpointing.comm import SingleProcess
from harness import LaunchError, Tell, run_ranks
from scripts import run_fresh
from states import shard
from tensor_parallel import Ranks

ROOT = Path(dist_checkpointing.__file__).parents[1]
SCRIPT = ROOT / "examples" / "chaos.py"
SIGKILL = -int(signal.SIGKILL)


class ToldLife(Life):
    """A life of which the end is known."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.end = lambda: None

    def run(self, job: Job, kill: Kill | None, after_kill: object) -> Story:  # noqa: ARG002
        return self._story


def course_of(story: Story, root: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A training of two steps, whose first and only life is this story."""
    monkeypatch.setattr("chaos_course.Life", lambda _: ToldLife(story))
    course = Course(Job(root, "tensorstore", 2, 1))
    mayhem = Mayhem(world_size=2, random=random.Random(1), kills=1, deadline=time.monotonic() + 60)
    mayhem.run(course, {1: (2.0).hex(), 2: (1.0).hex()}, lambda _: None)
    return course


def commit(root: Path, *steps: int) -> CheckpointManager:
    import torch

    manager = CheckpointManager(root, comm=SingleProcess())
    for step in steps:
        manager.save(step, {"w": shard("w", torch.ones(1000))})
    return manager


def story(*losses: tuple[int, float], resumed: int | None = None) -> Story:
    return Story([0, 0], resumed, [], [(step, loss.hex()) for step, loss in losses])


FINISHED = story((1, 2.0), (2, 1.0))


def test_a_training_as_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path, 1, 2)
    course = course_of(FINISHED, tmp_path, monkeypatch)
    assert course.verified == 2
    assert course.reached == 2


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (story((1, 2.0), (2, 1.0 + 2**-40)), "step 2: loss"),
        (story((1, 2.0)), "before its last step"),
        (Story([1, 0], errors={0: "OSError: no space"}), "OSError: no space"),
    ],
    ids=["another loss", "missing steps", "an end without a kill"],
)
def test_what_must_not_happen_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Story, words: str
) -> None:
    commit(tmp_path, 1, 2)
    with pytest.raises(ChaosError, match=words):
        course_of(told, tmp_path, monkeypatch)


def test_a_damaged_checkpoint_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(commit(tmp_path, 1, 2).folder(1))
    with pytest.raises(ChaosError, match="step 1 is committed, but not whole"):
        course_of(FINISHED, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("committed", "told", "words"),
    [
        ([1], FINISHED, "step 2 was committed, and now the newest is 1"),
        ([1, 2], story((2, 1.0), resumed=1), "resumed from step 1, but step 2 was committed"),
    ],
    ids=["lost", "an old one"],
)
def test_a_lost_checkpoint_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: list[int], told: Story, words: str
) -> None:
    commit(tmp_path, *committed)
    course = Course(Job(tmp_path, "tensorstore", 2, 1), reached=2)
    monkeypatch.setattr("chaos_course.Life", lambda _: ToldLife(told))
    mayhem = Mayhem(world_size=2, random=random.Random(1), kills=0, deadline=0.0)
    with pytest.raises(ChaosError, match=words):
        mayhem.run(course, {2: (1.0).hex()} if told.resumed else None, lambda _: None)


def _fail_on_rank_1(job: str, ranks: Ranks, tell: Tell) -> None:
    tell("begun", job)
    if ranks.rank == 1:
        raise ValueError("a bug")


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(LaunchError, match="rank 1: ValueError: a bug"):
        run_ranks(2, _fail_on_rank_1, "job")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")
def test_a_small_chaos_ends_well(tmp_path: Path) -> None:
    options = ["--kills", "1", "--minutes", "2", "--seed", "1", "--steps", "12", "--incremental"]
    finished = run_fresh(SCRIPT, *options, "--folder", tmp_path / "out", timeout=280)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    assert "FAILED" not in finished.stdout
    found = re.search(r"killed with SIGKILL\W+(\d+)", finished.stdout)
    assert found is not None
    assert int(found[1]) >= 1
    assert "files shared" in finished.stdout
    assert (tmp_path / "out" / "chaos.png").stat().st_size > 10_000
