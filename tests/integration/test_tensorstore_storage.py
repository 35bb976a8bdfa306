"""What is special about the tensorstore backend: its database, sections, damage and full disks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage import Progress, StorageOptions
from dist_checkpointing.strategies import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from states import cell, rows, save_on, shard

WORLD = 2
LARGE = (1024, 1024)  # 4 MiB of float32: written without a copy, unlike the small ones


def values(seed: int, shape: tuple[int, ...] = LARGE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save_state(folder: Path, strategy: Any = None) -> dict[str, torch.Tensor]:
    sizes = {"model.w": LARGE, "model.b": (64,), "optimizer.m": LARGE, "optimizer.v": (64,)}
    full = {key: values(seed, shape) for seed, (key, shape) in enumerate(sizes.items())}

    def state(comm: Comm) -> dict[str, Any]:
        leaves = {key: rows(key, tensor, comm) for key, tensor in full.items()}
        return {**leaves, "rng": cell("rng", {"rank": comm.rank}, comm)}

    save_on(WORLD, state, folder, strategy)
    return full


def data_files(folder: Path) -> list[Path]:
    files = [path for path in (folder / "data").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    tensor = values(0)
    saved: list[Progress] = []
    loaded: list[Progress] = []
    dc.save({"w": shard("w", tensor)}, tmp_path, progress=saved.append)
    template: Any = dc.load_tensors_metadata(tmp_path)
    dc.load(template, tmp_path, progress=loaded.append)
    for reports, phase in ((saved, "writing"), (loaded, "reading")):
        last = [report for report in reports if report.phase == phase][-1]
        assert (last.bytes_done, last.bytes_total, last.rank) == (tensor.nbytes, tensor.nbytes, 0)


def test_small_buffers_and_data_files_change_nothing_but_the_files(tmp_path: Path) -> None:
    """A file a rank and data group, whatever the number of threads; no folders of their own."""
    many, few = StorageOptions(threads=8), StorageOptions(threads=1, buffer_bytes=1)
    small = replace(few, data_file_bytes=1 << 20)
    save_state(tmp_path / "b", TensorStoreSaveShardedStrategy(options=many))
    names = [p.relative_to(tmp_path / "b" / "data").as_posix() for p in data_files(tmp_path / "b")]
    found = sorted((name.split("/")[0], name.split("/")[1].split(".")[0]) for name in names)
    assert found == [(group, str(rank)) for group in ("model", "optimizer") for rank in range(2)]
    assert len(list((tmp_path / "b" / "d").iterdir())) == 1
    full = save_state(tmp_path / "a", TensorStoreSaveShardedStrategy(options=small))
    assert len(data_files(tmp_path / "a")) > len(names)
    strategy = TensorStoreLoadShardedStrategy(options=small)
    template: Any = dc.load_tensors_metadata(tmp_path / "a")
    result = dc.load(template, tmp_path / "a", strategy)
    assert all(torch.equal(result[key], tensor) for key, tensor in full.items())


def test_impossible_options_are_refused() -> None:
    with pytest.raises(dc.CheckpointingException, match="threads must be at least 1"):
        StorageOptions(threads=0)


def test_what_tensorstore_writes_into_a_checkpoint_is_read(tmp_path: Path) -> None:
    """Its writes make another tree, with the small values in it, and keep what was there."""
    full = save_state(tmp_path)
    for key in ("model.w", "optimizer.v"):
        base = {"driver": "file", "path": f"{tmp_path}/"}
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
        array: Any = ts.open(spec, open=True).result()
        array[3:5] = 7.0
        full[key][3:5] = 7.0
    template: Any = dc.load_tensors_metadata(tmp_path)
    loaded = dc.load(template, tmp_path)
    checkpoint = dc.Checkpoint.open(tmp_path)
    for key, tensor in full.items():
        assert torch.equal(loaded[key], tensor)
        assert torch.equal(checkpoint[key][2:6], tensor[2:6])
    assert checkpoint["optimizer.v"].location(0).endswith("optimizer.v/c.0")
    dc.remove_sharded_tensors(tmp_path, "model")
    for key in ("optimizer.m", "optimizer.v"):
        assert torch.equal(dc.load_plain_tensors(tmp_path)[key], full[key])
