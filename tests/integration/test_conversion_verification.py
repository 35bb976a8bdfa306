"""A conversion gives no new checksums to what is damaged."""

import itertools
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import dist_checkpointing as dc
import samples
from damage import flip, place_of
from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import (
    CHECKSUMS_NAME,
    Box,
    StoredPart,
    StoredTensor,
    checksum,
    dtypes,
)
from dist_checkpointing.planning import Drop, Recipe
from dist_checkpointing.storage import Checksum, StorageOptions
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.tools.convert import ConvertOptions, convert
from dist_checkpointing.tools.convert.source import PartChecks
from dist_checkpointing.tools.values import Budget
from samples import Run
from states import between, flat as flat_part, rows, save_on
from tilings import tilings

BACKENDS = {name: make for name, make in samples.BACKENDS.items() if name != "zarr-2-zstd"}
TARGETS = ["tensorstore", "zarr:1", "torch_dist", "safetensors", "torch_file"]
ROOMY = ConvertOptions(memory_bytes=8 * 2**30, threads=2)
GENERATOR = torch.Generator().manual_seed(3)
FULL = {
    "even": torch.randn(40, 64, generator=GENERATOR),
    "uneven": torch.randn(30, 50, generator=GENERATOR).bfloat16(),
    "flat": torch.randn(60, 20, generator=GENERATOR),
    "across": torch.randn(24, 48, generator=GENERATOR, dtype=torch.float64),
}
NUM_BYTES = sum(tensor.nbytes for tensor in FULL.values())


def state(comm: Comm) -> dict[str, Any]:
    return {
        "even": rows("even", FULL["even"], comm),
        "uneven": between("uneven", FULL["uneven"], *((0, 11), (11, 30))[comm.rank]),
        "flat": flat_part("flat", FULL["flat"], *((0, 533), (533, 1200))[comm.rank]),
        "across": rows("across", FULL["across"], comm, axis=1),
        "step": 4,
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, backend in BACKENDS.items():
        save_on(2, state, folder / name, backend())
    return {name: folder / name for name in BACKENDS}


def flip_a_bit_of(folder: Path, values: torch.Tensor) -> None:
    path, start = place_of(folder, values)
    flip(path, start + values.nbytes // 2, 4)


SOME_OF = {
    "even": FULL["even"][33, 20:40],
    "uneven": FULL["uneven"][12, 5:25],
    "flat": FULL["flat"][40, :10],
    "across": FULL["across"][20, 30:40],
}


@pytest.mark.parametrize(
    ("source", "to"),
    [
        *zip(BACKENDS, TARGETS, strict=False),
        ("tensorstore", "torch_file"),
        ("zarr-2", "torch_dist"),
    ],
)
def test_a_flipped_bit_is_found_wherever_it_is(
    sources: dict[str, Path], source: str, to: str, tmp_path: Path
) -> None:
    for key, values in SOME_OF.items():
        damaged = tmp_path / "source"
        shutil.copytree(sources[source], damaged)
        flip_a_bit_of(damaged, values)
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


@pytest.mark.parametrize("source", BACKENDS)
def test_without_verification_it_is_converted_as_it_is(
    sources: dict[str, Path], source: str, tmp_path: Path
) -> None:
    damaged = tmp_path / "source"
    shutil.copytree(sources[source], damaged)
    flip_a_bit_of(damaged, SOME_OF["even"])
    options = ConvertOptions(memory_bytes=8 * 2**30, verify=False)
    done = convert(damaged, tmp_path / "out", options=options)
    assert (done.verified_bytes, done.not_verified) == (0, "verification was turned off")
    dc.verify_checkpoint(tmp_path / "out")
    loaded = dc.load_plain_tensors(tmp_path / "out")
    assert (loaded["even"] != FULL["even"]).sum() == 1


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
    sources: dict[str, Path],
    source: str,
    reshard: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def little(*_: object) -> Budget:
        return Budget(threads=3, box_bytes=1000, buffer_bytes=2000)

    # By its name in the package it is the function.
    monkeypatch.setattr(
        import_module("dist_checkpointing.tools.convert.conversion"), "budget_of", little
    )
    options = replace(ROOMY, reshard=reshard)
    for to in ("zarr",) if reshard else ("zarr", "safetensors"):
        done = convert(sources[source], tmp_path / to, to, options=options)
        assert done.verified_bytes == NUM_BYTES
        damaged = Path(shutil.copytree(sources[source], tmp_path / f"damaged-{to}"))
        flip_a_bit_of(damaged, FULL["across"][23, 44:])
        with pytest.raises(dc.CorruptCheckpointError, match="'across'"):
            convert(damaged, tmp_path / "out", to, options=options)
        assert not (tmp_path / "out").exists()


def test_checksums_that_are_lost_let_nothing_pass(sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources["zarr-2"], source)
    min((source / CHECKSUMS_NAME).glob("*.bin")).unlink()
    with pytest.raises(dc.CorruptCheckpointError, match="file is missing"):
        convert(source, tmp_path / "out", options=ROOMY)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["zarr-2", "torch_dist"])
def test_damaged_common_state_does_not_travel_along(
    sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources[name], source)
    path = source / "common.pt"
    # The step becomes another one.
    flip(path, path.read_bytes().index(b"stepq\x01K\x04") + 7)
    with pytest.raises(dc.CorruptCheckpointError, match=r"common\.pt"):
        convert(source, tmp_path / "out", options=ROOMY)
    assert not (tmp_path / "out").exists()


def test_a_source_without_checksums_is_said(tmp_path: Path) -> None:
    strategy = Zarr3SaveShardedStrategy(options=StorageOptions(checksum=Checksum.NONE))
    save_on(2, state, tmp_path / "source", strategy)
    done = convert(tmp_path / "source", tmp_path / "out", "tensorstore", options=ROOMY)
    assert (done.verified_bytes, done.not_verified) == (0, "the source keeps no checksums")
    assert dc.Checkpoint.open(tmp_path / "out").keys() == FULL.keys()


def test_the_command_says_what_was_verified(
    sources: dict[str, Path], tmp_path: Path, dckpt: Run
) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources["tensorstore"], source)
    plain = dckpt("convert", source, tmp_path / "a", "--to", "torch_file", code=0).out
    assert f"  verified: {bytes_text(NUM_BYTES)} of tensors by the checksums" in plain
    assert "not verified" not in plain
    off = dckpt("convert", source, tmp_path / "b", "--to", "torch_file", "--no-verify", code=0).out
    assert "  not verified: verification was turned off\n" in off
    none = dckpt("convert", tmp_path / "a", tmp_path / "c", "--to", "zarr", code=0).out
    assert "  not verified: the source keeps no checksums\n" in none
    flip_a_bit_of(source, SOME_OF["uneven"])
    error = dckpt("convert", source, tmp_path / "out", "--to", "zarr", code=2).err
    assert error.startswith("error: the source is not what was saved: 'uneven': checksum differs")
    assert "--no-verify" in error


# Any parts, read in any boxes, in any order, from several threads.


@st.composite
def cuts(draw: st.DrawFn, extent: int) -> list[int]:
    inner = draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=4))
    return [0, *sorted(cut for cut in inner if cut < extent), extent]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, Any]], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    parts: list[tuple[Box, Any]] = []
    for box in draw(tilings(Box.whole(shape))):
        size = box.num_elements
        if draw(st.booleans()):
            parts += [(box, flat) for flat in itertools.pairwise(draw(cuts(size)))]
        else:
            parts.append((box, None))
    return shape, parts, draw(st.permutations(draw(tilings(Box.whole(shape)))))


@given(cases(), st.integers(0, 10**6), st.booleans(), st.integers(1, 64))
def test_any_parts_are_found_in_whatever_is_read(
    case: tuple[tuple[int, ...], list[tuple[Box, Any]], list[Box]],
    place: int,
    damaged: bool,
    most_bytes: int,
) -> None:
    shape, pieces, reads = case
    full = torch.arange(1, 1 + Box.whole(shape).num_elements, dtype=torch.int32).reshape(shape)
    parts = []
    for box, flat in pieces:
        values = full[box.slices()].reshape(-1)
        values = values if flat is None else values[slice(*flat)]
        parts.append(StoredPart("w", box, flat, checksum(values.contiguous().numpy()), 0))
    stored = full.clone()
    if damaged:
        stored.reshape(-1)[place % full.numel()] += 1

    def read(wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        return [stored[box.slices()].contiguous() for _, box in wanted]

    tensor = StoredTensor("w", dtypes.from_name("int32"), shape, shape)
    checks = PartChecks({"w": parts}, {"w": tensor}, read, lambda part: str(part.box))
    checks.most_bytes = max(4, most_bytes)

    def compare(box: Box) -> int:
        try:
            checks.read([("w", box)])
        except dc.CorruptCheckpointError as error:
            return len(error.findings)
        return 0

    with ThreadPoolExecutor(3) as pool:
        found = sum(pool.map(compare, reads))
    assert found == int(damaged)
    assert checks.num_bytes == full.nbytes
