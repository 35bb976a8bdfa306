"""What a manager believes: a pointer that is behind, errors that say nothing of a checkpoint."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import dist_checkpointing as dc
from damage import damage, files_in
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding
from dist_checkpointing.filesystem import ObjectPath
from dist_checkpointing.format import run_steps
from dist_checkpointing.format.run_steps import NO_STEP, write_record
from dist_checkpointing.manager import RunRecord, StepRecord, checkpoint_manager, read_record
from dist_checkpointing.testing import run_ranks
from faults import ended_before_the_pointer, failing, replaced, store_requests
from states import BACKEND, trained
from stores import new_url

state = partial(trained, shape=(200, 300))


def killed_before_the_pointer(root: Path, step: int, loaded: int | None = None) -> None:
    """Save a step; the process ends after the commit and before anything else."""
    manager = dc.CheckpointManager(root)
    if loaded is not None:
        manager.load({}, loaded)
    with ended_before_the_pointer(manager.folder(step)):
        manager.save(step, state(step))


# The pointer.


def test_a_record_of_another_version(tmp_path: Path) -> None:
    """An older one says that the step was begun, and not by which save; a newer one says more."""
    manager = dc.CheckpointManager(tmp_path, retention=dc.Retention(keep_last=1))
    for step in (1, 2):
        manager.save(step, state(step))
    dc.save(state(3), manager.folder(3))
    record = json.loads((tmp_path / "manager.json").read_text())
    record["steps"]["3"] = {"attempt": None, "verified": False, "stripped": False}
    record["steps"]["2"]["of_a_later_version"] = 1
    (tmp_path / "manager.json").write_text(json.dumps(record))
    assert manager.latest() == 3
    manager.save(4, state(4))
    assert manager.steps() == [3, 4], "nobody knows whose it is"


def test_a_checkpoint_of_somebody_else_in_a_folder_that_was_begun_is_not_ours(
    tmp_path: Path,
) -> None:
    killed_before_the_pointer(tmp_path, 1)
    manager = dc.CheckpointManager(tmp_path, retention=dc.Retention(keep_last=1))
    (manager.folder(1) / "metadata.json").unlink()  # before the commit, after all
    dc.save(state(7), manager.folder(1))
    manager.save(2, state(2))
    manager.save(3, state(3))
    assert manager.steps() == [1, 3]
    assert dc.load_plain_tensors(manager.folder(1))["step"] == 7


@pytest.mark.parametrize("value", ['"begun": 1', '"begun": true', '"begun": []'])
def test_a_record_that_is_none(tmp_path: Path, value: str) -> None:
    (tmp_path / "manager.json").write_text(
        f'{{"format": 1, "latest": 1, "steps": {{"1": {{{value}}}}}}}'
    )
    assert read_record(tmp_path) == RunRecord()


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_of_changes_at_once_none_is_lost(tmp_path: Path, *, is_on_disk: bool) -> None:
    root = tmp_path if is_on_disk else ObjectPath.of(new_url())

    def add(steps: range) -> None:
        for step in steps:
            is_written = False
            while not is_written:
                record = read_record(root)
                record.steps[step] = StepRecord()
                is_written = write_record(root, record)

    threads = [Thread(target=add, args=(range(at, at + 20),)) for at in (0, 20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_record(root).steps) == [*range(80)]
    if is_on_disk:
        assert [path.name for path in tmp_path.iterdir()] == ["manager.json"]


def test_a_writer_that_goes_on_late_replaces_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote was put in place by another writer, and a third one claims the same again."""

    def changed(step: int) -> RunRecord:
        record = read_record(tmp_path)
        record.steps[step] = StepRecord()
        return record

    assert write_record(tmp_path, changed(0))
    first, second, third = (changed(step) for step in (1, 2, 3))
    put_in_place, read = Path.replace, run_steps.read_record

    def stopped(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", put_in_place)
        assert not write_record(tmp_path, second)
        assert [*read(tmp_path).steps] == [0, 1]
        outcomes = list[Path | FileNotFoundError]()

        def going_on(root: Path) -> RunRecord:
            try:
                outcomes.append(put_in_place(path, target))
            except FileNotFoundError as error:
                outcomes.append(error)
            monkeypatch.setattr(run_steps, "read_record", read)
            return read(root)

        monkeypatch.setattr(run_steps, "read_record", going_on)
        assert not write_record(tmp_path, third)
        if isinstance(outcomes[0], FileNotFoundError):
            raise outcomes[0]
        return outcomes[0]

    monkeypatch.setattr(Path, "replace", stopped)
    write_record(tmp_path, first)
    assert [*read(tmp_path).steps] == [0, 1]


def test_what_one_process_began_to_write_another_one_puts_in_its_place(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    with failing("os.replace", times=1), pytest.raises(dc.CheckpointingException):
        manager.delete(2)
    assert [*read_record(tmp_path).steps] == [1, 2]
    dc.CheckpointManager(tmp_path).verify(1)
    record = read_record(tmp_path)
    assert ([*record.steps], record.latest, record.steps[1].verified) == ([1], 1, True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["manager.json"]


def test_a_store_that_does_not_compare_versions() -> None:
    def act(name: str, _: str, go: Any) -> Any:
        if name == "put" and isinstance(go.keywords.get("mode"), dict):
            raise NotImplementedError("If-Match")
        return go()

    root = new_url()
    with store_requests(act), dc.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.delete(1)
    assert [*read_record(ObjectPath.of(root)).steps] == [2]


def test_damaged_metadata_is_no_leftover(tmp_path: Path) -> None:
    """What it commits may be good."""
    manager = dc.CheckpointManager(tmp_path)
    manager.save(1, state(1))
    (manager.folder(1) / "metadata.json").write_text("{")
    before = files_in(manager.folder(1))
    manager.save(2, state(2))
    assert files_in(manager.folder(1)) == before


# Errors that say nothing of a checkpoint.


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever this process opens is one too many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@BACKEND
def test_out_of_descriptors(tmp_path: Path, backend: Any) -> None:
    """TensorStore opens files by itself, and reports all errors as ValueErrors."""
    manager = dc.CheckpointManager(tmp_path, backend)
    for step in (1, 2):
        manager.save(step, state(step))
    folder = manager.folder(2)
    dc.verify_checkpoint(folder)  # imports what it needs
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        dc.verify_checkpoint(folder)
    with no_descriptors(), pytest.raises(dc.RankFailedError, match="Too many open files"):
        manager.latest_valid()
    assert manager.latest_valid() == 2
    with pytest.raises(dc.CheckpointExistsError):
        manager.save(2, state(3))


def test_an_error_of_one_rank_is_raised_on_all_and_damage_found_by_one_is_damage_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dc.CheckpointManager(tmp_path) as alone:
        for step in (1, 2):
            alone.save(step, state(step))

    def verify(folder: Path, *, rank: int, **_: Any) -> None:
        if folder.name.endswith("2") and rank == 2:
            raise errors[0]
        if folder.name.endswith("2") and rank == 1 and len(errors) > 1:
            raise errors[1]

    monkeypatch.setattr(checkpoint_manager, "verify_checkpoint", verify)

    def one(comm: Comm) -> int | None:
        return dc.CheckpointManager(tmp_path, comm=comm).latest_valid()

    def fails(comm: Comm) -> None:
        with pytest.raises(dc.RankFailedError, match=r"failed on rank 2 of 3(.|\n)*Input/output"):
            one(comm)

    errors: list[Exception] = [OSError(errno.EIO, os.strerror(errno.EIO))]
    run_ranks(3, fails)
    errors = [dc.CorruptCheckpointError("flipped", [Finding("bits", "w")])]
    assert run_ranks(3, one) == [1] * 3
    # What one rank cannot read does not hide what another one has found.
    errors.append(dc.CheckpointingException("cannot be read here", [Finding("codec")]))
    assert run_ranks(3, one) == [1] * 3
    errors = [dc.CheckpointingException("cannot be read here", [Finding("codec")])]
    assert run_ranks(3, one) == [1] * 3


# Room for a step that was damaged.


def test_a_damaged_step_stays_until_the_new_one_has_claimed_its_folder(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path, "zarr")
    for step in (1, 2):
        manager.save(step, state(step))
    damage(manager.folder(2))
    assert manager.latest_valid() == 1
    before = files_in(manager.folder(2))
    # Not planned.
    with pytest.raises(dc.InvalidShardingError):
        manager.save(2, {"w": [*state(3).values()], "v": [*state(3).values()]})
    assert files_in(manager.folder(2)) == before
    # No room.
    with replaced("os.access", lambda *_: False):
        with pytest.raises(dc.CheckpointingException, match="may not write"):
            manager.save(2, state(2))
        with pytest.raises(dc.CheckpointingException, match="may not write"):
            manager.async_save(2, state(2))
    assert files_in(manager.folder(2)) == before
    manager.async_save(2, state(4)).result(60)
    assert manager.latest_valid() == 2
    assert dc.load_plain_tensors(manager.folder(2))["step"] == 4
    # It is a good one now.
    with pytest.raises(dc.CheckpointExistsError):
        manager.save(2, state(2))
    manager.close()


def test_only_the_save_that_was_found_damaged_makes_room(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path, "zarr")
    for step in (1, 2):
        manager.save(step, state(step))
    good = tmp_path / "good"
    shutil.copytree(manager.folder(2), good)
    damage(manager.folder(2))
    assert manager.latest_valid() == 1
    # Another job has saved it meanwhile.
    other = dc.CheckpointManager(tmp_path, "zarr")
    assert other.latest_valid() == 1
    other.save(2, state(2))
    with pytest.raises(dc.CheckpointExistsError):
        manager.save(2, state(3))
    assert dc.load_plain_tensors(manager.folder(2))["step"] == 2


def test_options_of_the_caller_are_heard(tmp_path: Path) -> None:
    manager = dc.CheckpointManager(tmp_path, "zarr")
    manager.save(1, state(1))
    manager.save(1, state(2), overwrite=True)
    manager.async_save(1, state(3), overwrite=True).result(60)
    manager.close()
    assert dc.load_plain_tensors(manager.folder(1))["step"] == 3


def test_a_step_that_is_copied_late_takes_its_place_in_the_history() -> None:
    record = RunRecord()
    for step, parent in ((50, NO_STEP), (200, 50)):
        record.commit(step, StepRecord(f"save {step}", parent=parent))
    record.commit(100, StepRecord("save 100", parent=50), is_latest=False)
    assert (record.latest, record.history(record.steps)) == (200, [200, 100, 50])
    assert record.abandoned == set()
