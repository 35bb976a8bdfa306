"""The tree of a database, and open files, that a Checkpoint keeps for its next slice."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.filesystem import local_folder, ranged_reads
from faults import replaced
from states import wholes

COUNT = 3000
SHAPE = (300,)  # too large to lie in the tree
OPEN_FILES = Path("/proc/self/fd")


def state(count: int = COUNT) -> dict[str, Any]:
    return wholes({f"layers.{i}.weight": torch.full(SHAPE, float(i)) for i in range(count)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    dc.save(state(), folder)
    return folder


def test_threads_read_from_one_checkpoint(saved: Path) -> None:
    checkpoint = dc.Checkpoint.open(saved)

    def read(i: int) -> float:
        return float(checkpoint[f"layers.{i}.weight"][1])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(200))) == list(range(200))
    assert checkpoint["layers.5.weight"].location(0).count("1200 bytes from") == 1


def test_a_removal_meanwhile_does_not_lead_astray(tmp_path: Path) -> None:
    """It writes another tree, and deletes the files of the one that is remembered."""
    dc.save(state(10), tmp_path)
    checkpoint = dc.Checkpoint.open(tmp_path)
    assert checkpoint["layers.3.weight"][0] == 3
    before = set((tmp_path / "d").iterdir())
    dc.remove_sharded_tensors(tmp_path, "layers.4")
    assert not any(path.exists() for path in before)
    assert checkpoint["layers.3.weight"][0] == 3
    assert checkpoint["layers.5.weight"][0] == 5


@pytest.mark.parametrize(("kind", "opened_by_each"), [("ext4", 0), ("nfs4", 3)])
def test_slices_of_a_local_disk_open_no_file_twice(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kind: str, opened_by_each: int
) -> None:
    monkeypatch.setattr(local_folder, "file_system_type", lambda _: kind)
    monkeypatch.setattr(ranged_reads, "_MOST_OPEN", 1)
    before, opened = {*OPEN_FILES.iterdir()}, count()
    checkpoint = dc.Checkpoint.open(saved)
    _ = checkpoint["layers.0.weight"][0]
    with replaced("os.open", lambda real, *given: (next(opened), real(*given))[1]):
        assert [int(checkpoint["layers.0.weight"][i]) for i in range(20)] == [0] * 20
    assert next(opened) == 20 * opened_by_each
    del checkpoint
    assert {*OPEN_FILES.iterdir()} == before


def test_damage_is_found_where_no_plan_is_made(tmp_path: Path) -> None:
    dc.save(state(3), tmp_path)
    (data,) = (tmp_path / "data/model").iterdir()
    data.write_bytes(data.read_bytes()[:1300])
    checkpoint = dc.Checkpoint.open(tmp_path)
    assert checkpoint["layers.0.weight"][4] == 0
    with pytest.raises(dc.CorruptCheckpointError, match=r"layers\.2\.weight.*ends before it"):
        _ = checkpoint["layers.2.weight"][4]
    os.truncate(data, 3)  # while it is open
    with pytest.raises(dc.CorruptCheckpointError, match=r"layers\.0\.weight.*ends before it"):
        _ = checkpoint["layers.0.weight"][4]
    data.unlink()
    with pytest.raises(dc.CorruptCheckpointError, match=r"layers\.0\.weight.*missing"):
        _ = checkpoint["layers.0.weight"][4]
