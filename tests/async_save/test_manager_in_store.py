"""CheckpointManager with a root in an object store."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dist_checkpointing import CheckpointManager, ObjectPath, Retention, ShardedTensor
from dist_checkpointing.errors import (
    CheckpointExistsError,
    UnsupportedFormatError,
)
from dist_checkpointing.format import data_folder
from dist_checkpointing.mapping import ShardedStateDict
from faults import counted_requests
from stores import new_url


def state(value: float) -> ShardedStateDict:
    tensor = torch.full((64, 8), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", tensor), "value": value}


def damage(folder: object) -> None:
    """Flip a byte of a tensor."""
    data = data_folder(str(folder))
    assert isinstance(data, ObjectPath)
    (key,) = (i.key for i in data.store.list_below(data.prefix) if "/data/model/" in i.key)
    content = bytearray(data.store.get(key))
    content[5] ^= 1
    data.store.put(key, bytes(content))


def test_retention_and_the_pointer() -> None:
    root = new_url()
    with CheckpointManager(root, retention=Retention(keep_last=2)) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step))
        assert (manager.steps(), manager.latest()) == ([200, 300], 300)
    place = ObjectPath.of(root)
    assert place.store.list_folder(place.prefix)[0] == ["step-00000200", "step-00000300"]
    with CheckpointManager(root) as manager:
        assert (manager.steps(), manager.latest()) == ([200, 300], 300)
        assert manager.load(state(0))["value"] == 300
        assert manager.load(state(0), 200)["value"] == 200
        with pytest.raises(CheckpointExistsError):
            manager.save(200, state(1))
        manager.delete(200)
        assert (manager.steps(), manager.latest()) == ([300], 300)


def test_saves_in_the_background(s3_place: ObjectPath) -> None:
    with CheckpointManager(s3_place, retention=Retention(keep_last=2)) as manager:
        for step in (1, 2, 3):
            manager.async_save(step, state(step))
    with CheckpointManager(s3_place) as manager:
        assert manager.steps() == [2, 3]
        assert manager.latest_valid() == 3
        assert manager.load(state(0))["value"] == 3


def test_a_damaged_step_is_skipped_and_saved_again() -> None:
    root = new_url()
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        damage(manager.folder(2))
        assert manager.load(state(0))["value"] == 1
        manager.save(2, state(2.5))
        assert manager.load(state(0))["value"] == 2.5


def test_what_needs_a_disk_is_refused(tmp_path: Path) -> None:
    del tmp_path
    with pytest.raises(UnsupportedFormatError, match="an incremental save works on a mounted"):
        CheckpointManager(new_url(), incremental=True)


def test_requests_do_not_grow_with_the_steps_that_are_kept(s3_place: ObjectPath) -> None:
    def ten(value: float) -> ShardedStateDict:
        tensors = {f"w{n}": torch.full((4,), value) for n in range(10)}
        leaves = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
        return {**leaves, "value": value}

    def requests_of(work: Callable[[], object], most: int) -> int:
        with counted_requests() as counts:
            work()
        assert counts.total() <= most, counts
        return counts.total()

    seen = set()
    for kept in (2, 6):
        with CheckpointManager(s3_place / str(kept), retention=Retention(keep_last=kept)) as run:
            for step in range(kept):
                run.save(step, ten(step))
            saved = requests_of(partial(run.save, kept, ten(kept)), 40)
            assert run.steps() == [*range(1, kept + 1)]
            loaded = requests_of(partial(run.load, ten(-1)), 20)
            deleted = requests_of(partial(run.delete, 1), 10)
            added = requests_of(partial(run.save, kept + 1, ten(kept)), 30)
            seen.add((saved, loaded, deleted, added))
            assert run.load(ten(-1))["value"] == kept
    assert len(seen) == 1
