"""Asynchronous saves of real processes that are interrupted, or simply end."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from dist_checkpointing import CheckpointManager, load_plain_tensors
from real_ranks import processes

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).parent / "async_rank.py"


def run(
    scenario: str, root: Path, world_size: int
) -> tuple[list[int | None], list[dict[str, Any] | None], list[str]]:
    """Exit codes, reports and outputs of all ranks."""
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    root.parent.mkdir(parents=True, exist_ok=True)
    reports = [root.parent / f"report-{rank}.json" for rank in range(world_size)]
    for path in reports:
        path.unlink(missing_ok=True)
    commands = [
        [SCRIPT, scenario, root, rank, world_size, store.port] for rank in range(world_size)
    ]
    with processes(commands, is_fresh=True) as started:
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
    return manager.steps()


def test_async_save_makes_one_group_for_a_set_of_ranks(tmp_path: Path) -> None:
    """And the interpreter ends in order, although nobody closes what is kept."""
    codes, reports, outputs = run("kept", tmp_path / "run", 3)
    assert codes == [0] * 3, outputs
    for report in reports:
        assert report is not None
        assert len(set(report["groups"])) == 1
    assert assert_all_committed_are_right(tmp_path / "run") == [1, 2, 3]
    for step in (1, 2, 3):
        assert load_plain_tensors(tmp_path / f"pair-{step}")["w"].tolist() == [step] * 4


@pytest.mark.parametrize("scenario", ["exit", "interrupt"])
def test_the_end_of_the_interpreter_waits_for_the_save(tmp_path: Path, scenario: str) -> None:
    """No hang and no half commit; the training's own error is what the process ends with."""
    codes, _, outputs = run(scenario, tmp_path / "run", 2)
    for code, output in zip(codes, outputs, strict=True):
        assert (code == 0) is (scenario == "exit"), output
        assert ("KeyboardInterrupt" in output) is (scenario == "interrupt")
    assert assert_all_committed_are_right(tmp_path / "run") == [1]
