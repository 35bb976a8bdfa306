"""What is special about the tensorstore backend: its database, sections, damage and full disks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch

from damage import flip
from dist_checkpointing import (
    Checkpoint,
    CheckpointingException,
    CorruptCheckpointError,
    RankFailedError,
    ShardedObject,
    UnsupportedFormatError,
    check_is_distributed_checkpoint,
    load,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping.tensor_memory import DTYPES, DType, as_numpy
from dist_checkpointing.storage.options import Checksum, Durability, ReadMode, StorageOptions
from dist_checkpointing.storage.progress import Progress
from dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from scripts import run_forked
from states import cell, rows, save_on, shard

WORLD = 2
LARGE = (1024, 1024)  # 4 MiB of float32: written without a copy, unlike the small ones


def values(seed: int, shape: tuple[int, ...] = LARGE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def save_state(folder: Path, strategy: Any = None) -> dict[str, torch.Tensor]:
    full = {
        "model.w": values(0),
        "model.b": values(1, (64,)),
        "optimizer.m": values(2),
        "optimizer.v": values(3, (64,)),
    }

    def state(comm: Comm) -> dict[str, Any]:
        leaves = {key: rows(key, tensor, comm) for key, tensor in full.items()}
        return {**leaves, "rng": cell("rng", {"rank": comm.rank}, comm)}

    save_on(WORLD, state, folder, strategy)
    return full


def data_files(folder: Path) -> list[Path]:
    files = [path for path in (folder / "data").rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


@pytest.mark.parametrize(
    "dtype", [row for row in DTYPES if row.name != "float8_e8m0fnu"], ids=lambda row: row.name
)
def test_a_tensor_is_opened_with_nothing_but_tensorstore(tmp_path: Path, dtype: DType) -> None:
    count = 12 * dtype.itemsize
    raw = torch.randint(0, 2 if dtype.name == "bool" else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype.torch).reshape(4, 3)
    run_ranks(
        WORLD,
        lambda comm: save({"w": rows("a key/w", tensor, comm)}, tmp_path, comm=comm),
    )
    array: Any = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{tmp_path}/",
                "path": "a%20key%2Fw/",
            },
        }
    ).result()
    read = array.read().result()
    assert array.chunk_layout.read_chunk.shape == (2, 3)
    assert read.tobytes() == as_numpy(tensor).tobytes()


def test_few_files_whatever_the_number_of_tensors(tmp_path: Path) -> None:
    keys = [f"{prefix}{i}" for i in range(500) for prefix in ("w", "optimizer.")]
    full = values(0, (4, 2))
    save_on(WORLD, lambda comm: {key: rows(key, full, comm) for key in keys}, tmp_path)
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < 40
    assert len(load_tensors_metadata(tmp_path)) == 1000


def test_dropping_the_optimizer_frees_its_space(tmp_path: Path) -> None:
    full = save_state(tmp_path)

    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    before = used()
    remove_sharded_tensors(tmp_path, "optimizer")
    # The tree of keys is written anew, and keeps its old nodes.
    assert before - used() > 0.999 * full["optimizer.m"].nbytes
    left = load_plain_tensors(tmp_path)
    assert {"model.w", "model.b"} <= set(left)
    assert not any(key.startswith("optimizer") for key in left)
    assert torch.equal(left["model.w"], full["model.w"])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


@pytest.mark.parametrize("mode", [ReadMode.MEMMAP, ReadMode.PREAD])
@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_data_is_an_error_and_never_zeros(tmp_path: Path, damage: str, mode: ReadMode) -> None:
    save_state(tmp_path)
    DAMAGES[damage](data_files(tmp_path)[0])
    strategy = TensorStoreLoadShardedStrategy(options=StorageOptions(read_mode=mode))
    template: Any = load_tensors_metadata(tmp_path)
    with pytest.raises(CorruptCheckpointError) as raised:
        load(template, tmp_path, strategy)
    assert any(key in str(raised.value) for key in ("model.w", "optimizer.m"))


def test_a_lost_database_is_an_error(tmp_path: Path) -> None:
    save_state(tmp_path)
    (tmp_path / "manifest.ocdbt").unlink()
    template: Any = load_tensors_metadata(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt"):
        load(template, tmp_path)


@pytest.mark.parametrize("backend", ["tensorstore", ("zarr", 1), ("zarr", 2)])
def test_a_flipped_bit_is_found_when_asked_for(tmp_path: Path, backend: Any) -> None:
    full = save_state(tmp_path, backend)
    template: Any = load_tensors_metadata(tmp_path)
    seen: list[Progress] = []
    verified = load(template, tmp_path, verify=True, progress=seen.append)
    assert torch.equal(verified["model.w"], full["model.w"])
    assert "verifying" in {report.phase for report in seen}
    if backend == "tensorstore":
        largest = data_files(tmp_path)[0]
    else:
        largest = max((tmp_path / "model.w").iterdir(), key=lambda path: path.stat().st_size)
    flip(largest)
    with pytest.raises(CorruptCheckpointError) as raised:
        load(template, tmp_path, verify=True)
    (finding, *_) = raised.value.findings
    assert finding.key in ("model.w", "optimizer.m")
    assert "checksum differs" in finding.problem
    assert finding.path is not None
    # What is not asked for is not verified.
    load({"b": template["model.b"]}, tmp_path, verify=True)


def test_all_shards_of_a_tensor_are_verified(tmp_path: Path) -> None:
    """Also where a rank wants two of them, and only the second is damaged."""
    parts = [shard("w", torch.ones(4), (0, i, 3)) for i in range(3)]
    save({"w": parts}, tmp_path, "zarr")
    with (tmp_path / "w" / "c.2").open("r+b") as file:
        file.write(b"?")
    load({"w": parts[:2]}, tmp_path, verify=True)
    with pytest.raises(CorruptCheckpointError, match="checksum differs"):
        load({"w": [parts[0], parts[2]]}, tmp_path, verify=True)


def test_without_checksums_there_is_nothing_to_verify(tmp_path: Path) -> None:
    options = StorageOptions(checksum=Checksum.NONE)
    save_state(tmp_path, TensorStoreSaveShardedStrategy(options=options))
    template: Any = load_tensors_metadata(tmp_path)
    load(template, tmp_path)
    with pytest.raises(UnsupportedFormatError, match="no checksums"):
        load(template, tmp_path, verify=True)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_a_hostile_object_in_the_database_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    save({"o": ShardedObject("o", Hostile(marker), (1,), (0,))}, tmp_path / "c", trusted=True)
    template = {"o": ShardedObject("o", None, (1,), (0,))}
    with pytest.raises(UnsupportedFormatError, match="system"):
        load(template, tmp_path / "c")
    assert not marker.exists()
    assert load(template, tmp_path / "c", trusted=True) == {"o": 0}
    assert marker.exists()


@pytest.mark.parametrize("durability", Durability)
def test_durable_means_that_every_file_is_synced(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    options = StorageOptions(durability=durability)
    save_state(tmp_path, TensorStoreSaveShardedStrategy(options=options))
    files = {str(path) for path in data_files(tmp_path)}
    assert files
    if durability is Durability.FSYNC:
        assert files <= synced
        assert {str(tmp_path), str(tmp_path / "data"), str(tmp_path / "d")} <= synced
        # Under another name: it is put in its place when it is on the disk.
        assert any(name.startswith(str(tmp_path / "manifest.ocdbt")) for name in synced)
    else:
        # A commit that outlives its data would be worse than none.
        assert not synced


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
    assert not check_is_distributed_checkpoint(tmp_path / "bad")
    left = [path.relative_to(tmp_path / "bad") for path in (tmp_path / "bad").rglob("*")]
    assert {path.as_posix() for path in left if (tmp_path / "bad" / path).is_file()} == {
        ".dckpt/attempt.json"
    }
    assert torch.equal(load_plain_tensors(tmp_path / "good")["w"], torch.ones(1024, 1024))
    save({"v": shard("v", torch.ones(2))}, tmp_path / "bad", backend)
    assert list(load_tensors_metadata(tmp_path / "bad")) == ["v"]


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    tensor = values(0)
    saved: list[Progress] = []
    loaded: list[Progress] = []
    save({"w": shard("w", tensor)}, tmp_path, progress=saved.append)
    template: Any = load_tensors_metadata(tmp_path)
    load(template, tmp_path, progress=loaded.append)
    for reports, phase in ((saved, "writing"), (loaded, "reading")):
        last = [report for report in reports if report.phase == phase][-1]
        assert (last.bytes_done, last.bytes_total, last.rank) == (tensor.nbytes, tensor.nbytes, 0)


def test_small_buffers_and_data_files_change_nothing_but_the_files(tmp_path: Path) -> None:
    options = StorageOptions(threads=1, buffer_bytes=1, data_file_bytes=1 << 20)
    full = save_state(tmp_path / "a", TensorStoreSaveShardedStrategy(options=options))
    save_state(tmp_path / "b")
    assert len(data_files(tmp_path / "a")) > len(data_files(tmp_path / "b"))
    strategy = TensorStoreLoadShardedStrategy(options=options)
    template: Any = load_tensors_metadata(tmp_path / "a")
    result = load(template, tmp_path / "a", strategy)
    assert all(torch.equal(result[key], tensor) for key, tensor in full.items())


def test_impossible_options_are_refused() -> None:
    with pytest.raises(Exception, match="threads must be at least 1"):
        StorageOptions(threads=0)


def test_an_error_of_one_rank_reaches_all(tmp_path: Path) -> None:
    """The folder for one rank's data is a file: only that rank cannot write."""

    class Blocked(TensorStoreSaveShardedStrategy):
        def make_writer(self, checkpoint_dir: Path) -> Any:
            writer = super().make_writer(checkpoint_dir)
            real: Any = writer.write_data

            def write_data(plan: Any, planner: Any) -> Any:
                if plan.table.ranks[0] == 1:
                    raise OSError(28, "No space left on device")
                return real(plan, planner)

            writer.write_data = write_data  # type: ignore[method-assign]
            return writer

    def save_rank(comm: Comm) -> str:
        with pytest.raises(RankFailedError) as raised:
            save({"w": rows("w", values(0), comm)}, tmp_path, Blocked(), comm=comm)
        return str(raised.value)

    first, second = run_ranks(WORLD, save_rank)
    assert first == second
    assert "No space left on device; rank 1" in first
    assert not data_files(tmp_path)


def step_state(step: int) -> dict[str, Any]:
    tensor = torch.full((300, 1024), float(step))
    small: dict[str, Any] = {f"s{i}": shard(f"s{i}", tensor[i, :9]) for i in range(50)}
    return {"w": shard("w", tensor), **small, "step": step}


def test_two_saves_at_once_into_different_folders(tmp_path: Path) -> None:
    def save_many(name: str) -> None:
        for step in range(4):
            save(step_state(step + len(name)), tmp_path / name / str(step))

    names = ["a", "bbbbbb"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save_many, names))
    for name in names:
        for step in range(4):
            loaded = load_plain_tensors(tmp_path / name / str(step))
            assert loaded.pop("step") == step + len(name)
            assert all((value == step + len(name)).all() for value in loaded.values())
            assert len(loaded) == 51


def test_who_reads_what_is_overwritten_gets_one_whole_state_or_an_error(tmp_path: Path) -> None:
    save(step_state(0), tmp_path)
    stop = threading.Event()
    seen: list[float] = []
    errors: list[CheckpointingException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                loaded = load_plain_tensors(tmp_path)
            except CheckpointingException as error:
                errors.append(error)
                continue
            values = {float(loaded.pop("step"))}
            values |= {value for tensor in loaded.values() for value in tensor.unique().tolist()}
            assert len(values) == 1
            seen.extend(values)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(1, 9):
            save(step_state(step), tmp_path, overwrite=True)
        stop.set()
        reading.result()
    assert sorted(seen) == seen
    assert (load_plain_tensors(tmp_path)["w"] == 8).all()


def test_what_tensorstore_writes_into_a_checkpoint_is_read(tmp_path: Path) -> None:
    """Its writes make another tree, with the small values in it, and keep what was there."""
    full = save_state(tmp_path)
    for key in ("model.w", "optimizer.v"):
        base = {"driver": "file", "path": f"{tmp_path}/"}
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
        array: Any = ts.open(spec, open=True).result()
        array[3:5] = 7.0
        full[key][3:5] = 7.0
    template: Any = load_tensors_metadata(tmp_path)
    loaded = load(template, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    for key, tensor in full.items():
        assert torch.equal(loaded[key], tensor)
        assert torch.equal(checkpoint[key][2:6], tensor[2:6])
    assert checkpoint["optimizer.v"].location(0).endswith("optimizer.v/c.0")
    remove_sharded_tensors(tmp_path, "model")
    for key in ("optimizer.m", "optimizer.v"):
        assert torch.equal(load_plain_tensors(tmp_path)[key], full[key])


def test_one_file_a_rank_and_data_group(tmp_path: Path) -> None:
    """Small values or large ones, and whatever the number of threads; no folders of their own."""
    save_state(tmp_path, TensorStoreSaveShardedStrategy(options=StorageOptions(threads=8)))
    names = [path.relative_to(tmp_path / "data").as_posix() for path in data_files(tmp_path)]
    found = sorted((name.split("/")[0], name.split("/")[1].split(".")[0]) for name in names)
    assert found == [(group, str(rank)) for group in ("model", "optimizer") for rank in range(2)]
    assert len(list((tmp_path / "d").iterdir())) == 1
