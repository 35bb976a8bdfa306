"""The tree of a database is decoded once for a Checkpoint, and once for a load."""

from __future__ import annotations

import gc
import pickle
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch

from dist_checkpointing import (
    Checkpoint,
    CorruptCheckpointError,
    ShardedTensor,
    load,
    remove_sharded_tensors,
    save,
    verify_checkpoint,
)
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from states import shard

COUNT = 3000
SHAPE = (300,)  # too large to lie in the tree


def state(count: int = COUNT, *, first: float = 0.0) -> dict[str, ShardedTensor]:
    return {
        f"layers.{i}.weight": shard(f"layers.{i}.weight", torch.full(SHAPE, first + i))
        for i in range(count)
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    save(state(), folder)
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str | None]:
    """How often each node has been decoded; None is the manifest."""
    counts: Counter[str | None] = Counter()
    dump = ts.ocdbt.dump

    def counting(base: Any, node: str | None = None, **settings: Any) -> Any:
        counts[node] += 1
        return dump(base, node, **settings)

    monkeypatch.setattr(ts.ocdbt, "dump", counting)
    return counts


def resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_slices_decode_each_node_once(saved: Path, decoded: Counter[str | None]) -> None:
    checkpoint = Checkpoint.open(saved)
    for i in range(0, COUNT, 10):
        assert checkpoint[f"layers.{i}.weight"][7] == i
    assert checkpoint["layers.5.weight"].location(0).count("1200 bytes from") == 1
    assert set(decoded.values()) == {1}


def test_five_hundred_slices_take_no_more_memory_than_one(saved: Path) -> None:
    checkpoint = Checkpoint.open(saved)
    for i in range(0, COUNT, 50):
        _ = checkpoint[f"layers.{i}.weight"][:2]
    before = resident_bytes()
    for i in range(500):
        _ = checkpoint[f"layers.{i}.weight"][:2]
    # Decoding the tree for each of them left more than 500 MiB behind.
    assert resident_bytes() - before < 20 * 2**20


def test_threads_share_what_is_known(saved: Path, decoded: Counter[str | None]) -> None:
    checkpoint = Checkpoint.open(saved)

    def read(i: int) -> float:
        return float(checkpoint[f"layers.{i}.weight"][1])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(200))) == list(range(200))
    assert set(decoded.values()) == {1}


def test_a_verified_load_decodes_each_node_once(saved: Path, decoded: Counter[str | None]) -> None:
    # Small buffers: many batches are verified one after the other.
    strategy = TensorStoreLoadShardedStrategy(options=StorageOptions(buffer_bytes=2**16))
    loaded = load(state(first=-1.0), saved, strategy, verify=True)
    assert loaded["layers.7.weight"][0] == 7
    assert set(decoded.values()) == {1}


def test_verifying_decodes_each_node_once(saved: Path, decoded: Counter[str | None]) -> None:
    verify_checkpoint(saved)
    assert set(decoded.values()) == {1}


def test_a_removal_meanwhile_does_not_lead_astray(tmp_path: Path) -> None:
    """It moves what it keeps, and deletes the file in which that was."""
    small, large = torch.rand(300), torch.rand(100_000)
    tensors = {"optimizer.kept": small, "optimizer.state": large}
    for number in range(20):
        folder = tmp_path / str(number)
        save({k: shard(k, v) for k, v in tensors.items()}, folder)
        checkpoint = Checkpoint.open(folder)
        places = {checkpoint[key].location(0).split(",")[0] for key in tensors}
        if len(places) == 1:
            break  # TensorStore may also put them into a file each
    assert len(places) == 1
    assert torch.equal(checkpoint["optimizer.kept"][...], small)
    before = checkpoint["optimizer.kept"].location(0)
    remove_sharded_tensors(folder, "optimizer.state")
    assert torch.equal(checkpoint["optimizer.kept"][...], small)
    after = checkpoint["optimizer.kept"].location(0)
    assert after != before
    assert not Path(before.split(",")[0]).exists()


def test_an_overwrite_meanwhile_is_an_error(tmp_path: Path) -> None:
    save(state(10), tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint["layers.3.weight"][0] == 3
    save(state(10, first=100.0), tmp_path, overwrite=True)
    with pytest.raises(CorruptCheckpointError, match="not the checkpoint that was opened"):
        _ = checkpoint["layers.3.weight"][0]
    assert Checkpoint.open(tmp_path)["layers.3.weight"][0] == 103


def test_a_checkpoint_in_use_can_be_sent_to_another_process(saved: Path) -> None:
    checkpoint = Checkpoint.open(saved)
    assert checkpoint["layers.3.weight"][0] == 3
    copied = pickle.loads(pickle.dumps(checkpoint))
    assert copied["layers.4.weight"][0] == 4
