"""Asynchronous saves of real processes that are killed, interrupted, or simply end."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from dist_checkpointing import CheckpointManager, load_plain_tensors
from real_ranks import processes

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).parent / "async_rank.py"
NOBODY, EVERYBODY = -1, -2
STEPS = 12


def run(
    scenario: str,
    root: Path,
    world_size: int,
    victim: int = NOBODY,
    kill_at: float = 0.0,
    *,
    steps: int = STEPS,
    is_fresh: bool = False,
) -> tuple[list[int | None], list[dict[str, Any] | None], list[str]]:
    """Exit codes, reports and outputs of all ranks."""
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    root.parent.mkdir(parents=True, exist_ok=True)
    reports = [root.parent / f"report-{rank}.json" for rank in range(world_size)]
    for path in reports:
        path.unlink(missing_ok=True)
    commands = [
        [
            *(SCRIPT, scenario, root, rank, world_size, store.port, steps),
            kill_at if victim in (rank, EVERYBODY) else -1.0,
        ]
        for rank in range(world_size)
    ]
    with processes(commands, is_fresh=is_fresh) as started:
        outputs = [process.communicate(timeout=90)[0] for process in started]
    found = [json.loads(path.read_text()) if path.exists() else None for path in reports]
    return [process.returncode for process in started], found, outputs


def assert_all_committed_are_right(root: Path) -> list[int]:
    """From outside, by one process, and without the manager's own opinion."""
    manager = CheckpointManager(root)
    for step in manager.steps():
        found = load_plain_tensors(manager.folder(step))
        rows, columns = found["w"].shape
        expected = range(step, rows * columns + step)
        assert found["step"] == step
        assert found["w"].reshape(-1).tolist() == list(expected), step
        assert set(found["optimizer.m"].reshape(-1).tolist()) == {step}
        assert set(found["s"].tolist()) == {-step}
    return manager.steps()


def test_a_run_that_nobody_disturbs(tmp_path: Path) -> None:
    codes, reports, outputs = run("train", tmp_path / "run", 3)
    assert codes == [0] * 3, outputs
    for report in reports:
        assert report is not None
        assert "error" not in report
        assert report["steps"] == [STEPS - 1, STEPS]
    assert assert_all_committed_are_right(tmp_path / "run") == [STEPS - 1, STEPS]


@pytest.mark.exhaustive
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Whoever dies, and whenever: what is committed is right, and training resumes from it."""
    moment = random.Random(20)
    best = 0
    for victim in (1, EVERYBODY):
        kill_at = moment.uniform(1, 4)
        codes, reports, outputs = run("train", tmp_path / "run", 3, victim, kill_at)
        for rank, (code, report) in enumerate(zip(codes, reports, strict=True)):
            killed = victim in (rank, EVERYBODY)
            assert code == (-signal.SIGKILL if killed else 0), outputs[rank]
            # The others hear of it, whatever they were at, instead of waiting for ever.
            assert report is None if killed else "error" in (report or {}), report
        steps = assert_all_committed_are_right(tmp_path / "run")
        assert max(steps, default=0) >= best, "a good checkpoint was lost"
        best = max(steps, default=0)
    codes, reports, outputs = run("train", tmp_path / "run", 3)
    assert codes == [0] * 3, outputs
    for report in reports:
        assert report is not None
        assert report.get("right"), report
        assert report["resumed"] == (best or None)
    assert assert_all_committed_are_right(tmp_path / "run")[-1] == STEPS


def test_a_part_of_the_world_saves_alone(tmp_path: Path) -> None:
    codes, _, outputs = run("part", tmp_path / "run", 3)
    assert codes == [0] * 3, outputs
    assert assert_all_committed_are_right(tmp_path / "run") == [1]


def test_async_save_makes_one_group_for_a_set_of_ranks(tmp_path: Path) -> None:
    """And the interpreter ends in order, although nobody closes what is kept."""
    codes, reports, outputs = run("kept", tmp_path / "run", 3, is_fresh=True)
    assert codes == [0] * 3, outputs
    for report in reports:
        assert report is not None
        assert len(set(report["groups"])) == 1
    assert assert_all_committed_are_right(tmp_path / "run") == [1, 2, 3]
    for step in (1, 2, 3):
        assert load_plain_tensors(tmp_path / f"pair-{step}")["w"].tolist() == [step] * 4


def test_dropped_savers_leave_nothing_to_the_other_ranks(tmp_path: Path) -> None:
    """Each rank drops its own when it likes; nobody else's save is cut off by that."""
    codes, reports, outputs = run("dropped", tmp_path / "run", 3, steps=5)
    assert codes == [0] * 3, outputs
    for report in reports:
        assert report is not None
        # The first also made the channel that stays.
        assert len({tuple(left) for left in report["left"]}) == 1
    assert assert_all_committed_are_right(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("scenario", ["exit", "raise", "interrupt"])
def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path: Path, scenario: str) -> None:
    """No hang and no half commit; the training's own error is what the process ends with."""
    codes, _, outputs = run(scenario, tmp_path / "run", 2, is_fresh=True)
    for code, output in zip(codes, outputs, strict=True):
        assert (code == 0) is (scenario == "exit"), output
        assert {"exit": "", "raise": "loss is nan", "interrupt": "KeyboardInterrupt"}[
            scenario
        ] in output
    assert assert_all_committed_are_right(tmp_path / "run") == [1]
