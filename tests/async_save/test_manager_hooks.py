"""What a manager keeps by its metric, and what it tells functions of the caller."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dist_checkpointing import CheckpointingException, CheckpointManager, Retention
from dist_checkpointing.comm import Comm
from dist_checkpointing.manager import JsonLinesLog, SavedStep, TensorBoardLog, read_record
from dist_checkpointing.testing import run_ranks
from faults import ended_before_the_pointer
from states import ALONE, trained

METRICS = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.5, 5: float("nan"), 6: 0.7}


def state(step: int, comm: Comm = ALONE) -> dict[str, Any]:
    return trained(step, comm, key="model.w")


@pytest.mark.parametrize(
    ("best", "kept", "is_async"), [("lowest", [3, 4, 6], False), ("highest", [2, 6], True)]
)
def test_the_best_are_kept(tmp_path: Path, best: Any, kept: list[int], is_async: bool) -> None:
    deleted: list[int] = []

    def train(comm: Comm) -> tuple[list[int], int | None]:
        retention = Retention(keep_last=1, keep_best=2, best=best)
        hook = deleted.append
        with CheckpointManager(tmp_path, comm=comm, retention=retention, on_deleted=hook) as run:
            for step, metric in METRICS.items():
                # Only that of rank 0 counts.
                own = metric if comm.rank == 0 else -metric
                if is_async:
                    run.async_save(step, state(step, comm), metric=own)
                else:
                    run.save(step, state(step, comm), metric=own)
        with CheckpointManager(tmp_path, comm=comm, retention=retention) as again:
            return again.steps(), again.best()

    expected = 3 if best == "lowest" else 2
    assert run_ranks(2, train) == [(kept, expected)] * 2
    assert sorted([*deleted, *kept]) == list(METRICS)


def test_a_record_without_metrics_is_as_it_was(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2), metric=3)
        assert manager.best() == 2
        manager.delete(2)
        assert manager.best() is None
        manager.save(2, state(2), metric=4)
    steps = json.loads((tmp_path / "manager.json").read_text())["steps"]
    assert "metric" not in steps["1"]
    assert steps["2"]["metric"] == 4.0


def test_a_save_that_commits_after_the_pointer_was_lost_keeps_its_metric(tmp_path: Path) -> None:
    """As if the process had been killed between the commit and moving the pointer."""
    manager = CheckpointManager(tmp_path)
    with ended_before_the_pointer(manager.folder(1)):
        manager.save(1, state(1), metric=0.25)
    assert read_record(tmp_path).latest is None
    assert manager.best() == 1


@pytest.mark.parametrize("metric", ["low", [1.0]])
def test_a_metric_that_is_no_number(tmp_path: Path, metric: Any) -> None:
    with pytest.raises(CheckpointingException, match="beginning a save"):
        CheckpointManager(tmp_path).save(1, state(1), metric=metric)
    assert CheckpointManager(tmp_path).steps() == []


@given(st.dictionaries(st.integers(0, 30), st.none() | st.integers(0, 5)), st.integers(1, 4))
def test_the_best_as_a_function(steps: dict[int, int | None], count: int) -> None:
    metrics = {step: float(metric) for step, metric in steps.items() if metric is not None}
    due = Retention(keep_last=1, keep_best=count).due(steps, [], metrics)
    best = sorted(metrics, key=lambda step: (metrics[step], -step))[:count]
    assert set(due.delete) == set(steps) - set(best) - {max(steps, default=None)}


def test_each_save_is_told_once_and_hooks_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[SavedStep] = []

    def fail(_: object) -> None:
        raise OSError("the log is full")

    def train(comm: Comm) -> None:
        with CheckpointManager(
            tmp_path, comm=comm, on_saved=[fail, told.append], on_deleted=fail
        ) as manager:
            manager.save(1, state(1, comm))
            manager.async_save(2, state(2, comm), metric=0.5).result(30)
            manager.delete(1)
            assert manager.steps() == [2]

    with caplog.at_level(logging.ERROR):
        run_ranks(2, train)
    assert [(saved.step, saved.metric, saved.folder) for saved in told] == [
        (1, None, tmp_path / "step-00000001"),
        (2, 0.5, tmp_path / "step-00000002"),
    ]
    assert all(0 < saved.blocked_seconds <= saved.seconds for saved in told)
    assert told[0].blocked_seconds == told[0].seconds
    assert told[0].num_bytes == told[1].num_bytes > 0
    assert caplog.text.count("a hook of the manager failed") == 3


def test_the_log_has_a_line_a_save(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    for steps in ((1, 2), (3,)):
        with CheckpointManager(tmp_path / "run", on_saved=JsonLinesLog(path)) as manager:
            for step in steps:
                manager.async_save(step, state(step), metric=step / 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["metric"]) for line in lines] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert all(line["seconds"] >= line["blocked_seconds"] > 0 for line in lines)
    assert lines[0]["time"] <= lines[2]["time"]


class Writer:
    """A SummaryWriter as far as the log needs it."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.points: list[tuple[str, float, int]] = []
        self.flushes = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))

    def flush(self) -> None:
        self.flushes += 1


def test_curves_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, made = Writer(), list[Writer]()

    class Module:
        @staticmethod
        def SummaryWriter(folder: str) -> Writer:  # noqa: N802 - torch's name
            made.append(Writer(folder))
            return made[-1]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module())
    logs = TensorBoardLog(tmp_path / "logs")
    assert not made  # other ranks make no file
    with CheckpointManager(tmp_path, on_saved=[TensorBoardLog(writer, "c/"), logs]) as manager:
        manager.save(7, state(7))
        manager.save(8, state(8), metric=0.5)
    tags = ["c/seconds", "c/blocked_seconds", "c/num_bytes"]
    assert [(tag, step) for tag, _, step in writer.points] == [
        *((tag, 7) for tag in tags),
        *((tag, 8) for tag in (*tags, "c/metric")),
    ]
    assert writer.points[-1] == ("c/metric", 0.5, 8)
    assert writer.flushes == 2
    assert [own.folder for own in made] == [str(tmp_path / "logs")]
    assert len(made[0].points) == len(writer.points)


def test_without_tensorboard_the_log_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    saved = SavedStep(1, tmp_path, None, 1.0, 1.0, 1)
    with pytest.raises(CheckpointingException, match=r"pip install 'dist_checkpointing\[tensor"):
        TensorBoardLog(tmp_path)(saved)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for save in (manager.save, manager.async_save):
            for name in ("over_write", "before_claim", "disks"):
                option: dict[str, Any] = {name: None}
                with pytest.raises(TypeError, match=rf"save\(\) got an unexpected .* '{name}'"):
                    save(1, state(1), **option)
        assert manager.steps() == []
