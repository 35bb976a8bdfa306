"""A conversion gives no new checksums to what is damaged."""

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dist_checkpointing as dc
import samples
from damage import flip, place_of
from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.format import CHECKSUMS_NAME
from dist_checkpointing.planning import Drop, Recipe
from dist_checkpointing.tools.convert import ConvertOptions, convert
from dist_checkpointing.tools.values import Budget
from samples import Run, Sample, Samples

BACKENDS = [name for name in samples.BACKENDS if name != "zarr-2-zstd"]
TARGETS = ["tensorstore", "zarr:1", "torch_dist", "safetensors", "torch_file"]
ROOMY = ConvertOptions(memory_bytes=8 * 2**30, threads=2)
FULL = samples.full_tensors()
NUM_BYTES = sum(tensor.nbytes for tensor in FULL.values())
SOME_OF = {
    "decoder.weight": FULL["decoder.weight"][9, 3:9],
    "decoder.half": FULL["decoder.half"][5, 1:],
    "uneven": FULL["uneven"][4, 1:4],
    "flat": FULL["flat"][4, 1:],
}


def damaged_copy(sample: Sample, folder: Path, values: torch.Tensor) -> Path:
    """A copy in which one bit of these values, which lie in a row, is another one."""
    path, start = place_of(sample.copied(folder).folder, values)
    flip(path, start + values.nbytes // 2, 4)
    return folder


@pytest.mark.parametrize(
    ("source", "to"),
    [
        *zip(BACKENDS, TARGETS, strict=False),
        ("tensorstore", "torch_file"),
        ("zarr-2", "torch_dist"),
    ],
)
def test_a_flipped_bit_is_found_wherever_it_is(
    samples: Samples, source: str, to: str, tmp_path: Path
) -> None:
    for key, values in SOME_OF.items():
        damaged = damaged_copy(samples(source), tmp_path / "source", values)
        with pytest.raises(dc.CorruptCheckpointError, match="bits were flipped") as raised:
            convert(damaged, tmp_path / "out", to, options=ROOMY)
        (finding,) = raised.value.findings
        assert finding.key == key
        assert str(damaged) in str(finding.path)
        assert "--no-verify" in str(finding)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
        # Where the damaged tensor is not read, nobody minds.
        done = convert(damaged, tmp_path / "out", to, recipe=Recipe(Drop(key)), options=ROOMY)
        assert done.verified_bytes == NUM_BYTES - FULL[key].nbytes
        shutil.rmtree(damaged)
        out = tmp_path / "out"
        shutil.rmtree(out) if out.is_dir() else out.unlink()


@pytest.mark.parametrize(
    ("source", "reshard"),
    [
        *((source, []) for source in BACKENDS),
        ("zarr-1", ["axis=0,parts=3"]),
        ("tensorstore", ["axis=1,parts=5"]),
        ("torch_dist", ["axis=1,parts=5"]),
    ],
)
def test_parts_that_are_larger_than_what_is_read_at_a_time(
    samples: Samples,
    source: str,
    reshard: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def little(*_: object) -> Budget:
        return Budget(threads=3, box_bytes=100, buffer_bytes=200)

    # By its name in the package it is the function.
    monkeypatch.setattr(
        import_module("dist_checkpointing.tools.convert.conversion"), "budget_of", little
    )
    options = replace(ROOMY, reshard=reshard)
    for to in ("zarr",) if reshard else ("zarr", "safetensors"):
        done = convert(samples(source).folder, tmp_path / to, to, options=options)
        assert done.verified_bytes == NUM_BYTES
        found = dc.load_plain_tensors(tmp_path / to)
        assert all(torch.equal(found[key], full) for key, full in FULL.items() if "mom" not in key)
        damaged = damaged_copy(samples(source), tmp_path / f"damaged-{to}", SOME_OF["uneven"])
        with pytest.raises(dc.CorruptCheckpointError, match="'uneven'"):
            convert(damaged, tmp_path / "out", to, options=options)
        assert not (tmp_path / "out").exists()


def test_checksums_that_are_lost_let_nothing_pass(samples: Samples, tmp_path: Path) -> None:
    source = samples("zarr-2").copied(tmp_path / "source").folder
    min((source / CHECKSUMS_NAME).glob("*.bin")).unlink()
    with pytest.raises(dc.CorruptCheckpointError, match="file is missing"):
        convert(source, tmp_path / "out", options=ROOMY)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["zarr-2", "torch_dist"])
def test_damaged_common_state_does_not_travel_along(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    source = samples(name).copied(tmp_path / "source").folder
    path = source / "common.pt"
    # The iteration becomes another one.
    flip(path, path.read_bytes().index(b"M\xe8\x03") + 1)
    with pytest.raises(dc.CorruptCheckpointError, match=r"common\.pt"):
        convert(source, tmp_path / "out", options=ROOMY)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_was_verified(samples: Samples, tmp_path: Path, dckpt: Run) -> None:
    source = samples("tensorstore").folder
    plain = dckpt("convert", source, tmp_path / "a", "--to", "torch_file", code=0).out
    assert f"  verified: {bytes_text(NUM_BYTES)} of tensors by the checksums" in plain
    assert "not verified" not in plain
    off = dckpt("convert", source, tmp_path / "b", "--to", "torch_file", "--no-verify", code=0).out
    assert "  not verified: verification was turned off\n" in off
    none = dckpt("convert", tmp_path / "a", tmp_path / "c", "--to", "zarr", code=0).out
    assert "  not verified: the source keeps no checksums\n" in none
    damaged = damaged_copy(samples("tensorstore"), tmp_path / "source", SOME_OF["uneven"])
    error = dckpt("convert", damaged, tmp_path / "out", "--to", "zarr", code=2).err
    assert error.startswith("error: the source is not what was saved: 'uneven': checksum differs")
    assert "--no-verify" in error
