"""``spec_reader.py``, which knows ``docs/spec.md`` alone, reads what was saved and finds damage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from damage import flip
from dist_checkpointing import remove_sharded_tensors
from dist_checkpointing.mapping import as_numpy
from samples import BACKENDS, GOLDEN, Samples, full_tensors, golden_sample, save_sample
from spec_reader import DamagedError, read_checkpoint

BACKEND = pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch_dist"])
DATABASES = ("dc0_tensorstore", "format1.0_tensorstore", "format1.0_zarr1", "format1.0_zarr2")


def assert_holds(folder: Path, tensors: dict[str, Any]) -> None:
    found = read_checkpoint(folder)
    assert {key: (array.shape, array.tobytes()) for key, array in found.items()} == {
        key: (tuple(tensor.shape), as_numpy(tensor).tobytes()) for key, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["mc0.12.0_zarr", "mc0.15.3_zarr"])
def test_golden_checkpoints_of_megatron_hold_what_was_saved(name: str) -> None:
    assert_holds(GOLDEN / name, golden_sample(name).tensors)


@pytest.mark.parametrize("name", DATABASES)
def test_golden_checkpoints_hold_what_was_saved(name: str) -> None:
    expected = json.loads((GOLDEN / "dc0_tensorstore.expected.json").read_text())["tensors"]
    found = read_checkpoint(GOLDEN / name)
    told = {key: {"shape": [*a.shape], "hex": a.tobytes().hex()} for key, a in found.items()}
    assert {key: {**expected[key], **own} for key, own in told.items()} == expected


@BACKEND
def test_what_is_saved_today_follows_the_specification(tmp_path: Path, backend: str) -> None:
    odd = {key: torch.arange(8.0) for key in (".hidden/\N{GREEK SMALL LETTER ALPHA}~", 230 * "x")}
    tensors = {**full_tensors(), **odd}
    save_sample(tmp_path / "c", BACKENDS[backend](), tensors)
    assert_holds(tmp_path / "c", tensors)
    remove_sharded_tensors(tmp_path / "c", "optimizer")
    assert_holds(tmp_path / "c", {k: t for k, t in tensors.items() if k[:9] != "optimizer"})


@BACKEND
def test_a_flipped_bit_is_damage(samples: Samples, tmp_path: Path, backend: str) -> None:
    sample = samples(backend).copied(tmp_path / "c")
    seal = json.loads((sample.folder / ".dckpt/seal.json").read_text())
    digests = dict(zip(seal["files"], seal["digests"], strict=True))
    for name in (*digests, "metadata.json", ".dckpt/seal.json"):
        for position in (0,) if digests.get(name, "") is None else (0, 21, -1):
            flip(sample.folder / name, position)
            with pytest.raises(DamagedError, match="damaged"):
                read_checkpoint(sample.folder)
            flip(sample.folder / name, position)
    assert_holds(sample.folder, sample.tensors)
