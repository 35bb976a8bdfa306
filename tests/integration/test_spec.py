"""``spec_reader.py``, which knows ``docs/spec.md`` alone, reads what was saved and finds damage."""

import json
from pathlib import Path

import pytest
import torch

from damage import flip, place_of
from dist_checkpointing.mapping import as_numpy
from samples import (
    BACKENDS,
    GOLDEN,
    GOLDEN_NAMES,
    Samples,
    full_tensors,
    golden_sample,
    save_sample,
)
from spec_reader import DamagedError, read_checkpoint

BACKEND = pytest.mark.parametrize("name", BACKENDS)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {key: (tuple(t.shape), as_numpy(t).tobytes()) for key, t in tensors.items()}


def read(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {key: (array.shape, array.tobytes()) for key, array in read_checkpoint(folder).items()}


@pytest.mark.parametrize("name", ["dc0_tensorstore", *GOLDEN_NAMES])
def test_golden_checkpoints_hold_what_was_saved(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.expected.json").read_text())["tensors"]
    if all("hex" in told for told in expected.values()):
        wanted = {k: (tuple(t["shape"]), bytes.fromhex(t["hex"])) for k, t in expected.items()}
    else:
        wanted = bits(golden_sample(name).tensors)
    assert read(GOLDEN / name) == wanted


@BACKEND
def test_what_is_saved_today_follows_the_specification(tmp_path: Path, name: str) -> None:
    odd = {key: torch.arange(8.0) for key in (".hidden/\N{GREEK SMALL LETTER ALPHA}~", 230 * "x")}
    tensors = {**full_tensors(), **odd}
    save_sample(tmp_path / "c", BACKENDS[name](), tensors)
    assert read(tmp_path / "c") == bits(tensors)


@BACKEND
def test_a_flipped_bit_is_damage(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    seal = json.loads((sample.folder / ".dckpt/seal.json").read_text())
    data = {n for n, digest in zip(seal["files"], seal["digests"], strict=True) if digest is None}
    places = [(sample.folder / n, 0) for n in data]
    sealed = {*seal["files"], "metadata.json", ".dckpt/seal.json"} - data
    places += [(sample.folder / n, at) for n in sealed for at in (0, 21, -1)]
    if "zstd" not in name:
        places.append(place_of(sample.folder, sample.tensors["decoder.half"][4:]))
    for path, position in places:
        whole = path.read_bytes()
        flip(path, position)
        with pytest.raises(DamagedError, match="damaged"):
            read_checkpoint(sample.folder)
        path.write_bytes(whole)
    assert read(sample.folder) == bits(sample.tensors)
