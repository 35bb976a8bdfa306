"""``dckpt stats`` as a user runs it."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from dist_checkpointing import Checkpoint, save
from dist_checkpointing.byte_sizes import bytes_text
from samples import Run, Sample, Samples
from states import shard, wholes


def test_it_tells_what_there_is(any_sample: Sample, dckpt: Run) -> None:
    out = dckpt("stats", any_sample.folder, code=0, err="").out
    tensors = any_sample.tensors
    numel = sum(tensor.numel() for tensor in tensors.values())
    assert f"{len(tensors)} tensors, {numel:,} elements" in out
    largest = max(tensors, key=lambda key: tensors[key].nbytes)
    assert out.partition("LARGEST TENSORS")[2].split("\n")[1].split()[0] == largest
    assert "optimizer" in out

    found = dckpt("stats", any_sample.folder, "--json", "--top", 3).json
    files = [path for path in any_sample.folder.rglob("*") if path.is_file()]
    assert found["files"]["num_files"] == len(files)
    assert found["files"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert found["tensors"] == amount(tensors.values())
    assert found["num_elements"] == numel
    for name, share in found["by_dtype"].items():
        assert name in out
        assert share == amount(t for t in tensors.values() if str(t.dtype) == f"torch.{name}")
    assert sum(share["num_tensors"] for share in found["by_dtype"].values()) == len(tensors)
    optimizer = [t for key, t in tensors.items() if key.startswith("optim")]
    assert found["optimizer"] == amount(optimizer)
    assert found["model"]["num_tensors"] + len(optimizer) == len(tensors) > len(optimizer) > 0
    sizes = sorted((tensor.nbytes for tensor in tensors.values()), reverse=True)
    assert [size for _, size in found["largest"]] == sizes[:3]
    assert len(found["largest_files"]) == min(3, len(files))
    handles = Checkpoint.open(any_sample.folder).values()
    assert found["num_chunks"] == sum(len(handle.chunks) for handle in handles)
    most = max(chunk.num_bytes for handle in handles for chunk in handle.chunks)
    assert found["largest_chunk_bytes"] == most
    assert "not_finite" not in found


def amount(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    sizes = [tensor.nbytes for tensor in tensors]
    return {"num_tensors": len(sizes), "num_bytes": sum(sizes)}


def test_a_scan_finds_nan_and_infinity(any_sample: Sample, dckpt: Run) -> None:
    moment = {"num_nan": 1, "num_inf": 2, "num_elements": 48}
    is_ours = "optimizer.moment" in any_sample.tensors
    finished = dckpt("stats", any_sample.folder, "--scan", code=int(is_ours))
    if is_ours:
        assert "1 tensor with NaN or infinity" in finished.out
        row = [line for line in finished.out.split("\n") if line.startswith("optimizer.moment  ")][
            -1
        ]
        assert row.split() == ["optimizer.moment", "1", "2", "48"]
    else:
        assert "no NaN and no infinity" in finished.out
    document = dckpt("stats", any_sample.folder, "--scan", "--json", code=int(is_ours)).json
    assert document["not_finite"] == ({"optimizer.moment": moment} if is_ours else {})


def test_what_only_one_backend_has(samples: Samples, dckpt: Run) -> None:
    facts = {"zarr-2": "zarr v3", "zarr-2-zstd": "compression  zstd", "zarr-1": "zarr v2"}
    for name, fact in (facts | {"dcp": "none were kept"}).items():
        assert fact in dckpt("stats", samples(name).folder).out, name


def test_shares(tmp_path: Path, dckpt: Run) -> None:
    sizes = {"model.w": 100, "optimizer.m": 200, "optimizer.v": 100}
    state = {key: shard(key, torch.zeros(count)) for key, count in sizes.items()}
    save(state, tmp_path / "c")
    out = dckpt("stats", tmp_path / "c").out
    assert " ".join(out.split()).find("model 1 400 B 25.0% optimizer 2 1.2 KiB 75.0%") > 0
    save({"step": 1}, tmp_path / "empty")
    out = dckpt("stats", tmp_path / "empty", "--scan").out
    assert "0 tensors" in out


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
