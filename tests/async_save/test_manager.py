"""CheckpointManager: which step is latest, valid, kept; and that nothing good is ever lost."""

import json
import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.manager import JsonLinesLog, SavedStep, read_record
from dist_checkpointing.testing import run_ranks
from faults import ended_before_the_pointer, failing, full_disk, path_of
from states import ALONE, trained, trained_template, wholes

state = partial(trained, key="model.w")
template = partial(trained_template, key="model.w")


def assert_loads(manager: dc.CheckpointManager, step: int, comm: Comm = ALONE) -> None:
    loaded = manager.load(template(comm))
    assert loaded["step"] == step
    assert loaded["w"].unique().tolist() == [step]
    assert loaded["m"].unique().tolist() == [step]
    assert loaded["rng"] == [step]


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_latest_valid_walks_back(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = dc.CheckpointManager(tmp_path, backend)
    for step in (1, 2, 3, 4):
        manager.save(step, state(step))
    (manager.folder(4) / "metadata.json").unlink()
    largest = max(
        (p for p in manager.folder(3).rglob("*") if p.is_file() and p.parent.name != ".dckpt"),
        key=lambda path: path.stat().st_size,
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    (manager.folder(2) / "common.pt").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert manager.latest_valid() == 1
    for step, why in ((4, "never committed"), (3, "step-00000003"), (2, "common.pt")):
        assert any(f"step {step} is skipped" in t and why in t for t in caplog.messages), step
    assert_loads(manager, 1)


def test_retention(tmp_path: Path) -> None:
    retention = dc.Retention(keep_last=2, keep_every=30)
    with dc.CheckpointManager(tmp_path, retention=retention) as manager:
        for step in range(10, 110, 10):
            manager.async_save(step, state(step))
            if step == 50:
                manager.wait()
                manager.verify(50)
        manager.wait()
        assert manager.steps() == [30, 50, 60, 90, 100]
        with pytest.raises(dc.CheckpointingException, match="known to be valid"):
            manager.delete(50)
        manager.verify(90)
        manager.save(110, state(110))
        assert manager.steps() == [30, 60, 90, 100, 110]


@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [
        ("tensorstore", "optim"),
        ("tensorstore", "chained_0.optimizer.m"),
        (("zarr", 1), "optim.m"),
        (("zarr", 2), "optimizer.m"),
    ],
)
def test_what_stats_counts_as_the_optimizer_is_dropped(
    tmp_path: Path, backend: Any, optimizer: str
) -> None:
    keys = ("model.w", "optimal.w", optimizer, "chained_1.optim.m")
    leaves = partial(wholes, dict.fromkeys(keys, torch.ones(300_000)))
    manager = dc.CheckpointManager(
        tmp_path, backend, retention=dc.Retention(drop_optimizer_after=1)
    )
    sizes = []
    for step in (1, 2):
        manager.save(step, leaves())
        sizes.append(_size(manager.folder(step)))
    kept = {"model.w", "optimal.w", *({"optim"} & {optimizer})}
    assert dc.load_plain_tensors(manager.folder(1)).keys() == kept
    assert dc.load_plain_tensors(manager.folder(2)).keys() == leaves().keys()
    # And the space is free again, in a database too.
    freed = sum(1 for key in leaves() if key not in kept) * 1_200_000
    if optimizer != "optim":  # which holds up the file that it shares with another
        assert _size(manager.folder(1)) < sizes[1] - 0.9 * freed
    manager.save(3, leaves())
    assert dc.load_plain_tensors(manager.folder(2)).keys() == kept


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("prefix", [None, "optimiser."])
def test_it_is_said_once_that_there_was_nothing_to_drop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str | None
) -> None:
    leaves = partial(wholes, dict.fromkeys(("model.w", "opt.m"), torch.ones(2)))
    retention = dc.Retention(drop_optimizer_after=1, optimizer_prefix=prefix)
    manager = dc.CheckpointManager(tmp_path, retention=retention)
    for step in (1, 2, 3, 4):
        manager.save(step, leaves())
    (said,) = [r.getMessage() for r in caplog.records if "nothing was deleted" in r.getMessage()]
    assert "step 1" in said
    assert "optimizer_prefix" in said
    assert (f"begins with {prefix!r}" if prefix else "looks like an optimizer's") in said
    for step in (1, 2, 3, 4):
        assert dc.load_plain_tensors(manager.folder(step)).keys() == leaves().keys()
    # With the right prefix all of them are found, also the ones that were passed over.
    retention = dc.Retention(drop_optimizer_after=1, optimizer_prefix="opt.")
    manager = dc.CheckpointManager(tmp_path, retention=retention)
    manager.save(5, leaves())
    for step in (1, 2, 3, 4):
        assert dc.load_plain_tensors(manager.folder(step)).keys() == {"model.w"}
    assert dc.load_plain_tensors(manager.folder(5)).keys() == leaves().keys()


def test_what_the_manager_did_not_write_is_never_deleted(tmp_path: Path) -> None:
    dc.save(state(1), tmp_path / "step-00000001")  # somebody else's checkpoint
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    manager = dc.CheckpointManager(tmp_path, retention=dc.Retention(keep_last=1))
    manager.save(3, state(3))
    (manager.folder(3) / "notes.txt").write_text("mine")
    manager.save(4, state(4))
    assert manager.steps() == [1, 4]
    assert [p.name for p in manager.folder(3).iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-00000002" / "notes.txt").read_text() == "mine"
    with pytest.raises(dc.CheckpointingException, match="no manager"):
        manager.delete(1)
    with pytest.raises(dc.CheckpointExistsError):
        manager.save(1, state(1))
    # A checkpoint that took the place of ours is not ours.
    dc.save(state(4), manager.folder(4), overwrite=True)
    manager.save(5, state(5))
    assert manager.steps() == [1, 4, 5]


def is_commit_of_step_2(_: object, target: object) -> bool:
    return path_of(target).parts[-2:] == ("step-00000002", "metadata.json")


@pytest.mark.parametrize("on_error", ["warn", "retry"])
def test_training_goes_on(tmp_path: Path, on_error: Any, caplog: pytest.LogCaptureFixture) -> None:
    with (
        failing("os.replace", times=1, at=is_commit_of_step_2),
        dc.CheckpointManager(tmp_path, on_error=on_error) as manager,
    ):
        for step in (1, 2, 3):
            manager.async_save(step, state(step))
    assert manager.steps() == ([1, 3] if on_error == "warn" else [1, 2, 3])
    assert any("Input/output error" in text for text in caplog.messages)


def test_a_lost_pointer(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    for content in (b"", b"{", b'{"format": 1, "latest": "x", "steps": {}}', b"[" * 100_000):
        (tmp_path / "manager.json").write_bytes(content)
        assert manager.latest() == 2
    manager.save(3, state(3))
    assert manager.latest() == 3
    assert manager.steps() == [1, 2, 3]


def test_a_save_with_a_base_is_not_asked_for_room_for_all(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path, incremental=True)
    with full_disk(), pytest.raises(dc.CheckpointingException, match="not enough free space"):
        manager.save(1, state(1))
    manager.save(1, state(1))
    with full_disk():
        manager.save(2, state(1))
    assert manager.steps() == [1, 2]


def test_preemption(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        manager.save_on_signal(signal.SIGTERM)
        assert not manager.preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.preempted()
    finally:
        signal.signal(signal.SIGTERM, before)

    def one(comm: Comm) -> bool:
        manager = dc.CheckpointManager(tmp_path, comm=comm)
        if comm.rank == 1:
            manager._signalled.set()
        return manager.preempted()

    assert run_ranks(3, one) == [True] * 3


@pytest.mark.parametrize("value", [-1, True, "7", 1.0])
def test_steps_that_are_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(dc.CheckpointingException, match="at least 0"):
        dc.CheckpointManager(tmp_path).save(value, state(1))


@given(
    st.dictionaries(st.integers(0, 60), st.none() | st.integers(0, 5).map(float)),
    *(st.none() | st.integers(1, most) for most in (5, 7, 5, 4)),
    st.sets(st.integers(0, 60), max_size=2),
)
def test_retention_as_a_function(
    steps: dict[int, float | None],
    last: int | None,
    every: int | None,
    after: int | None,
    best: int | None,
    protected: set[int],
) -> None:
    metrics = {step: metric for step, metric in steps.items() if metric is not None}
    best_first = sorted(metrics, key=lambda step: (metrics[step], -step))
    newest_first = sorted(steps, reverse=True)
    kept = {*newest_first[:last], *best_first[: best or 0], *(protected & {*steps})}
    kept |= {step for step in steps if every is not None and step % every == 0}
    retention = dc.Retention(
        keep_last=last, keep_every=every, drop_optimizer_after=after, keep_best=best
    )
    due = retention.due([*steps], protected, metrics)
    assert due.delete == tuple(sorted(steps.keys() - kept))
    assert due.strip == tuple(sorted(kept - {*newest_first[:after]} - protected))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"keep_every": 0}, "keep_every must be at least 1"),
        ({"drop_optimizer_after": 0}, "drop_optimizer_after must be at least 1"),
        ({"keep_best": 0}, "keep_best"),
        ({"keep_best": 1, "best": "min"}, "best"),
        ({"drop_optimizer_after": 1, "optimizer_prefix": ""}, "every tensor"),
    ],
)
def test_invalid_retention(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dc.CheckpointingException, match=said):
        dc.Retention(**options)


# What a manager keeps by its metric, and what it tells functions of the caller.


METRICS = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.5, 5: float("nan"), 6: 0.7}


@pytest.mark.parametrize(
    ("best", "kept", "is_async"), [("lowest", [3, 4, 6], False), ("highest", [2, 6], True)]
)
def test_the_best_are_kept(tmp_path: Path, best: Any, kept: list[int], is_async: bool) -> None:
    def train(comm: Comm) -> tuple[list[int], int | None]:
        retention = dc.Retention(keep_last=1, keep_best=2, best=best)
        with dc.CheckpointManager(tmp_path, comm=comm, retention=retention) as run:
            for step, metric in METRICS.items():
                # Only that of rank 0 counts.
                own = metric if comm.rank == 0 else -metric
                if is_async:
                    run.async_save(step, state(step, comm), metric=own)
                else:
                    run.save(step, state(step, comm), metric=own)
        with dc.CheckpointManager(tmp_path, comm=comm, retention=retention) as again:
            return again.steps(), again.best()

    expected = 3 if best == "lowest" else 2
    assert run_ranks(2, train) == [(kept, expected)] * 2


def test_a_record_without_metrics_is_as_it_was(tmp_path: Path) -> None:
    with dc.CheckpointManager(tmp_path) as manager:
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
    manager = dc.CheckpointManager(tmp_path)
    with ended_before_the_pointer(manager.folder(1)):
        manager.save(1, state(1), metric=0.25)
    assert read_record(tmp_path).latest is None
    assert manager.best() == 1


@pytest.mark.parametrize("metric", ["low", [1.0]])
def test_a_metric_that_is_no_number(tmp_path: Path, metric: Any) -> None:
    with pytest.raises(dc.CheckpointingException, match="beginning a save"):
        dc.CheckpointManager(tmp_path).save(1, state(1), metric=metric)
    assert dc.CheckpointManager(tmp_path).steps() == []


def test_each_save_is_reported_once_and_hooks_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves: list[SavedStep] = []

    def fail(_: object) -> None:
        raise OSError("the log is full")

    def train(comm: Comm) -> None:
        with dc.CheckpointManager(tmp_path, comm=comm, on_saved=[fail, saves.append]) as manager:
            manager.save(1, state(1, comm))
            manager.async_save(2, state(2, comm), metric=0.5).result(30)
            manager.delete(1)
            assert manager.steps() == [2]

    with caplog.at_level(logging.ERROR):
        run_ranks(2, train)
    assert [(saved.step, saved.metric, saved.folder) for saved in saves] == [
        (1, None, tmp_path / "step-00000001"),
        (2, 0.5, tmp_path / "step-00000002"),
    ]
    assert all(0 < saved.blocked_seconds <= saved.seconds for saved in saves)
    assert saves[0].blocked_seconds == saves[0].seconds
    assert saves[0].num_bytes == saves[1].num_bytes > 0
    assert caplog.text.count("a hook of the manager failed") == 2


def test_the_log_has_a_line_a_save(tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    for steps in ((1, 2), (3,)):
        with dc.CheckpointManager(tmp_path / "run", on_saved=JsonLinesLog(path)) as manager:
            for step in steps:
                manager.async_save(step, state(step), metric=step / 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["metric"]) for line in lines] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert all(line["seconds"] >= line["blocked_seconds"] > 0 for line in lines)
    assert lines[0]["time"] <= lines[2]["time"]


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with dc.CheckpointManager(tmp_path) as manager:
        for save in (manager.save, manager.async_save):
            for name in ("over_write", "before_claim", "disks"):
                option: dict[str, Any] = {name: None}
                with pytest.raises(TypeError, match=rf"save\(\) got an unexpected .* '{name}'"):
                    save(1, state(1), **option)
        assert manager.steps() == []
