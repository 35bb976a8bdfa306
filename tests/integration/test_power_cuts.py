"""A power cut at any moment of a save: the checkpoint is there and right, or it is not there."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dist_checkpointing as dc
from dist_checkpointing.interop import DCPWriter
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import (
    PlannedSaveStrategy,
    StrategyAction,
    Zarr3SaveShardedStrategy,
    get_default_strategy,
)
from lossy_disk import LossyDisk
from states import BACKEND, BACKENDS, assert_at_step, save_on, shard, trained

Backend = tuple[str, int]


def fast() -> Any:
    """What saves without waiting for the real disk."""
    return Zarr3SaveShardedStrategy(options=StorageOptions(durability=Durability.PAGE_CACHE))


class PowerCuts:
    """Cuts the power at each step, and looks at what is left."""

    def __init__(self, parent: Path, steps: set[int], name: str = "run/c") -> None:
        self.seen: set[int] = set()
        self._parent, self._steps, self._name = parent, steps, name

    def __call__(self, disk: LossyDisk) -> None:
        for left in disk.after_power_cuts(self._parent):
            folder = left / self._name
            if dc.check_is_distributed_checkpoint(folder):
                dc.verify_checkpoint(folder)
                step = dc.load_plain_tensors(folder)["step"]
                assert step in self._steps
                assert_at_step(folder, step)
                self.seen.add(step)
            else:
                # Nothing is in the way of the next save.
                dc.save(trained(99), folder, fast())
                assert_at_step(folder, 99)
            shutil.rmtree(left)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The disk, and a place for what is left of it."""
    for name in ("disk", "left"):
        (tmp_path / name).mkdir()
    return tmp_path / "disk", tmp_path / "left"


@pytest.fixture
def watched(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LossyDisk]]:
    """Watches the disk from now on."""
    disks = []

    def watch(cuts: Callable[[LossyDisk], None] = lambda _: None) -> LossyDisk:
        disks.append(LossyDisk(places[0], monkeypatch, cuts))
        return disks[-1]

    yield watch
    for disk in disks:
        disk.close()


def check_kept(disk: LossyDisk, parent: Path, step: int, name: str = "run/c") -> None:
    """What a call has done when it returns is safe."""
    for left in disk.after_power_cuts(parent):
        dc.verify_checkpoint(left / name)
        assert_at_step(left / name, step)
        shutil.rmtree(left)


@BACKEND
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_checkpoint(
    places: tuple[Path, Path], watched: Any, backend: Backend, ranks: int
) -> None:
    disk = watched(PowerCuts(places[1], {1}))
    save_on(ranks, lambda comm: trained(1, comm), places[0] / "run/c", backend)
    check_kept(disk, places[1], 1)


@BACKEND
def test_one_that_overwrites(places: tuple[Path, Path], watched: Any, backend: Backend) -> None:
    dc.save(trained(1), places[0] / "run/c", backend)
    cuts = PowerCuts(places[1], {1, 2})
    disk = watched(cuts)
    dc.save(trained(2), places[0] / "run/c", backend, overwrite=True)
    check_kept(disk, places[1], 2)
    assert cuts.seen == {1, 2}


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_one_that_shares_files(places: tuple[Path, Path], watched: Any, backend: Backend) -> None:
    dc.save(trained(1), places[0] / "run/base", backend)
    disk = watched(PowerCuts(places[1], {1}))
    state = trained(1) | {"b": trained(2, key="b")["w"]}
    dc.save(state, places[0] / "run/c", backend, base=places[0] / "run/base")
    for left in disk.after_power_cuts(places[1]):
        dc.verify_checkpoint(left / "run/c")
        dc.verify_checkpoint(left / "run/base")
        assert dc.load_plain_tensors(left / "run/c")["b"].unique().tolist() == [2]


@BACKEND
def test_what_is_removed(places: tuple[Path, Path], watched: Any, backend: Backend) -> None:
    dc.save(trained(1), places[0] / "run/c", backend)

    def cut(disk: LossyDisk) -> None:
        for left in disk.after_power_cuts(places[1]):
            found = dc.load_plain_tensors(left / "run/c")
            assert found["w"].unique().tolist() == [1]
            if "optimizer.m" in found:
                assert torch.equal(found["optimizer.m"], torch.ones(4))
            dc.remove_sharded_tensors(left / "run/c", "optimizer")
            dc.verify_checkpoint(left / "run/c")
            shutil.rmtree(left)

    disk = watched(cut)
    dc.remove_sharded_tensors(places[0] / "run/c", "optimizer")
    check_kept(disk, places[1], 1)


NUM_SYNCS = {"tensorstore1": 20, "zarr2": 18, "zarr1": 16, "torch_dist1": 14}


@BACKEND
def test_nothing_is_waited_for_twice(
    places: tuple[Path, Path], watched: Any, backend: Backend
) -> None:
    (places[0] / "run").mkdir()
    disk = watched()
    dc.save({"w": trained(1)["w"], "step": 1}, places[0] / "run/c", backend)
    assert not disk.in_vain
    assert len(disk.synced) == NUM_SYNCS[f"{backend[0]}{backend[1]}"], disk.synced


# What a save waits for: every file and folder, or with ``Durability.PAGE_CACHE`` no disk.


def strategy(backend: str, version: int, durability: Durability) -> PlannedSaveStrategy:
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    assert isinstance(found, PlannedSaveStrategy)
    return type(found)(options=StorageOptions(durability=durability))


def check_synced(folder: Path, synced: set[Path], durability: Durability) -> None:
    if durability is Durability.FSYNC:
        assert {folder, *folder.rglob("*")} <= synced
    else:
        assert not synced


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files and folders that Python code waits for, by their final names."""
    paths: set[Path] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        paths.add(path.with_name(re.sub(r"\.[0-9a-f]{8}\.tmp$", "", path.name)))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("durability", Durability)
def test_a_save_by_dcp_does_so_too(
    tmp_path: Path, synced: set[Path], durability: Durability
) -> None:
    writer = DCPWriter(tmp_path / "c", strategy("zarr", 2, durability))
    dcp_save({"w": torch.arange(6.0), "step": 1}, storage_writer=writer)
    check_synced(tmp_path / "c", synced, durability)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("durability", Durability)
def test_a_save_waits_for_the_disk_or_not(
    tmp_path: Path, synced: set[Path], backend: tuple[str, int], durability: Durability
) -> None:
    state = {
        "w": shard("w", torch.arange(6.0)),
        "o": dc.ShardedObject("o", [1], (1,), (0,)),
        "step": 1,
    }
    dc.save(state, tmp_path / "c", strategy(*backend, durability))
    check_synced(tmp_path / "c", synced, durability)
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], torch.arange(6.0))
