"""``dckpt verify`` as a user runs it, and as a script reads it."""

from pathlib import Path

import pytest

from dist_checkpointing import ShardedObject, UnsupportedFormatError, save, verify_checkpoint
from samples import Run, Sample, Samples


class Stranger:
    """Not on any allow-list."""


def test_sound(any_sample: Sample, dckpt: Run) -> None:
    finished = dckpt("verify", any_sample.folder, code=0, err="")
    assert finished.out.endswith("\nsound\n")
    assert f"{len(any_sample.tensors)} tensors in " in finished.out
    document = dckpt("verify", any_sample.folder, "--json").json
    assert document["is_sound"]
    assert document["findings"] == document["refused"] == document["remarks"] == []
    assert document["num_bytes"] == sum(t.nbytes for t in any_sample.tensors.values())
    has_checksums = (any_sample.folder / ".dckpt" / "checksums").exists()
    assert document["num_bytes_compared"] == (document["num_bytes"] if has_checksums else 0)
    quiet = dckpt("verify", any_sample.folder, "--quiet")
    assert (quiet.code, quiet.out) == (0, "")


VICTIMS = {
    "zarr-2-zstd": ("uneven/piece.2.0/c.0.0", "uneven"),
    "tensorstore": ("manifest.ocdbt", None),
    "mc0.15.3_torch_dist": ("__0_0.distcp", "uneven"),
    "mc0.12.0_zarr": ("fc.weight/0.1", "fc.weight"),
    "mc0.15.3_zarr": ("rng_state/shard_0.1_1.pt", "rng_state"),
}


@pytest.mark.parametrize("name", VICTIMS)
def test_damaged(samples: Samples, tmp_path: Path, dckpt: Run, name: str) -> None:
    folder = samples(name).copied(tmp_path / "c").folder
    victim, key = VICTIMS[name]
    if "rng_state" in victim:
        victim = str(next((folder / "rng_state").glob("*.pt")).relative_to(folder))
    content = (folder / victim).read_bytes()
    (folder / victim).write_bytes(content[: len(content) // 2])
    finished = dckpt("verify", folder, code=1)
    assert finished.err == ""
    assert finished.out.endswith("\ndamaged\n")
    assert victim in finished.out
    if key is not None:
        assert f"  - '{key}" in finished.out
    document = dckpt("verify", folder, "--json")
    assert document.code == 1
    assert not document.json["is_sound"]
    assert any(victim in str(row) for row in document.json["findings"])
    assert dckpt("verify", folder, "--quiet").out == finished.out


def test_what_needs_trust(tmp_path: Path, dckpt: Run) -> None:
    save({"o": ShardedObject("o", Stranger(), (1,), (0,))}, tmp_path / "c", trusted=True)
    finished = dckpt("verify", tmp_path / "c", code=0)
    assert "not read, because it holds more than plain data types" in finished.out
    assert "Stranger" in finished.out
    assert "not read" not in dckpt("verify", tmp_path / "c", "--trusted").out
    with pytest.raises(UnsupportedFormatError, match="Stranger"):
        verify_checkpoint(tmp_path / "c")
    verify_checkpoint(tmp_path / "c", trusted=True)


@pytest.mark.parametrize(
    ("name", "words", "others"),
    [
        # Nothing was looked at.
        ("metadata.json", "metadata.json", ["0 tensors", "no seal"]),
        (".dckpt/seal.json", "no seal that can be read", ["older version"]),
    ],
)
def test_a_torn_commit_or_seal_is_damage(
    samples: Samples, tmp_path: Path, dckpt: Run, name: str, words: str, others: list[str]
) -> None:
    folder = samples("zarr-2").copied(tmp_path / "c").folder
    (folder / name).write_text("{")
    out = dckpt("verify", folder, code=1).out
    assert words in out
    assert not any(other in out for other in others)


def test_a_checkpoint_without_tensors(tmp_path: Path, dckpt: Run) -> None:
    save({"step": 1}, tmp_path / "c")
    assert "no checksums were kept" not in dckpt("verify", tmp_path / "c", code=0).out
