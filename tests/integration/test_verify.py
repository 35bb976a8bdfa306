"""verify names every damaged key, part and file of every backend, and nothing that is sound."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dist_checkpointing as dc
from damage import flip
from dist_checkpointing.checkpoint import examine_checkpoint
from dist_checkpointing.format import Index, StoredTensor, read_index, write_index
from samples import BACKENDS, Sample, Samples
from states import rows, save_on


def test_the_work_can_be_shared(sample: Sample) -> None:
    parts = [examine_checkpoint(sample.folder, rank=rank, world_size=3) for rank in range(3)]
    whole = examine_checkpoint(sample.folder)
    for name in ("num_tensors", "num_parts", "num_bytes", "num_bytes_compared", "num_objects"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)


def large(folder: Path, name: str) -> Path:
    """Tensors that lie outside of the nodes of a database, w1 of ones and so on, in two chunks."""
    full = {f"w{i}": torch.full((4, 500), float(i)) for i in range(5)}
    save_on(2, lambda c: {k: rows(k, t, c) for k, t in full.items()}, folder, BACKENDS[name]())
    return folder


@pytest.mark.parametrize("name", ["tensorstore", "zarr-2", "zarr-1", "torch_dist"])
def test_flipped_bits_are_found_with_key_and_file(tmp_path: Path, name: str) -> None:
    folder = large(tmp_path / "c", name)
    damaged = []
    for key, number in (("w1", 1), ("w3", 0)):
        # The second chunk of one, the first of the other, wherever they lie.
        values = torch.full((1000,), float(key[1])).numpy().tobytes()
        location = dc.Checkpoint.open(folder)[key].location(number)
        path = Path(location.split(", ")[0])
        content = path.read_bytes()
        assert content.count(values) in (1, 2)
        at = content.rindex(values) if number else content.index(values)
        flip(path, at + 17)
        damaged.append((key, number, location))
    found = examine_checkpoint(folder)
    assert {finding.key for finding in found.findings} == {"w1", "w3"}
    for key, number, location in damaged:
        (finding,) = [f for f in found.findings if f.key == key]
        assert "checksum differs" in finding.problem
        assert finding.path == location
        assert str((2 * number, 0)) in str(finding.found)
    with pytest.raises(dc.CorruptCheckpointError) as raised:
        dc.verify_checkpoint(folder)
    assert raised.value.findings == tuple(found.findings)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_lost_or_cut_off_file_of_values_is_named(tmp_path: Path, name: str) -> None:
    folder = large(tmp_path / "c", name)
    places: dict[str, set[str]] = {}
    opened = dc.Checkpoint.open(folder)
    for key, handle in opened.items():
        for number in range(handle.num_chunks):
            path = handle.location(number).split(", ")[0]
            places.setdefault(path, set()).add(key)
    for path, keys in sorted(places.items())[:2]:
        for damage, inflict in DAMAGES.items():
            content = Path(path).read_bytes()
            inflict(Path(path))
            found = examine_checkpoint(folder)
            Path(path).write_bytes(content)
            named = {finding.key for finding in found.findings}
            if damage == "cut off":
                assert set() < named <= keys
            else:  # where all values are in one file, it may be named without a key
                assert named == keys or (keys == {*opened} and named == {None})
            assert all(path in str(finding) for finding in found.findings)
    assert examine_checkpoint(folder).is_sound


@pytest.mark.parametrize("victim", ["common.pt", "rng/shard_1_2.pt"])
def test_damaged_state_is_named(samples: Samples, tmp_path: Path, victim: str) -> None:
    sample = samples("zarr-2").copied(tmp_path / "c")
    path = sample.folder / victim
    for inflict in (DAMAGES["cut off"], DAMAGES["gone"]):
        inflict(path)
        found = examine_checkpoint(sample.folder)
        assert any(str(path) in str(finding) for finding in found.findings)
        assert found.num_tensors == len(sample.tensors)  # and the rest was read
    assert {f.key for f in found.findings} >= {None if victim == "common.pt" else "rng/shard_1_2"}


@pytest.mark.parametrize("name", ["tensorstore", "torch_dist"])
def test_damaged_cells_among_the_tensors_are_named(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    sample = samples(name).copied(tmp_path / "c")
    spoiled = 0
    for path in sample.folder.rglob("*"):
        if path.is_file() and ".dckpt" not in path.parts and path.name != "common.pt":
            content = path.read_bytes()
            # The pickled key of the dict in the cells.
            if b"seed" in content and (name == "tensorstore") <= ("data" in path.parts):
                path.write_bytes(content.replace(b"seed", b"\x80\x80\x80\x80"))
                spoiled += 1
    assert spoiled
    found = examine_checkpoint(sample.folder)
    assert "rng" in {finding.key for finding in found.findings}


def test_what_describes_it_is_damaged(sample: Sample, tmp_path: Path) -> None:
    names = {
        "tensorstore": [".dckpt/index.json", "metadata.json", "manifest.ocdbt"],
        "zarr-2": [".dckpt/index.json", "metadata.json"],
        "zarr-2-zstd": [".dckpt/index.json"],
        "zarr-1": ["metadata.json", "decoder.weight/.zarray"],
        "torch_dist": ["metadata.json", ".metadata"],
    }
    for name in names[sample.name]:
        copied = tmp_path / "c"
        shutil.copytree(sample.folder, copied)
        (copied / name).write_bytes(b"{")
        found = examine_checkpoint(copied)
        shutil.rmtree(copied)
        assert found.findings, name
        assert any(name in str(finding.path) for finding in found.findings), name
        assert len(found.findings) <= 2  # the same is not said for each tensor


def test_lost_checksums_are_damage_and_the_values_are_read_all_the_same(
    samples: Samples, tmp_path: Path
) -> None:
    sample = samples("zarr-2").copied(tmp_path / "c")
    checksums = sample.folder / ".dckpt" / "checksums"
    (table,) = checksums.glob("*.bin")
    table.unlink()
    (sample.folder / "uneven" / "piece.2.0" / "c.0.0").unlink()
    found = examine_checkpoint(sample.folder)
    assert [f.path for f in found.findings if f.key is None] == [str(table)]
    assert {f.key for f in found.findings if "chunk is missing" in f.problem} == {"uneven"}
    table.write_bytes(b"nonsense")
    found = examine_checkpoint(sample.folder)
    assert {Path(str(f.path)).name for f in found.findings} == {table.name, "c.0.0"}


def test_a_tensor_whose_metadata_is_gone(samples: Samples, tmp_path: Path) -> None:
    """In this format the folders are the index: the seal knows what there was."""
    sample = samples("zarr-1").copied(tmp_path / "c")
    (sample.folder / "decoder.weight" / ".zarray").unlink()
    shutil.rmtree(sample.folder / "flat")
    found = examine_checkpoint(sample.folder)
    lost = {Path(str(f.path)).relative_to(sample.folder).parts[0] for f in found.findings}
    assert lost == {"decoder.weight", "flat"}


def test_metadata_for_other_tools(samples: Samples, tmp_path: Path) -> None:
    sample = samples("zarr-2").copied(tmp_path / "c")
    path = sample.folder / "zarr.json"
    for damage in (b"{", b"{}", None):
        path.unlink() if damage is None else path.write_bytes(damage)
        (finding,) = examine_checkpoint(sample.folder).findings
        assert finding.path == str(path)
        assert "our readers can" in finding.problem


def test_a_checksum_of_what_is_outside(samples: Samples, tmp_path: Path) -> None:
    folder = samples("zarr-2").copied(tmp_path / "c").folder
    index = read_index(folder)
    assert index is not None
    smaller = StoredTensor("decoder.bias", index["decoder.bias"].dtype, (11,), (12,))
    (folder / ".dckpt/index.json").unlink()
    write_index(Index.of({**index, "decoder.bias": smaller}.values()), folder)
    found = {(f.key, f.path if f.key is None else "") for f in examine_checkpoint(folder).findings}
    assert found == {("decoder.bias", ""), (None, str(folder / ".dckpt" / "index.json"))}
