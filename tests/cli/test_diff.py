"""``dckpt diff`` as a user runs it: by contents, across backends and shardings."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, CorruptCheckpointError, ShardedObject, fingerprint, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.planning import CastTo, Recipe
from dist_checkpointing.tools import convert as conversions
from samples import BACKENDS as SAMPLES, Run, Sample, Samples
from states import ALONE, rows, save_on, shard, wholes


@pytest.mark.parametrize("second", [name for name in SAMPLES if name != "tensorstore"])
def test_all_backends_hold_the_same(samples: Samples, dckpt: Run, second: str) -> None:
    a, b = samples("tensorstore").folder, samples(second).folder
    finished = dckpt("diff", a, b, "--equal-nan", code=0, err="")
    assert finished.out == "the same: 9 tensors, objects and common state\n"
    document = dckpt("diff", b, a, "--equal-nan", "--json").json
    assert document["is_same"]
    assert document["num_compared"] == 9


def test_nan_is_not_nan_unless_asked(sample: Sample, dckpt: Run) -> None:
    finished = dckpt("diff", sample.folder, sample.folder, code=1)
    (row,) = [line for line in finished.out.split("\n") if line.startswith("optimizer.moment")]
    cells = ["optimizer.moment", "nan", "1", "of", "48", "nan", "nan", "[2,3]", "nan", "nan"]
    assert row.split() == cells
    assert dckpt("diff", sample.folder, sample.folder, "--equal-nan").code == 0


def test_real_releases(samples: Samples, dckpt: Run) -> None:
    old, new = samples("mc0.12.0_zarr").folder, samples("mc0.15.3_zarr").folder
    dist = samples("mc0.15.3_torch_dist").folder
    document = dckpt("diff", new, dist, "--json")
    assert document.code == 1
    assert document.json["tensors"] == []
    assert document.json["only_second"] == ["scalar", "uneven"]
    assert document.json["common"] == document.json["objects"] == []
    document = dckpt("diff", old, new, "--json").json
    assert document["common"] == [{"name": "content_metadata.fixture_format", "texts": [None, "1"]}]


def written(folder: Path, backend: Any = "tensorstore", **changed: Any) -> Path:
    tensors = {
        "same": torch.arange(6.0),
        "value": torch.arange(12.0).reshape(3, 4),
        "shape": torch.zeros(4),
        "dtype": torch.ones(5),
    }
    tensors |= {key: one for key, one in changed.items() if isinstance(one, torch.Tensor)}
    state: dict[str, Any] = {key: shard(key, tensor) for key, tensor in tensors.items()}
    state["cell"] = ShardedObject("cell", {"seed": changed.get("seed", 1)}, (1,), (0,))
    state["step"] = changed.get("step", 3)
    save(state, folder, backend, trusted=True)
    return folder


def test_every_kind_of_difference(tmp_path: Path, dckpt: Run) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    value[1, 2] += 0.5
    value[2, 0] = 0
    a = written(tmp_path / "a", only_a=torch.zeros(2))
    b = written(
        tmp_path / "b",
        ("zarr", 2),
        value=value,
        shape=torch.zeros(2, 2),
        dtype=torch.ones(5).bfloat16(),
        only_b=torch.zeros(3, dtype=torch.int8),
        seed=2,
        step=4,
    )
    finished = dckpt("diff", a, b, code=1)
    out = " ".join(finished.out.split())
    for words in (
        f"only in {a} - only_a 2 float32",
        f"only in {b} + only_b 3 int8",
        "shape 4 float32 2x2 float32",
        "dtype 5 float32 5 bfloat16",
        "value 35.6% 2 of 12 8 inf [1,2] 6 6.5",
        "- cell[0].seed = 1 + cell[0].seed = 2",
        "- step = 3 + step = 4",
        "differences: 3 of 4 tensors differing, 1 only in the first, 1 only in the second",
    ):
        assert words in out, words
    assert "same" not in out.replace("the same", "")
    document = dckpt("diff", a, b, "--json").json
    rows = {row["key"]: row for row in document["tensors"]}
    assert set(rows) == {"shape", "dtype", "value"}
    assert rows["shape"]["values"] is None
    assert rows["dtype"]["values"]["num_differing"] == 0
    assert rows["value"]["values"] == {
        "num_differing": 2,
        "num_compared": 12,
        "max_abs": 8.0,
        "max_rel": "Infinity",
        "first_index": [1, 2],
        "first_values": [6.0, 6.5],
        "norm_before": pytest.approx(torch.arange(12.0).norm().item()),
        "norm_of_change": pytest.approx(64.25**0.5),
    }
    assert document["objects"] == [{"name": "cell[0].seed", "texts": ["1", "2"]}]


def test_what_changed_most_comes_first(tmp_path: Path, dckpt: Run) -> None:
    before = {
        "far": torch.ones(40, 3),
        "near": torch.full((64,), 10.0).bfloat16(),
        "new": torch.zeros(4),
        "odd": torch.tensor([1.0, math.nan, math.inf, 3.0]),
        "lost": torch.ones(3),
        "optimizer.step": torch.tensor(10.0),
    }
    after = {key: tensor.clone() for key, tensor in before.items()}
    after["far"][:10] = 3
    after["near"][0] = 10.5
    after["new"][1] = 0.25
    after["odd"][0] = 1.5
    after["lost"][0] = math.nan
    after["optimizer.step"] += 90
    save(wholes(before), tmp_path / "1")
    save(wholes(after), tmp_path / "2", ("zarr", 2))
    pair = tmp_path / "1", tmp_path / "2"
    out = dckpt("diff", *pair, "--equal-nan").out
    rows = [line.split() for line in out.partition("\n\n")[0].splitlines()[2:]]
    assert [row[0] for row in rows] == ["lost", "new", "far", "odd", "near"]
    moved = dict(zip(("lost", "new", "far", "odd", "near"), rows, strict=True))
    assert moved["new"][1:3] == ["from", "0"]
    assert moved["far"][1] == "100%"
    assert moved["odd"][1] == "15.8%"  # of the norm of 1 and 3
    assert "not listed: 1 optimizer counter" in out
    document = dckpt("diff", *pair, "--equal-nan", "--json").json
    assert [row["key"] for row in document["tensors"]][:3] == ["lost", "new", "optimizer.step"]
    assert " 900% " in dckpt("diff", *pair, "optimizer.{x*}").out


def test_tolerances_and_options(tmp_path: Path, dckpt: Run) -> None:
    a = written(tmp_path / "a", value=torch.tensor([1.0, 100.0]), dtype=torch.ones(3))
    b = written(tmp_path / "b", value=torch.tensor([1.001, 100.1]), dtype=torch.ones(3).half())
    assert dckpt("diff", a, b).code == 1
    assert dckpt("diff", a, b, "--rtol", "1e-2").code == 1
    assert dckpt("diff", a, b, "--rtol", "1e-2", "--ignore-dtype").code == 0
    assert dckpt("diff", a, b, "--atol", "0.01", "--ignore-dtype").code == 1
    assert dckpt("diff", a, b, "--atol", "0.11", "--ignore-dtype").code == 0
    assert dckpt("diff", a, b, "same").code == 0
    assert dckpt("diff", a, b, "^(same|shape)$").code == 0
    quiet = dckpt("diff", a, b, "--quiet")
    assert (quiet.code, quiet.out) == (1, "")


def test_strange_common_state_needs_trust(tmp_path: Path, dckpt: Run) -> None:
    a = written(tmp_path / "a")
    b = written(tmp_path / "b", step=re.compile("x"))
    finished = dckpt("diff", a, b, code=2, out="")
    assert "allow-list" in finished.err
    trusting = dckpt("diff", a, b, "--trusted")
    assert trusting.code == 1
    assert "+ step = re.compile('x')" in trusting.out


# Fingerprints in ``dckpt ls``, ``diff``, ``verify --against`` and ``convert``.


convert = conversions.convert
UNVERIFIED = conversions.ConvertOptions(verify=False)
FULL = torch.randn(32, 12, generator=torch.Generator().manual_seed(2))
NAN = torch.tensor([1.0, float("nan"), 2.0, 3.0])


def saved(folder: Path, *, ranks: int = 1, keeps: bool = True, **changes: torch.Tensor) -> Path:
    values = {"nan": NAN, "w": FULL, **changes}

    def state(comm: Comm) -> dict[str, Any]:
        return {key: rows(key, value, comm) for key, value in values.items()}

    save_on(ranks, state, folder, fingerprints=keeps)
    return folder


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a value is read")

    monkeypatch.setattr(Checkpoint, "read", refuse)


@pytest.mark.usefixtures("no_reads")
def test_equal_checkpoints_are_not_read(tmp_path: Path, dckpt: Run) -> None:
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", ranks=2)
    finished = dckpt("diff", a, b, code=0, err="")
    assert finished.out == "the same: 2 tensors (2 by fingerprint), objects and common state\n"
    assert dckpt("diff", a, b, "--json").json["num_by_fingerprint"] == 2
    own = fingerprint({"w": shard("w", FULL)}, comm=ALONE)["w"]
    (row,) = [line for line in dckpt("ls", a, "-f").out.split("\n") if line.startswith("w ")]
    assert row.split()[-1] == own


def test_only_what_differs_is_read(tmp_path: Path, dckpt: Run) -> None:
    other = FULL.clone()
    other[3, 5] = -other[3, 5]
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b", w=other)
    finished = dckpt("diff", a, b, code=1)
    (row,) = [line for line in finished.out.split("\n") if line.startswith("w ")]
    assert row.split()[2:5] == ["1", "of", "384"]
    assert "[3,5]" in row
    assert "nan" not in [line.split(" ")[0] for line in finished.out.split("\n")]
    # Where one has none, and where asked for, NaN is not NaN.
    assert "nan  " in dckpt("diff", a, b, "--read-all").out
    assert "nan  " in dckpt("diff", a, saved(tmp_path / "c", keeps=False)).out


def test_verify_against_a_list(tmp_path: Path, dckpt: Run) -> None:
    a, same = saved(tmp_path / "a"), saved(tmp_path / "same", ranks=2, keeps=False)
    other = saved(tmp_path / "other", w=FULL + 1, v=NAN)
    listed = tmp_path / "listed.json"
    listed.write_text(dckpt("ls", a, "--fingerprint", "--json").out)
    finished = dckpt("verify", same, "--against", listed, code=0, err="")
    assert "all fingerprints are those of the file: 2 tensors" in finished.out
    finished = dckpt("verify", other, "--against", listed, "--json", code=1)
    found = {row["key"]: row["problem"] for row in finished.json["findings"]}
    assert found == {
        "v": "the file does not name this tensor",
        "w": "the values, the dtype or the shape are others than the file says",
    }
    # The values count, and not what the index says of them.
    listed.write_text(json.dumps({**Checkpoint.open(a).fingerprints(), "w": "0" * 32}))
    assert dckpt("verify", a, "--against", listed).code == 1
    listed.write_text(json.dumps(fingerprint({"x": shard("x", FULL)}, comm=ALONE)))
    finished = dckpt("verify", same, "--against", listed)
    assert "'x': the file names this tensor, the checkpoint does not hold it" in finished.out
    assert finished.out.endswith("\nnot what the file says\n")
    for text in ("{}", "[]", '{"w": 3}', "{"):
        listed.write_text(text)
        finished = dckpt("verify", same, "--against", listed, code=2)
        assert "the file of fingerprints cannot be read" in finished.err


@pytest.mark.parametrize("to", ["zarr", "tensorstore"])
def test_a_conversion_is_proven(tmp_path: Path, dckpt: Run, to: str) -> None:
    a = saved(tmp_path / "a", ranks=4)
    finished = dckpt("convert", a, tmp_path / "b", "--to", to, "--rename", "w=weight", code=0)
    assert "  proven: 2 tensors have the fingerprint of the source\n" in finished.out
    kept = Checkpoint.open(tmp_path / "b").index.fingerprints
    assert kept["weight"] == Checkpoint.open(a).fingerprint("w")
    assert Checkpoint.open(tmp_path / "b").fingerprints(stored=False) == kept
    cast = dckpt("convert", a, tmp_path / "d", "--to", to, "--cast", "float64", "--json").json
    assert cast["num_proven"] == 0
    assert Checkpoint.open(tmp_path / "d").fingerprints() == Checkpoint.open(
        tmp_path / "d"
    ).fingerprints(stored=False)


@pytest.mark.parametrize("to", ["zarr:1", "torch_dist", "safetensors", "torch_file"])
def test_what_keeps_no_fingerprints_is_read_to_be_proven(tmp_path: Path, to: str) -> None:
    a = saved(tmp_path / "a", ranks=4)
    assert convert(a, tmp_path / "b", to).num_proven == 2
    cast = Recipe(CastTo("w", "float64"))
    assert convert(a, tmp_path / "c", to, recipe=cast).num_proven == 1


@pytest.mark.parametrize("to", ["zarr", "zarr:1", "torch_dist", "safetensors", "torch_file"])
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
