"""What is special about the tensorstore backend: its database, sections, damage and full disks."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
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
from scripts import run_forked
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


def test_all_shards_of_a_tensor_are_verified(tmp_path: Path) -> None:
    """Also where a rank wants two of them, and only the second is damaged."""
    parts = [shard("w", torch.ones(4), (0, i, 3)) for i in range(3)]
    dc.save({"w": parts}, tmp_path, "zarr")
    with (tmp_path / "w" / "c.2").open("r+b") as file:
        file.write(b"?")
    dc.load({"w": parts[:2]}, tmp_path, verify=True)
    with pytest.raises(dc.CorruptCheckpointError, match="checksum differs"):
        dc.load({"w": [parts[0], parts[2]]}, tmp_path, verify=True)


@pytest.mark.parametrize("codec", [None, "zstd", "gzip", "blosc"])
def test_a_lost_chunk_of_zarr_is_named_and_never_zeros(tmp_path: Path, codec: Any) -> None:
    dc.save({"w": shard("w", torch.ones(4))}, tmp_path, Zarr3SaveShardedStrategy(codec=codec))
    (tmp_path / "w" / "c.0").unlink()
    with pytest.raises(dc.CorruptCheckpointError) as caught:
        dc.load({"w": shard("w", torch.zeros(4))}, tmp_path, "tensorstore")
    (finding,) = caught.value.findings
    assert (finding.key, finding.path) == ("w", str(tmp_path / "w" / "c.0"))


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_a_hostile_object_in_the_database_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    dc.save({"o": dc.ShardedObject("o", Hostile(marker), (1,), (0,))}, tmp_path / "c", trusted=True)
    template = {"o": dc.ShardedObject("o", None, (1,), (0,))}
    with pytest.raises(dc.UnsupportedFormatError, match="system"):
        dc.load(template, tmp_path / "c")
    assert not marker.exists()
    assert dc.load(template, tmp_path / "c", trusted=True) == {"o": 0}
    assert marker.exists()


@pytest.mark.parametrize("backend", ["tensorstore", "zarr"])
def test_a_full_disk_is_one_clear_error_and_frees_what_was_written(
    tmp_path: Path, backend: str
) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write alike."""
    script = f"""
import json, resource, signal, sys, torch
from dist_checkpointing import RankFailedError, ShardedTensor, save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {{"w": ShardedTensor.from_rank_offsets("w", torch.ones(1024, 1024))}}
save(state, sys.argv[1] + "/good", {backend!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save(state, sys.argv[1] + "/bad", {backend!r})
except RankFailedError as error:
    print(json.dumps([str(error), list(error.ranks)]))
"""
    done = run_forked("-c", script, tmp_path)
    assert done.returncode == 0, done.stderr
    message, ranks = json.loads(done.stdout)
    assert "too large" in message
    assert ranks == [0]
    assert not dc.check_is_distributed_checkpoint(tmp_path / "bad")
    left = [path.relative_to(tmp_path / "bad") for path in (tmp_path / "bad").rglob("*")]
    assert {path.as_posix() for path in left if (tmp_path / "bad" / path).is_file()} == {
        ".dckpt/attempt.json"
    }
    assert torch.equal(dc.load_plain_tensors(tmp_path / "good")["w"], torch.ones(1024, 1024))
    dc.save({"v": shard("v", torch.ones(2))}, tmp_path / "bad", backend)
    assert list(dc.load_tensors_metadata(tmp_path / "bad")) == ["v"]


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


def step_state(step: int) -> dict[str, Any]:
    tensor = torch.full((300, 1024), float(step))
    small: dict[str, Any] = {f"s{i}": shard(f"s{i}", tensor[i, :9]) for i in range(50)}
    return {"w": shard("w", tensor), **small, "step": step}


def test_who_reads_what_is_overwritten_gets_one_whole_state_or_an_error(tmp_path: Path) -> None:
    dc.save(step_state(0), tmp_path)
    stop = threading.Event()
    seen: list[float] = []
    errors: list[dc.CheckpointingException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                loaded = dc.load_plain_tensors(tmp_path)
            except dc.CheckpointingException as error:
                errors.append(error)
                continue
            values = {float(loaded.pop("step"))}
            values |= {value for tensor in loaded.values() for value in tensor.unique().tolist()}
            assert len(values) == 1
            seen.extend(values)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(1, 6):
            dc.save(step_state(step), tmp_path, overwrite=True)
        stop.set()
        reading.result()
    assert sorted(seen) == seen
    assert (dc.load_plain_tensors(tmp_path)["w"] == 5).all()


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
