"""What a save waits for: every file and folder, or with ``Durability.PAGE_CACHE`` no disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dist_checkpointing import ShardedObject, load_plain_tensors, save
from dist_checkpointing.interop import DCPWriter
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.base import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction, get_default_strategy
from states import BACKENDS, shard


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
        "o": ShardedObject("o", [1], (1,), (0,)),
        "step": 1,
    }
    save(state, tmp_path / "c", strategy(*backend, durability))
    check_synced(tmp_path / "c", synced, durability)
    assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], torch.arange(6.0))
