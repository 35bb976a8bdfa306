"""Fingerprints in ``dckpt ls``, ``diff``, ``verify --against`` and ``convert``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, CorruptCheckpointError, fingerprint, save
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools import convert as conversions
from samples import Run
from states import ALONE, rows, shard

convert, Rules = conversions.convert, conversions.Rules
UNVERIFIED = conversions.ConvertOptions(verify=False)
FULL = torch.randn(32, 12, generator=torch.Generator().manual_seed(2))
NAN = torch.tensor([1.0, float("nan"), 2.0, 3.0])


def saved(folder: Path, *, ranks: int = 1, keeps: bool = True, **changes: torch.Tensor) -> Path:
    values = {"nan": NAN, "w": FULL, **changes}
    run_ranks(
        ranks,
        lambda comm: save(
            {key: rows(key, value, comm) for key, value in values.items()},
            folder,
            comm=comm,
            fingerprints=keeps,
        ),
    )
    return folder


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a value is read")

    monkeypatch.setattr(Checkpoint, "read", refuse)


@pytest.mark.usefixtures("no_reads")
def test_equal_checkpoints_are_not_read(tmp_path: Path, dckpt: Run) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", ranks=2)
    finished = dckpt("diff", a, b)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out == "the same: 2 tensors (2 by fingerprint), objects and common state\n"
    assert dckpt("diff", a, b, "--json").json["num_by_fingerprint"] == 2
    own = fingerprint({"w": shard("w", FULL)}, comm=ALONE)["w"]
    (row,) = [line for line in dckpt("ls", a, "-f").out.split("\n") if line.startswith("w ")]
    assert row.split()[-1] == own


def test_only_what_differs_is_read(tmp_path: Path, dckpt: Run) -> None:
    other = FULL.clone()
    other[3, 5] = -other[3, 5]
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", w=other)
    finished = dckpt("diff", a, b)
    assert finished.code == 1
    (row,) = [line for line in finished.out.split("\n") if line.startswith("w ")]
    assert row.split()[2:5] == ["1", "of", "384"]
    assert "[3,5]" in row
    assert "nan" not in [line.split(" ")[0] for line in finished.out.split("\n")]
    # Where one has none, and where asked for, NaN is not NaN.
    assert "nan  " in dckpt("diff", a, b, "--read-all").out
    assert "nan  " in dckpt("diff", a, saved(tmp_path / "c", keeps=False)).out


def test_other_shapes_and_dtypes_are_no_surprise(tmp_path: Path, dckpt: Run) -> None:
    a = saved(tmp_path / "a")
    for name, value in (("d", FULL.double()), ("s", FULL.reshape(16, 24))):
        document = dckpt("diff", a, saved(tmp_path / name, w=value), "--json")
        assert document.code == 1
        assert [row["key"] for row in document.json["tensors"]] == ["w"]
    assert dckpt("diff", a, tmp_path / "d", "--ignore-dtype").code == 0


def test_verify_against_a_list(tmp_path: Path, dckpt: Run) -> None:
    a, same = saved(tmp_path / "a"), saved(tmp_path / "same", ranks=2, keeps=False)
    other = saved(tmp_path / "other", w=FULL + 1, v=NAN)
    listed = tmp_path / "listed.json"
    listed.write_text(dckpt("ls", a, "--fingerprint", "--json").out)
    finished = dckpt("verify", same, "--against", listed)
    assert (finished.code, finished.err) == (0, "")
    assert "all fingerprints are those of the file: 2 tensors" in finished.out
    finished = dckpt("verify", other, "--against", listed, "--json")
    assert finished.code == 1
    found = {row["key"]: row["problem"] for row in finished.json["findings"]}
    assert found == {
        "v": "the file does not name this tensor",
        "w": "the values, the dtype or the shape are others than the file says",
    }
    listed.write_text(json.dumps(fingerprint({"x": shard("x", FULL)}, comm=ALONE)))
    finished = dckpt("verify", same, "--against", listed)
    assert "'x': the file names this tensor, the checkpoint does not hold it" in finished.out
    assert finished.out.endswith("\nnot what the file says\n")
    for text in ("{}", "[]", '{"w": 3}', "{"):
        listed.write_text(text)
        finished = dckpt("verify", same, "--against", listed)
        assert finished.code == 2
        assert "the file of fingerprints cannot be read" in finished.err


def test_verify_against_does_not_trust_what_was_kept(tmp_path: Path, dckpt: Run) -> None:
    """The values count, and not what the index says of them."""
    a = saved(tmp_path / "a")
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps({**Checkpoint.open(a).fingerprints(), "w": "0" * 32}))
    assert dckpt("verify", a, "--against", listed).code == 1


@pytest.mark.parametrize("to", ["zarr", "tensorstore"])
def test_a_conversion_is_proven(tmp_path: Path, dckpt: Run, to: str) -> None:
    a = saved(tmp_path / "a", ranks=4)
    finished = dckpt("convert", a, tmp_path / "b", "--to", to, "--rename", "^w$=weight")
    assert finished.code == 0
    assert "  proven: 2 tensors have the fingerprint of the source\n" in finished.out
    kept = Checkpoint.open(tmp_path / "b").index.fingerprints
    assert kept["weight"] == Checkpoint.open(a).fingerprint("w")
    assert Checkpoint.open(tmp_path / "b").fingerprints(stored=False) == kept
    cast = dckpt("convert", a, tmp_path / "d", "--to", to, "--cast", "float64", "--json").json
    assert cast["num_proven"] == 0
    assert Checkpoint.open(tmp_path / "d").fingerprints() == Checkpoint.open(
        tmp_path / "d"
    ).fingerprints(stored=False)


OTHERS = pytest.mark.parametrize("to", ["zarr:1", "torch_dist", "safetensors", "torch"])


@OTHERS
def test_what_keeps_no_fingerprints_is_read_to_be_proven(tmp_path: Path, to: str) -> None:
    a = saved(tmp_path / "a", ranks=4)
    assert convert(a, tmp_path / "b", to).num_proven == 2
    cast = Rules.parse(cast=["^w$=float64"])
    assert convert(a, tmp_path / "c", to, rules=cast).num_proven == 1


@pytest.mark.parametrize("to", ["zarr", "zarr:1", "torch_dist", "safetensors", "torch"])
def test_a_wrong_write_leaves_nothing(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk counts, and not what was meant to be there."""
    a = saved(tmp_path / "a")
    read = Checkpoint.read

    def swapped(self: Any, wanted: Any) -> list[torch.Tensor]:
        values = read(self, wanted)
        return [own.flip(0) for own in values] if self.path == a else values

    monkeypatch.setattr(Checkpoint, "read", swapped)
    with pytest.raises(CorruptCheckpointError, match="other fingerprints than the source"):
        convert(a, tmp_path / "b", to, options=UNVERIFIED)
    left = tmp_path / "b"
    assert not left.exists() or not (left / "metadata.json").exists()
