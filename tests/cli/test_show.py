"""``dckpt show`` as a user runs it."""

import argparse
import enum
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import ShardedObject, UnsupportedFormatError, load, save
from dist_checkpointing.tools.values import statistics_of
from samples import Run, Sample, Samples
from states import shard


def numbers(values: Any) -> Any:
    """What JSON could not say, as numbers again."""
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return words.get(values, values) if isinstance(values, str) else values


def same(found: Any, tensor: torch.Tensor) -> bool:
    wanted = np.array(tensor.tolist())
    have = np.array(numbers(found)).reshape(wanted.shape)
    return np.array_equal(have, wanted, equal_nan=wanted.dtype.kind == "f")


PARTS: dict[str, Any] = {
    "0": 0,
    "1:3": slice(1, 3),
    "...,0": (..., 0),
    "::2,...": (slice(None, None, 2), ...),
    "-1": -1,
}


def test_json_holds_the_values_and_their_statistics(any_sample: Sample, dckpt: Run) -> None:
    for key, full in any_sample.tensors.items():
        parts = list(PARTS) if any_sample.name == "tensorstore" else ["1:3", "::2,..."]
        for part in [None, *(parts if full.ndim and full.numel() else [])]:
            wanted = full if part is None else full[PARTS[part]]
            extra = [] if part is None else [f"--slice={part}"]
            document = dckpt("show", any_sample.folder, key, *extra, "--json").json
            assert document["key"] == key
            assert document["shape"] == list(full.shape)
            assert document["dtype"] == str(full.dtype).removeprefix("torch.")
            assert document["slice_shape"] == list(wanted.shape)
            assert same(document["values"], wanted)
            found = {name: numbers(value) for name, value in document["statistics"].items()}
            assert found == asdict(statistics_of(wanted))
            assert sum(chunk["num_bytes"] for chunk in document["chunks"]) == full.nbytes
            assert document["num_chunks"] == len(document["chunks"])


def test_what_a_person_sees(samples: Samples, dckpt: Run) -> None:
    sample = samples("zarr-2")
    finished = dckpt("show", sample.folder, "decoder.weight", "--slice", "0:2,:3", code=0, err="")
    out = finished.out
    assert out.startswith("decoder.weight\n16x12  float32  768 B  2x1 chunks of 8x12\n")
    values = out.partition("Values of [0:2,:3], 2x3\n")[2].partition("\n\n")[0]
    found = [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", values)]
    wanted = sample.tensors["decoder.weight"][0:2, :3].reshape(-1)
    assert found == pytest.approx(wanted.tolist(), abs=1e-4)
    assert "NaN 0  Inf 0  zero 0  of 6 elements" in out
    assert "Chunks that hold a part of the slice\n0  0:8,0:12  384 B" in out
    assert "decoder.weight/c.0.0" in out
    assert "decoder.weight/c.1.0" not in out  # which has no part of it


def test_nan_and_infinity(sample: Sample, dckpt: Run) -> None:
    out = dckpt("show", sample.folder, "optimizer.moment").out
    assert "NaN 1  Inf 2  zero 0  of 48 elements" in out
    assert "of the finite values" in out
    assert dckpt("show", sample.folder, "optimizer.moment", "--no-statistics").out.find("NaN 1") < 0


def test_a_large_tensor_shows_its_corners(tmp_path: Path, dckpt: Run) -> None:
    full = torch.arange(3000 * 50).reshape(3000, 50)
    save({"w": shard("w", full)}, tmp_path / "c")
    out = dckpt("show", tmp_path / "c", "w").out
    values = out.partition("Values\n")[2].partition("\n\n")[0]
    found = {int(word) for word in re.findall(r"\d+", values)}
    rows, columns = [0, 1, 2, 2997, 2998, 2999], [0, 1, 2, 47, 48, 49]
    assert found == set(full[rows][:, columns].reshape(-1).tolist())
    assert "..." in values
    assert "min 0  max 149999  mean 74999.5" in out
    out = dckpt("show", tmp_path / "c", "w", "--slice", "5:,::7", "--no-statistics").out
    found = {
        int(word) for word in re.findall(r"\d+", out.partition("2995x8\n")[2].partition("\n\n")[0])
    }
    columns = [0, 7, 14, 35, 42, 49]
    assert found == set(full[[5, 6, 7, 2997, 2998, 2999]][:, columns].reshape(-1).tolist())


KINDS = {
    "optimizer.step": ["scalar  int64", "Values\n7\n"],
    "empty": ["0x5  float32", "no elements"],
    "flat": ["2 pieces", "0:6,0:10 flat 0:25"],
    "uneven": ["2 pieces", "0:2,0:5"],
    "decoder.mask": ["bool", "zero 1"],
    "decoder.half": ["8x4x3  bfloat16", "chunks of"],
    "rng": ["2 cells", "Cell 0", "{'seed': [0, 5]}", "{'seed': [1, 5]}"],
    "args": ["Namespace", "lr=0.0001"],
    "args.betas.1": ["float", "0.95"],
    "history": ["list", "[0.5, 0.25]"],
    "iteration": ["int", "1000"],
    "content_metadata": ["{'made_by': 'a test'}"],
}


def test_every_kind(sample: Sample, dckpt: Run) -> None:
    for key, kind in KINDS.items():
        # The oldest format has no pieces.
        words = ["Chunks"] if sample.name == "zarr-1" and key in ("flat", "uneven") else kind
        out = dckpt("show", sample.folder, key, code=0).out
        assert all(word in out for word in words), key


@pytest.mark.parametrize("name", ["mc0.12.0_zarr", "mc0.15.3_zarr", "mc0.15.3_torch_dist"])
def test_objects_of_real_releases(samples: Samples, dckpt: Run, name: str) -> None:
    finished = dckpt("show", samples(name).folder, "rng_state", code=0)
    assert "Cell 0x1" in finished.out


def test_strange_objects_need_trust(tmp_path: Path, dckpt: Run) -> None:
    save({"o": ShardedObject("o", re.compile("x"), (1,), (0,))}, tmp_path / "c", trusted=True)
    refused = dckpt("show", tmp_path / "c", "o")
    assert refused.code == 2
    assert "allow-list" in refused.err
    assert "re.compile('x')" in dckpt("show", tmp_path / "c", "o", "--trusted").out


def test_a_value_of_a_class_that_is_not_imported_is_named(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of Megatron's training hold its enums."""
    module: Any = ModuleType("megatron_enums")
    vars(module)["Backend"] = enum.Enum("Backend", {"auto": 5}, module=module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    args = argparse.Namespace(backend=module.Backend.auto, lr=0.1)
    save({"args": args}, tmp_path / "c", trusted=True)
    monkeypatch.undo()
    shown = dckpt("show", tmp_path / "c", "args.backend").out
    assert "megatron_enums.Backend(5)" in shown
    listed = dckpt("ls", tmp_path / "c", "--all", "--json").json
    assert {"key": "args.backend", "type": "Backend"} in listed["common"]
    with pytest.raises(UnsupportedFormatError, match=r"megatron_enums\.Backend"):
        load({}, tmp_path / "c")
