"""``dckpt stats`` as a user runs it."""

import shutil
from pathlib import Path

import pytest
import torch

from dist_checkpointing import Checkpoint, save
from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.tools import stats
from samples import Run, Sample, Samples
from states import shard, wholes


def test_it_tells_what_there_is(any_sample: Sample, dckpt: Run) -> None:
    finished = dckpt("stats", any_sample.folder)
    assert (finished.code, finished.err) == (0, "")
    tensors = any_sample.tensors
    numel = sum(tensor.numel() for tensor in tensors.values())
    assert f"{len(tensors)} tensors, {numel:,} elements" in finished.out
    largest = max(tensors, key=lambda key: tensors[key].nbytes)
    listed = finished.out.partition("LARGEST TENSORS")[2].split("\n")[1]
    assert listed.split()[0] == largest
    for dtype in {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}:
        assert dtype in finished.out
    assert "optimizer" in finished.out


def test_json(any_sample: Sample, dckpt: Run) -> None:
    document = dckpt("stats", any_sample.folder, "--json", "--top", 2).json
    tensors = any_sample.tensors
    assert document["tensors"] == {
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    assert len(document["largest"]) == 2
    assert document["files"]["num_files"] == sum(p.is_file() for p in any_sample.folder.rglob("*"))
    assert "not_finite" not in document


def test_a_scan_finds_nan_and_infinity(sample: Sample, dckpt: Run) -> None:
    finished = dckpt("stats", sample.folder, "--scan")
    assert finished.code == 1
    assert "1 tensor with NaN or infinity" in finished.out
    (row,) = [line for line in finished.out.split("\n") if line.startswith("optimizer.moment  ")][
        -1:
    ]
    assert row.split() == ["optimizer.moment", "1", "2", "48"]
    document = dckpt("stats", sample.folder, "--scan", "--json")
    assert document.code == 1
    assert document.json["not_finite"] == {
        "optimizer.moment": {"num_nan": 1, "num_inf": 2, "num_elements": 48}
    }


@pytest.mark.parametrize("name", ["mc0.12.0_zarr", "mc0.15.3_zarr", "mc0.15.3_torch_dist"])
def test_a_scan_that_finds_nothing(samples: Samples, dckpt: Run, name: str) -> None:
    finished = dckpt("stats", samples(name).folder, "--scan")
    assert finished.code == 0
    assert "no NaN and no infinity" in finished.out
    assert dckpt("stats", samples(name).folder, "--scan", "--json").json["not_finite"] == {}


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("zarr-2", "zarr v3"),
        ("zarr-2-zstd", "zstd"),
        ("zarr-1", "zarr v2"),
        ("dcp", "none were kept"),
    ],
)
def test_what_only_this_backend_has(samples: Samples, dckpt: Run, name: str, fact: str) -> None:
    assert fact in dckpt("stats", samples(name).folder).out


def test_shares(tmp_path: Path, dckpt: Run) -> None:
    sizes = {"model.w": 100, "optimizer.m": 200, "optimizer.v": 100}
    state = {key: shard(key, torch.zeros(count)) for key, count in sizes.items()}
    save(state, tmp_path / "c")
    out = dckpt("stats", tmp_path / "c").out
    assert " ".join(out.split()).find("model 1 400 B 25.0% optimizer 2 1.2 KiB 75.0%") > 0
    save({"step": 1}, tmp_path / "empty")
    out = dckpt("stats", tmp_path / "empty", "--scan").out
    assert "0 tensors" in out


def test_bad_input(tmp_path: Path, dckpt: Run) -> None:
    finished = dckpt("stats", tmp_path)
    assert (finished.code, finished.out) == (2, "")
    assert "is not a distributed checkpoint" in finished.err


def test_it_tells_how_much_is_shared_with_other_checkpoints(tmp_path: Path, dckpt: Run) -> None:
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
    save(wholes(tensors), tmp_path / "1")
    assert "its own" not in dckpt("stats", tmp_path / "1").out
    assert "its own" not in dckpt("ls", tmp_path / "1").out
    save(wholes({**tensors, "w3": torch.ones(1000)}), tmp_path / "2", base=tmp_path / "1")
    files = dckpt("stats", tmp_path / "2", "--json").json["files"]
    assert files["num_bytes_shared"] == 16_000
    text = bytes_text(files["num_bytes"] - 16_000)
    for command in ("stats", "ls"):
        assert f"{text} of " in dckpt(command, tmp_path / "2").out
    shutil.rmtree(tmp_path / "1")
    assert "its own" not in dckpt("stats", tmp_path / "2").out


def test_the_counts_add_up(any_sample: Sample) -> None:
    checkpoint = Checkpoint.open(any_sample.folder)
    found = stats.count_contents(checkpoint, most_listed=3)
    tensors = any_sample.tensors
    files = [path for path in any_sample.folder.rglob("*") if path.is_file()]
    assert (found["files"]["num_files"], found["files"]["num_bytes"]) == (
        len(files),
        sum(path.stat().st_size for path in files),
    )
    assert found["tensors"]["num_tensors"] == len(tensors)
    assert found["tensors"]["num_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert found["num_elements"] == sum(tensor.numel() for tensor in tensors.values())
    for name, share in found["by_dtype"].items():
        own = [t for t in tensors.values() if str(t.dtype) == f"torch.{name}"]
        assert (share["num_tensors"], share["num_bytes"]) == (len(own), sum(t.nbytes for t in own))
    optimizer = [t for key, t in tensors.items() if key.startswith("optim")]
    assert found["optimizer"]["num_tensors"] == len(optimizer) > 0
    assert found["optimizer"]["num_bytes"] == sum(t.nbytes for t in optimizer)
    assert found["model"]["num_tensors"] + found["optimizer"]["num_tensors"] == len(tensors)
    sizes = sorted((tensor.nbytes for tensor in tensors.values()), reverse=True)
    assert [size for _, size in found["largest"]] == sizes[:3]
    assert len(found["largest_files"]) == min(3, len(files))
    assert found["num_chunks"] == sum(len(handle.chunks) for handle in checkpoint.values())
    largest = max(c.num_bytes for handle in checkpoint.values() for c in handle.chunks)
    assert found["largest_chunk_bytes"] == largest
