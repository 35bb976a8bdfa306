"""Every source to every target. The oracle is the plain full tensor, compared bit by bit."""

import errno
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import Box
from dist_checkpointing.planning import Keep, Recipe
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.strategies.torch_file import COMMON_KEY, OBJECTS_KEY
from dist_checkpointing.testing import assert_same_bits, failures_on, random_bits, run_ranks
from dist_checkpointing.tools import convert as conversions
from dist_checkpointing.tools.convert import Conversion, conversion
from faults import before_first, failing
from samples import COMMON, METADATA, save_sample
from states import cell, shard

BACKENDS = {
    "tensorstore": ("tensorstore", 1),
    "zarr": ("zarr", 2),
    "zarr:1": ("zarr", 1),
    "torch_dist": ("torch_dist", 1),
}
FORMATS = [*BACKENDS, "safetensors", "torch_file"]
KINDS = ["tensorstore", "safetensors", "torch_file"]
"""What is written: a checkpoint, a folder of files, a file."""
convert = conversions.convert
ConvertOptions = conversions.ConvertOptions
ROOMY = ConvertOptions(memory_bytes=8 * 2**30)


ORACLE = {
    key: random_bits(shape, dtype, seed)
    for seed, (key, shape, dtype) in enumerate(
        [
            ("model.w", (8, 12), torch.float32),
            ("model.half", (6, 4), torch.bfloat16),
            ("model.odd/key", (4, 3, 2), torch.float16),
            ("uneven", (7, 5), torch.float64),
            ("flat", (6, 10), torch.float32),
            ("flags", (7,), torch.bool),
            ("ids", (4,), torch.int64),
            ("fp8", (4, 4), torch.float8_e4m3fn),
            ("scalar", (), torch.float32),
            ("none", (0, 3), torch.float32),
        ]
    )
}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for key, tensor in wanted.items():
        assert_same_bits(found[key], tensor, key)


def make_source(folder: Path, file_format: str) -> Path:
    path = folder / f"source.{file_format.replace(':', '')}"
    if file_format in BACKENDS:
        save_sample(path, BACKENDS[file_format], ORACLE)
    elif file_format == "safetensors":
        path.mkdir()
        keys = list(ORACLE)
        parts = {"model-00001-of-00002": keys[:4], "model-00002-of-00002": keys[4:]}
        for name, own in parts.items():
            save_file({k: ORACLE[k] for k in own}, path / f"{name}.safetensors", {"note": "a text"})
        weight_map = {k: f"{name}.safetensors" for name, own in parts.items() for k in own}
        content = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(content))
    else:
        nested: dict[str, Any] = {"model": {}, "note": "a text", "step": 7}
        for key, tensor in ORACLE.items():
            above, _, name = key.rpartition(".")
            (nested[above] if above else nested)[name] = tensor
        torch.save(nested, path)
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {file_format: make_source(folder, file_format) for file_format in FORMATS}


def read_back(path: Path, to: str) -> dict[str, torch.Tensor]:
    """With the programs that the formats are for."""
    if to == "safetensors":
        return load_file(path / "model-00001-of-00001.safetensors")
    if to == "torch_file":
        content = torch.load(path, weights_only=True)
        return {k: v for k, v in content.items() if k not in (COMMON_KEY, OBJECTS_KEY)}
    loaded = dc.load_plain_tensors(path)
    return {key: loaded[key] for key in dc.Checkpoint.open(path)}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_bits_arrive(sources: dict[str, Path], source: str, to: str, tmp_path: Path) -> None:
    done = convert(sources[source], tmp_path / "out", to, options=ROOMY)
    assert_same(read_back(tmp_path / "out", to), ORACLE)
    if source == to == "safetensors":
        with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "note": "a text"}
    num_bytes = sum(tensor.nbytes for tensor in ORACLE.values())
    assert done.plan.num_bytes == num_bytes
    if source not in BACKENDS:
        assert (done.verified_bytes, done.not_verified) == (0, "the source keeps no checksums")
        return
    assert (done.verified_bytes, done.not_verified) == (num_bytes, None)
    if to == "safetensors":
        assert ["iteration" in done.left_out[0], "rng" in done.left_out[1]] == [True, True]
        return
    found = dc.Checkpoint.open(tmp_path / "out")
    lost = {"args"} if to == "torch_file" else set[str]()  # a Namespace, which torch refuses
    assert len(done.left_out) == len(lost)
    common = {**COMMON, "content_metadata": METADATA}
    assert found.common == {key: value for key, value in common.items() if key not in lost}
    assert {key: own.shape for key, own in found.objects.items()} == {"rng": (2,)}
    assert [found.objects["rng"][rank] for rank in range(2)] == [{"seed": [r, 5]} for r in (0, 1)]


def test_tensors_in_common_state_and_objects_reach_a_torch_file(tmp_path: Path) -> None:
    def values(start: int) -> torch.Tensor:
        return torch.arange(start, start + 3)

    common: dict[str, Any] = {
        "a": [values(0), (values(10), {"x": values(20)})],
        "b": values(30),
        "none": values(0)[:0],
    }
    value = {"y": [values(40), values(50)], "z": values(60).bfloat16()}
    tensors = {"w": values(70), "empty": torch.ones(0, 2), "v": torch.tensor(5)}
    leaves = {key: shard(key, data) for key, data in tensors.items()}
    state = {**common, **leaves, "o": cell("o", value), "args": Namespace(lr=1.0)}
    dc.save(state, tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "out.pt", "torch_file", options=ROOMY)
    (left_out,) = done.left_out  # which torch refuses to read with weights_only
    assert "args" in left_out
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = {**tensors, COMMON_KEY: common, OBJECTS_KEY: {"o": {(0,): value}}}
    assert repr(found) == repr({key: expected[key] for key in found})
    assert found.keys() == expected.keys()
    again = dc.Checkpoint.open(tmp_path / "out.pt")
    assert repr(again.common) == repr(common)
    assert repr(again.objects["o"][0]) == repr(value)


def test_the_cut_is_kept_and_may_be_changed(sources: dict[str, Path], tmp_path: Path) -> None:
    convert(sources["zarr"], tmp_path / "same", "tensorstore", options=ROOMY)
    before, after = (dc.Checkpoint.open(p) for p in (sources["zarr"], tmp_path / "same"))
    assert {k: [c.box for c in before[k].chunks] for k in before if k != "flat"} == {
        k: [c.box for c in after[k].chunks] for k in after if k != "flat"
    }
    options = replace(ROOMY, reshard=["model.w:axis=1,parts=3;axis=0,parts=2"])
    for to in BACKENDS:
        convert(sources["zarr"], tmp_path / to, to, options=options)
        assert dc.Checkpoint.open(tmp_path / to)["model.w"].chunk_shape == (4, 4), to
        assert_same(read_back(tmp_path / to, to), ORACLE)


def test_files_are_divided_as_hugging_face_does(sources: dict[str, Path], tmp_path: Path) -> None:
    options = ConvertOptions(shard_bytes=300)
    convert(sources["tensorstore"], tmp_path / "out", "safetensors", options=options)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ORACLE.values())
    found: dict[str, torch.Tensor] = {}
    names = sorted(set(index["weight_map"].values()))
    count = len(names)
    assert count > 1
    assert names == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name in names:
        own = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][key] == name for key in own)
        assert len(own) == 1 or sum(tensor.nbytes for tensor in own.values()) <= 300
        found |= own
    assert_same(found, ORACLE)
    convert(tmp_path / "out", tmp_path / "back", "zarr", options=ROOMY)
    assert_same(read_back(tmp_path / "back", "zarr"), ORACLE)


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_compressed_chunks(codec: str, tmp_path: Path) -> None:
    full = torch.arange(60.0).reshape(6, 10)
    leaves = [shard("w", full[:, i * 5 : i * 5 + 5], (1, i, 2)) for i in (0, 1)]
    dc.save({"l": leaves}, tmp_path / "source", Zarr3SaveShardedStrategy(codec=codec))
    for to in KINDS:
        done = convert(tmp_path / "source", tmp_path / to, to, options=ROOMY)
        assert done.verified_bytes == full.nbytes
        assert_same(read_back(tmp_path / to, to), {"w": full})


def test_views_and_parameters_in_a_torch_file(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    content = {
        "turned": base.t(),
        "part": base[1:, 1:],
        "parameter": torch.nn.Parameter(base.clone()),
        "list": [base, 5],
        "sparse": torch.eye(2).to_sparse(),
    }
    torch.save(content, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out", "zarr", options=ROOMY)
    found = read_back(tmp_path / "out", "zarr")
    wanted = {"turned": base.t(), "part": base[1:, 1:], "parameter": base, "list.0": base}
    assert_same(found, wanted)
    assert dc.Checkpoint.open(tmp_path / "out").common["list"] == [None, 5]


@pytest.mark.parametrize("to", KINDS)
def test_values_that_are_stored_once_are_not_written_out_unasked(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_LEAST_GROWN_BYTES", 0)
    torch.save({"w": torch.tensor([1.5]).expand(100_000)}, tmp_path / "model.pt")

    def run(**changes: Any) -> Any:
        options = replace(ROOMY, **changes)
        return convert(tmp_path / "model.pt", tmp_path / "out", to, options=options)

    with pytest.raises(dc.CheckpointingException, match=r"390\.6 KiB(.|\n)*--force"):
        run()
    assert run(dry_run=True).plan.num_bytes == 400_000
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    run(overwrite=True)
    assert_same(read_back(tmp_path / "out", to), {"w": torch.full((100_000,), 1.5)})


@pytest.mark.parametrize(
    ("source", "to"),
    [*zip(FORMATS, [*FORMATS[1:5], *FORMATS[:2]], strict=True)],  # only one rank writes one file
)
def test_ranks_share_the_work(
    sources: dict[str, Path], source: str, to: str, tmp_path: Path
) -> None:
    def one(comm: Comm) -> Conversion:
        return convert(sources[source], tmp_path / "out", to, options=ROOMY, comm=comm)

    done = run_ranks(3, one)
    assert_same(read_back(tmp_path / "out", to), ORACLE)
    alone = convert(sources[source], tmp_path / "alone", to, options=ROOMY)
    for shared in done:
        assert shared.verified_bytes == alone.verified_bytes
        assert shared.left_out == alone.left_out
    dc.verify_checkpoint(tmp_path / "out")


def test_ranks_fail_together(sources: dict[str, Path], tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        convert(sources["zarr"], tmp_path / "out", "tensorstore", options=ROOMY, comm=comm)

    with failing("dist_checkpointing.Checkpoint.read", code=errno.EIO, nth=2, times=1):
        assert len(failures_on(3, one)) == 3
    assert not (tmp_path / "out").exists()
    assert (
        len(failures_on(2, lambda comm: convert(tmp_path / "no", tmp_path / "o", comm=comm))) == 2
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_a_file_of_before_pytorch_1_6_is_refused_with_the_remedy(
    trusted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "old.bin"
    torch.save({"w": torch.arange(5)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(dc.UnsupportedFormatError, match=r"PyTorch 1\.6") as raised:
        len(dc.Checkpoint.open(path, trusted=trusted))
    assert "torch.save(torch.load(path), path)" in str(raised.value)
    torch.save(torch.load(path), path)
    convert(path, tmp_path / "out", "zarr", options=ROOMY)
    assert_same(read_back(tmp_path / "out", "zarr"), {"w": torch.arange(5)})


@pytest.mark.parametrize("kind", ["safetensors", "torch_file"])
def test_a_file_that_is_replaced_while_it_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{kind}"
    write: Any = save_file if kind == "safetensors" else torch.save
    write({"w": torch.ones(4)}, path)
    opened = dc.Checkpoint.open(path)
    opened.require_unchanged()
    first = Box((0,), (4,))
    assert_same({"w": opened.read([("w", first)])[0]}, {"w": torch.ones(4)})
    write({"w": torch.zeros(4)}, tmp_path / "new")
    (tmp_path / "new").replace(path)
    with pytest.raises(dc.CorruptCheckpointError, match="it changed"):
        opened.require_unchanged()
    with pytest.raises(dc.CorruptCheckpointError, match="it changed"):
        opened.read([("w", first)])


@pytest.mark.parametrize("to", KINDS)
def test_what_is_there_is_replaced_only_if_asked_for_and_alike(
    sources: dict[str, Path], to: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    for overwrite in (False, True):
        options = ConvertOptions(overwrite=overwrite)
        with pytest.raises(dc.CheckpointExistsError):
            convert(sources["zarr"], out, to, options=options)
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    out.rmdir()
    convert(sources["zarr"], out, to, recipe=Recipe(Keep("flags")), options=ROOMY)
    with pytest.raises(dc.CheckpointExistsError, match="force"):
        convert(sources["zarr"], out, to, options=ROOMY)
    convert(sources["zarr"], out, to, options=ConvertOptions(overwrite=True))
    assert_same(read_back(out, to), ORACLE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_not_into_itself(sources: dict[str, Path], place: str) -> None:
    source = sources["zarr"]
    with pytest.raises(dc.CheckpointExistsError, match="itself"):
        convert(source, source / place, "zarr", options=ConvertOptions(overwrite=True))
    assert dc.Checkpoint.open(source).is_committed


def test_a_strategy_with_options_of_its_own(sources: dict[str, Path], tmp_path: Path) -> None:
    strategy = Zarr3SaveShardedStrategy(codec="zstd")
    before = vars(strategy).copy()
    done = convert(sources["tensorstore"], tmp_path / "out", strategy, options=ROOMY)
    assert done.target == "zarr 2"
    assert dc.Checkpoint.open(tmp_path / "out").index.codec == "zstd"
    assert_same(read_back(tmp_path / "out", "zarr"), ORACLE)
    assert vars(strategy) == before
    convert(sources["tensorstore"], tmp_path / "old", ("zarr", 1), options=ROOMY)
    assert dc.Checkpoint.open(tmp_path / "old").backend == ("zarr", 1)


def test_what_cannot_be_read_or_written(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    unknown = (tmp_path / "x.safetensors").read_bytes().replace(b"F32", b"X32")
    (tmp_path / "x.safetensors").write_bytes(unknown)
    with pytest.raises(dc.UnsupportedFormatError, match="'w': unknown dtype; found X32"):
        convert(tmp_path / "x.safetensors", tmp_path / "out", "zarr")
    dc.save({"c": shard("c", torch.ones(2).to(torch.complex128))}, tmp_path / "c")
    with pytest.raises(dc.CheckpointingException, match="complex128"):
        convert(tmp_path / "c", tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", KINDS)
def test_a_read_that_fails_and_a_source_that_changes_leave_nothing(
    sources: dict[str, Path], to: str, tmp_path: Path
) -> None:
    no_space = pytest.raises(dc.CheckpointingException, match="No space left")
    with failing("dist_checkpointing.Checkpoint.read", code=errno.ENOSPC), no_space as caught:
        convert(sources["zarr"], tmp_path / "out", to, options=ROOMY)
    assert "Traceback" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []

    def save(**options: Any) -> None:
        dc.save({"k": shard("k", torch.ones(4))}, tmp_path / "source", **options)

    save()
    changing = before_first("dist_checkpointing.Checkpoint.read", lambda *_: save(overwrite=True))
    with changing, pytest.raises(dc.CheckpointingException, match="changed"):
        convert(tmp_path / "source", tmp_path / "out", to, options=ROOMY)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
