"""``dckpt`` on files of safetensors and torch.save, and right after a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_checkpointing import CorruptCheckpointError
from dist_checkpointing.tools import convert
from samples import Run, Sample, Samples

TO = {"safetensors": "model", "safetensors-file": "model.safetensors", "torch": "model.pt"}


@pytest.fixture(params=list(TO))
def converted(request: pytest.FixtureRequest, samples: Samples, tmp_path: Path, dckpt: Run) -> Path:
    place = tmp_path / TO[request.param]
    to = request.param.partition("-")[0]
    assert dckpt("convert", samples("tensorstore").folder, place, "--to", to).code == 0
    return place


@pytest.fixture
def source(samples: Samples) -> Sample:
    return samples("tensorstore")


def test_it_lists_and_counts_what_was_converted(
    converted: Path, source: Sample, dckpt: Run
) -> None:
    rows = {row["key"]: row for row in dckpt("ls", converted, "--json").json["tensors"]}
    assert {key: row["shape"] for key, row in rows.items()} == {
        key: list(tensor.shape) for key, tensor in source.tensors.items()
    }
    document = dckpt("stats", converted, "--json").json
    assert document["backend"] == ["torch" if converted.suffix == ".pt" else "safetensors", 1]
    assert document["tensors"]["num_tensors"] == len(source.tensors)
    files = [converted] if converted.is_file() else list(converted.iterdir())
    assert document["files"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert document["facts"] == {}
    found = dckpt("stats", converted, "--scan", "--json")
    assert (found.code, list(found.json["not_finite"])) == (1, ["optimizer.moment"])


def test_it_shows_values_and_where_they_are(converted: Path, source: Sample, dckpt: Run) -> None:
    key = "decoder.weight"
    document = dckpt("show", converted, key, "--slice", "2:4,:3", "--json").json
    assert torch.tensor(document["values"]).equal(source.tensors[key][2:4, :3])
    location = document["chunks"][0]["location"]
    assert Path(location).is_file()
    assert Path(location).is_relative_to(converted)


def test_a_conversion_is_the_same_as_its_source(
    converted: Path, source: Sample, dckpt: Run
) -> None:
    for pair in ((source.folder, converted), (converted, source.folder)):
        finished = dckpt("diff", *pair, "--equal-nan")
        assert finished.code == 0, finished.out
        assert f"the same: {len(source.tensors)} tensors" in finished.out
        # The state holds an argparse.Namespace, which torch.load would refuse.
        assert "not compared: objects and common state" in finished.out
    document = dckpt("diff", source.folder, converted, "--equal-nan", "--json").json
    assert document["is_same"]
    assert "cannot hold" in document["not_compared"]


def test_a_changed_conversion_is_not(converted: Path, source: Sample, dckpt: Run) -> None:
    other = converted.with_name("other" + converted.suffix)
    to = "torch" if converted.suffix == ".pt" else "safetensors"
    arguments = ("--to", to, "--cast", "^decoder.weight$=float16", "--lossy", "--exclude", "uneven")
    assert dckpt("convert", source.folder, other, *arguments).code == 0
    document = dckpt("diff", source.folder, other, "--equal-nan", "--json")
    assert document.code == 1
    assert document.json["only_first"] == ["uneven"]
    assert [row["key"] for row in document.json["tensors"]] == ["decoder.weight"]


def test_objects_and_common_state_of_a_torch_file(
    samples: Samples, tmp_path: Path, dckpt: Run
) -> None:
    dckpt("convert", samples("tensorstore").folder, tmp_path / "m.pt", "--to", "torch")
    assert dckpt("show", tmp_path / "m.pt", "history", "--json").json["value"] == [0.5, 0.25]
    cells = dckpt("show", tmp_path / "m.pt", "rng", "--json").json["cells"]
    assert [cell["value"] for cell in cells] == [{"seed": [0, 5]}, {"seed": [1, 5]}]


def test_a_file_of_somebody_else(tmp_path: Path, dckpt: Run) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
    rows = dckpt("ls", tmp_path / "a.ckpt", "--json").json["tensors"]
    assert [row["key"] for row in rows] == ["model.bias", "model.weight"]
    assert dckpt("show", tmp_path / "a.ckpt", "epoch", "--json").json["value"] == 3


@pytest.mark.parametrize("command", ["ls", "stats"])
def test_files_that_are_damaged(tmp_path: Path, dckpt: Run, command: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04" + b"x" * 100)
    (tmp_path / "c.txt").write_text("x")
    for name in ("a.safetensors", "b.pt", "c.txt"):
        finished = dckpt(command, tmp_path / name)
        assert (finished.code, finished.out) == (2, "")
        assert name in finished.err
    assert dckpt(command, tmp_path).code == 2


def test_a_file_that_changes_while_it_is_looked_at(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "a.pt")
    opened = convert.open_source(tmp_path / "a.pt")
    assert opened["w"][1:3].tolist() == [1.0, 2.0]
    torch.save({"w": torch.arange(5.0)}, tmp_path / "a.pt")
    with pytest.raises(CorruptCheckpointError, match="changed"):
        _ = opened["w"][1:3]
