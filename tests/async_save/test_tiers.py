"""CheckpointManager with a root in an object store, and with a fast disk that is drained into it.

Machines with disks of their own are in tests/simulation/test_lost_disks.py.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import damage
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import ShardedStateDict
from dist_checkpointing.testing import run_ranks
from faults import counted_requests, full_disk, replaced
from states import shard, wholes
from stores import new_url


def state(value: float) -> ShardedStateDict:
    return {"w": shard("w", torch.full((64, 8), float(value))), "value": float(value)}


def steps_in(place: object) -> list[str]:
    root = dc.ObjectPath.of(place) if isinstance(place, str) else place
    assert isinstance(root, dc.ObjectPath)
    return [name for name in root.store.list_folder(root.prefix)[0] if name.startswith("step-")]


def test_what_is_saved_to_the_disk_comes_into_the_store(
    tmp_path: Path, s3_place: dc.ObjectPath
) -> None:
    keep = dc.Retention(keep_last=2)
    with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(s3_place)], retention=keep) as manager:
        manager.save(1, state(1))
        for step in (2, 3):
            manager.async_save(step, state(step))
        assert manager.folder(3) == tmp_path / "step-00000003"
    assert steps_in(s3_place) == ["step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == steps_in(s3_place)
    for step in (2, 3):
        place = s3_place / f"step-0000000{step}"
        dc.verify_checkpoint(place)
        assert dc.load(state(0), place, verify=True)["value"] == step


def test_damage_on_the_disk_does_not_come_into_the_store(tmp_path: Path) -> None:
    root = new_url()
    damaged: list[Path] = []

    def damaging(real: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if not damaged and "step-00000002/data/model" in str(path) and "r" in (*args, "r")[0]:
            damaged.append(path)  # once: the same bit again would mend it
            damage(tmp_path / "step-00000002")
        return real(path, *args, **options)

    manager = dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)])
    manager.save(1, state(1))
    with replaced("io.open", damaging):
        manager.save(2, state(2))
        with pytest.raises(dc.CheckpointingException, match="step 2 is not in the last place"):
            manager.close()
    assert damaged
    with dc.CheckpointManager(root) as stored:
        assert stored.load(state(0))["value"] == 1


def test_a_disk_that_was_away_does_not_replace_what_others_have_saved(tmp_path: Path) -> None:
    root = new_url()
    with dc.CheckpointManager([dc.Place(tmp_path / "a"), dc.Place(root)]) as manager:
        manager.save(1, state(1))
    with dc.CheckpointManager([dc.Place(tmp_path / "b"), dc.Place(root)]) as manager:
        manager.delete(1)
        manager.save(1, state(7))
    with dc.CheckpointManager([dc.Place(tmp_path / "a"), dc.Place(root)]) as manager:
        assert manager.load(state(0), 1)["value"] == 7
        assert manager.load(state(0))["value"] == 7
    with dc.CheckpointManager(root) as manager:
        assert manager.load(state(0))["value"] == 7


def test_a_damaged_step_is_saved_again_and_copied_again(tmp_path: Path) -> None:
    root = new_url()
    with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)]) as manager:
        manager.save(1, state(1))
    damage(tmp_path / "step-00000001")
    with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)]) as manager:
        assert manager.load(state(0))["value"] == 1
        manager.save(1, state(5), overwrite=True)
        assert manager.load(state(0))["value"] == 5
    with dc.CheckpointManager(root) as manager:
        assert manager.load(state(0))["value"] == 5


def test_the_disk_may_be_incremental(tmp_path: Path) -> None:
    root = new_url()
    with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)], incremental=True) as manager:
        manager.save(1, state(1))
        manager.save(2, state(1) | {"value": 2.0})
    shutil.rmtree(tmp_path)
    with dc.CheckpointManager(root) as manager:
        assert manager.load(state(0))["value"] == 2
        assert manager.latest_valid() == 2


def test_ranks_share_the_disk(tmp_path: Path) -> None:
    root = new_url()

    def part(comm: Comm, value: float) -> ShardedStateDict:
        return {"w": shard("w", torch.full((4, 4), value + comm.rank), (0, comm.rank, 2))}

    def train(comm: Comm) -> None:
        with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)], comm=comm) as manager:
            manager.async_save(1, part(comm, 1.0))

    run_ranks(2, train)
    shutil.rmtree(tmp_path)

    def resume(comm: Comm) -> float:
        with dc.CheckpointManager([dc.Place(tmp_path), dc.Place(root)], comm=comm) as manager:
            return float(manager.load(part(comm, 0.0))["w"][0, 0])

    assert run_ranks(2, resume) == [1.0, 2.0]


def test_requests_do_not_grow_with_the_steps_that_are_kept(s3_place: dc.ObjectPath) -> None:
    def ten(value: float) -> ShardedStateDict:
        return {**wholes({f"w{n}": torch.full((4,), value) for n in range(10)}), "value": value}

    def requests_of(work: Callable[[], object], most: int) -> int:
        with counted_requests() as counts:
            work()
        assert counts.total() <= most, counts
        return counts.total()

    seen = set()
    for kept in (2, 6):
        with dc.CheckpointManager(
            s3_place / str(kept), retention=dc.Retention(keep_last=kept)
        ) as run:
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


def test_a_folder_may_be_the_last_place(tmp_path: Path) -> None:
    near, home = tmp_path / "near", tmp_path / "home"
    places = [dc.Place(near), dc.Place(home)]
    with dc.CheckpointManager(places, retention=dc.Retention(keep_last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.save(3, state(4), overwrite=True)
    names = ["step-00000002", "step-00000003"]
    assert sorted(path.name for path in home.glob("step-*")) == names
    dc.verify_checkpoint(home / names[0])
    shutil.rmtree(near)
    with dc.CheckpointManager(places) as manager:
        assert (manager.latest_valid(), manager.load(state(0))["value"]) == (3, 4)


def test_what_a_killed_copy_has_left_is_deleted(tmp_path: Path) -> None:
    home = tmp_path / "home"
    places = [dc.Place(tmp_path / "near"), dc.Place(home)]
    with dc.CheckpointManager(places) as manager:
        manager.save(1, state(1))
    (home / "step-00000001").rename(home / "step-00000002.staged")
    with dc.CheckpointManager(places) as manager:
        assert manager.load(state(0))["value"] == 1
        manager.save(2, state(2))
    assert sorted(path.name for path in home.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dc.UnsupportedFormatError, match="an incremental save works on a mounted"):
        dc.CheckpointManager(new_url(), incremental=True)
    with pytest.raises(dc.UnsupportedFormatError, match="drop_optimizer_after"):
        dc.CheckpointManager(new_url(), retention=dc.Retention(drop_optimizer_after=1))
    with pytest.raises(dc.UnsupportedFormatError, match="two places are one"):
        dc.CheckpointManager([dc.Place(tmp_path), dc.Place(tmp_path)])
    with pytest.raises(TypeError, match="a path or a list of Place"):
        dc.CheckpointManager([tmp_path])  # type: ignore[list-item]


def test_a_place_takes_what_is_due_there(tmp_path: Path) -> None:
    root = new_url()
    places = [dc.Place(tmp_path, every=10), dc.Place(root, every=1000)]
    with dc.CheckpointManager(places) as manager:
        for step in (10, 15, 20, 27):  # 15 and 27 are for no place but the last
            manager.save(step, state(step))
            assert manager.folder(step).parent == (tmp_path if step % 10 == 0 else manager.root)
        assert manager.latest() == 27
    assert steps_in(root) == ["step-00000010", "step-00000015", "step-00000027"]
    with dc.CheckpointManager(places) as manager:
        assert (manager.steps(), manager.load(state(0))["value"]) == ([10, 15, 20, 27], 27)
        assert manager.load(state(0), 20)["value"] == 20
        manager.save(30, state(30))
        assert manager.latest() == 30
    with dc.CheckpointManager(places) as manager:
        assert manager.load(state(0))["value"] == 30
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        dc.Place(tmp_path, every=0)
    with pytest.raises(dc.UnsupportedFormatError, match="the only place takes each save"):
        dc.CheckpointManager([dc.Place(tmp_path, every=10)])


def names_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-????????"))


def test_a_step_comes_to_each_place_that_takes_it(tmp_path: Path) -> None:
    root, keep = new_url(), dc.Retention(keep_last=2)
    near, disk = tmp_path / "near", tmp_path / "disk"
    places = [
        dc.Place(near, every=10, retention=keep),
        dc.Place(disk, every=30),
        dc.Place(root, every=100),
    ]
    with dc.CheckpointManager(places) as manager:
        for step in range(10, 131, 10):
            manager.save(step, state(step))
            manager.wait()
        assert manager.load(state(0), 60)["value"] == 60
    assert (names_in(near), names_in(disk)) == ([120, 130], [10, 30, 60, 90, 120])
    assert steps_in(root) == [f"step-{step:08d}" for step in (10, 100, 130)]
    shutil.rmtree(near)
    with dc.CheckpointManager(places) as manager:
        assert manager.steps() == [10, 30, 60, 90, 100, 120, 130]
        assert manager.load(state(0))["value"] == 130
        assert manager.load(state(0), 90)["value"] == 90
        manager.save(100, state(101))  # which the disk would not have taken
        manager.save(120, state(121))
    with dc.CheckpointManager(places) as manager:
        assert manager.load(state(0))["value"] == 121
        assert manager.load(state(0), 100)["value"] == 101
    shutil.rmtree(near)
    with dc.CheckpointManager(places) as manager:
        assert manager.load(state(0))["value"] == 121
        for step in (10, 30):  # one that is in the store too, and one that is not
            manager.delete(step)
        assert manager.steps() == [60, 90, 100, 120, 130]  # which is abandoned
    assert names_in(disk) == [60, 90, 120]
    assert "step-00000010" not in steps_in(root)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_place_hands_on_to_the_next_one(
    tmp_path: Path, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_url()
    places = [
        dc.Place(tmp_path / "near"),
        dc.Place(tmp_path / "disk"),
        dc.Place(root, every=100),
    ]
    with dc.CheckpointManager(places) as manager:
        save = manager.async_save if is_async else manager.save
        save(1, state(1))
        manager.wait()
        with full_disk(tmp_path / "near"):
            save(2, state(2))
            manager.wait()
        assert "step 2 goes to the next place" in caplog.text
        assert "not enough free space" in caplog.text
        assert manager.folder(2) == tmp_path / "disk" / "step-00000002"
        assert manager.load(state(0))["value"] == 2
        with full_disk():
            save(3, state(3))
            manager.wait()
        assert manager.folder(3).parent == manager.root
        save(4, state(4))
    assert (names_in(tmp_path / "near"), names_in(tmp_path / "disk")) == ([1, 4], [1, 2, 4])


def test_a_disk_that_is_not_due_for_a_step_gets_the_save_that_replaces_its_own(
    tmp_path: Path,
) -> None:
    root, near, disk = new_url(), tmp_path / "near", tmp_path / "disk"
    places = [dc.Place(near), dc.Place(disk, every=50), dc.Place(root, every=500)]
    with dc.CheckpointManager(places) as manager:
        manager.save(50, state(1))
        manager.save(100, state(2))
        manager.save(100, state(3), overwrite=True)  # for which the disk is not due again
        manager.save(101, state(4))
    shutil.rmtree(near)
    with dc.CheckpointManager(places) as manager:
        assert manager.folder(100).parent == disk
        assert manager.load(state(0), 100)["value"] == 3
