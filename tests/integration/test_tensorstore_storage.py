"""What is special about the tensorstore backend: its database, sections, damage and full disks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import DTYPES, as_numpy
from dist_checkpointing.storage import Progress, ReadMode, StorageOptions
from dist_checkpointing.strategies import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
)
from dist_checkpointing.testing import random_bits
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


def test_a_tensor_is_opened_with_nothing_but_tensorstore(tmp_path: Path) -> None:
    known = [row for row in DTYPES if row.name != "float8_e8m0fnu"]
    full = {row.name: random_bits((4, 3), row.torch) for row in known}
    save_on(WORLD, lambda c: {k: rows(f"a key/{k}", t, c) for k, t in full.items()}, tmp_path)
    for key, tensor in full.items():
        path = f"a%20key%2F{key}/"
        store = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "path": path}
        array: Any = ts.open({"driver": "zarr3", "kvstore": store}).result()
        assert array.chunk_layout.read_chunk.shape == (2, 3)
        assert array.read().result().tobytes() == as_numpy(tensor).tobytes()


def test_few_files_whatever_the_number_of_tensors(tmp_path: Path) -> None:
    keys = [f"{prefix}{i}" for i in range(500) for prefix in ("w", "optimizer.")]
    full = values(0, (4, 2))
    save_on(WORLD, lambda comm: {key: rows(key, full, comm) for key in keys}, tmp_path)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < 40
    assert len(dc.load_tensors_metadata(tmp_path)) == 1000


@pytest.mark.parametrize("mode", [ReadMode.MEMMAP, ReadMode.PREAD])
def test_lost_data_is_an_error_and_never_zeros(tmp_path: Path, mode: ReadMode) -> None:
    save_state(tmp_path)
    file = data_files(tmp_path)[0]
    strategy = TensorStoreLoadShardedStrategy(options=StorageOptions(read_mode=mode))
    template: Any = dc.load_tensors_metadata(tmp_path)
    for num_bytes in (file.stat().st_size // 2, 0, None):
        file.unlink() if num_bytes is None else os.truncate(file, num_bytes)
        with pytest.raises(dc.CorruptCheckpointError, match=r"model\.w|optimizer\.m"):
            dc.load(template, tmp_path, strategy)
    (tmp_path / "manifest.ocdbt").unlink()
    with pytest.raises(dc.CorruptCheckpointError, match=r"manifest\.ocdbt"):
        dc.load(template, tmp_path)


@pytest.mark.parametrize("codec", [None, "zstd", "gzip", "blosc"])
def test_a_lost_chunk_of_zarr_is_named_and_never_zeros(tmp_path: Path, codec: Any) -> None:
    dc.save({"w": shard("w", torch.ones(4))}, tmp_path, Zarr3SaveShardedStrategy(codec=codec))
    (tmp_path / "w" / "c.0").unlink()
    with pytest.raises(dc.CorruptCheckpointError) as caught:
        dc.load({"w": shard("w", torch.zeros(4))}, tmp_path, "tensorstore")
    (finding,) = caught.value.findings
    assert (finding.key, finding.path) == ("w", str(tmp_path / "w" / "c.0"))


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
