"""A checkpoint is sealed as a whole: nothing in it changes, goes or comes without being noticed."""

import errno
import json
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.checkpoint import examine_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.format import (
    SEAL_NAME,
    Seal,
    SealedFile,
    checksums as checksum_tables,
    leftovers,
    read_seal,
)
from dist_checkpointing.storage import Checksum, StorageOptions
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrV3Writer
from dist_checkpointing.testing import run_ranks
from faults import failing, path_of, without_links
from samples import BACKENDS, Samples
from states import at_step, flat, rows, save_on, shard

BACKEND = pytest.mark.parametrize("name", BACKENDS)
PLAIN = pytest.mark.parametrize("name", [n for n in BACKENDS if n != "zarr-2-zstd"])


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def refuses(folder: Path, wanted: Any, match: str | None = None, *others: type[Exception]) -> None:
    """Both ways to verify find damage, and say so in the documented way."""
    with pytest.raises((dc.CorruptCheckpointError, *others), match=match):
        dc.verify_checkpoint(folder)
    with pytest.raises((dc.CorruptCheckpointError, *others), match=match):
        dc.load(wanted, folder, verify=True)


def flipped(whole: bytes, position: int) -> bytes:
    damaged = bytearray(whole)
    damaged[position] ^= 1 << position % 8
    return bytes(damaged)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for another machine's files."""
    monkeypatch.setattr(location, "VISIBLE_SECONDS", 0.05)


@BACKEND
def test_a_sound_checkpoint_is_sealed(samples: Samples, name: str) -> None:
    sample = samples(name)
    content = read_seal(sample.folder)
    assert content is not None
    assert set(content.files) == {
        path.relative_to(sample.folder).as_posix() for path in files_of(sample.folder)
    } - {"metadata.json", SEAL_NAME}
    assert examine_checkpoint(sample.folder).is_sealed
    sample.assert_is(dc.load(sample.template(), sample.folder, verify=True))


@BACKEND
def test_a_changed_object_is_found(tmp_path: Path, name: str) -> None:
    """The value is another valid one, so that only its digest tells."""
    folder = tmp_path / "c"

    def state(seed: str) -> dict[str, Any]:
        return {"o": dc.ShardedObject("o", {"seed": seed}, (1,), (0,)), "step": 1}

    dc.save(state("aaaaaaaa"), folder, BACKENDS[name]())
    for path in files_of(folder):
        content = path.read_bytes()
        if b"aaaaaaaa" in content:
            path.write_bytes(content.replace(b"aaaaaaaa", b"aaaaaaab"))
    refuses(folder, {"o": dc.ShardedObject("o", None, (1,), (0,))})


@PLAIN
def test_an_older_part_with_its_older_table_is_found(tmp_path: Path, name: str) -> None:
    """Each file is sound by itself; they are not of one save."""
    old, new = tmp_path / "old", tmp_path / "new"
    own, older = torch.full((2000,), 2.0), torch.full((2000,), 1.0)
    dc.save({"w": shard("w", older)}, old, BACKENDS[name]())
    dc.save({"w": shard("w", own)}, new, BACKENDS[name]())
    (path,) = [path for path in files_of(new) if own.numpy().tobytes() in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(own.numpy().tobytes(), older.numpy().tobytes()))
    for table in (old / checksum_tables.CHECKSUMS_NAME).iterdir():
        shutil.copy(table, new / checksum_tables.CHECKSUMS_NAME / table.name)
    refuses(new, {"w": shard("w", torch.empty(2000))})


@PLAIN
def test_files_of_an_older_save_with_their_seal_are_found(tmp_path: Path, name: str) -> None:
    for step, folder in enumerate(["older", "newer"]):
        state = {"w": shard("w", torch.full((30,), float(step)))}
        dc.save(state, tmp_path / folder, BACKENDS[name]())
    older, newer = tmp_path / "older", tmp_path / "newer"
    for path in files_of(older):
        if path.relative_to(older).as_posix() != ".dckpt/attempt.json":
            (newer / path.relative_to(older)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, newer / path.relative_to(older))
    refuses(newer, {"w": shard("w", torch.empty(30))}, r"attempt\.json")


@PLAIN
def test_what_needs_no_checksums_is_no_damage(tmp_path: Path, name: str) -> None:
    """Objects of another grid, and tensors without elements."""
    nothing = shard("nothing", torch.ones(0, 4))
    cells = [dc.ShardedObject("rng", rank, (2,), (rank,)) for rank in range(2)]
    dc.save({"rng": cells, "nothing": nothing}, tmp_path / "c", BACKENDS[name]())
    with pytest.raises(dc.StateMismatchError, match=r"found \(2,\)"):
        dc.load({"rng": dc.ShardedObject("rng", None, (3, 2), (2, 1))}, tmp_path / "c", verify=True)
    with pytest.raises(dc.StateMismatchError, match="not in the checkpoint"):
        dc.load({"x": dc.ShardedObject("x", None, (1,), (0,))}, tmp_path / "c", verify=True)
    loaded = dc.load({"nothing": nothing}, tmp_path / "c", verify=True)
    assert loaded["nothing"].shape == (0, 4)


def test_another_dtype_of_an_array_is_found(samples: Samples, tmp_path: Path) -> None:
    sample = samples("zarr-1").copied(tmp_path / "c")
    path = sample.folder / "decoder.weight" / ".zarray"
    content = path.read_text()
    assert '"<f4"' in content
    path.write_text(content.replace('"<f4"', '"<i4"'))
    wanted = shard("decoder.weight", torch.empty(16, 12).int())
    refuses(sample.folder, {"w": wanted}, r"\.zarray")


def test_arrays_that_nothing_lists_are_found(samples: Samples, tmp_path: Path) -> None:
    folder = samples("zarr-2").copied(tmp_path / "c").folder
    (folder / ".dckpt" / "index.json").unlink()
    root = json.loads((folder / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"] = {}
    (folder / "zarr.json").write_text(json.dumps(root))
    for _ in range(2):
        with pytest.raises(dc.CorruptCheckpointError):
            dc.verify_checkpoint(folder)
        shutil.rmtree(folder / ".dckpt", ignore_errors=True)  # without the seal too


def test_another_backend_in_the_commit_is_found(samples: Samples, tmp_path: Path) -> None:
    sample = samples("tensorstore").copied(tmp_path / "c")
    path = sample.folder / "metadata.json"
    path.write_text(path.read_text().replace('"common_backend_version": 1', '"x": 1'))
    assert '"x": 1' in path.read_text()
    dc.verify_checkpoint(sample.folder)  # Megatron leaves such fields out, and their default is 1
    path.write_text(path.read_text().replace('"tensorstore"', '"zarr"'))
    path.write_text(path.read_text().replace('_version": 1', '_version": 2'))
    with pytest.raises(dc.CorruptCheckpointError, match=r"metadata\.json"):
        dc.load(sample.template(), sample.folder, verify=True)


@BACKEND
def test_files_that_no_save_made_are_neither_damage_nor_read(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    """Such as a late rank of an earlier attempt leaves, also among those of the save."""
    sample = samples(name).copied(tmp_path / "c")
    names = {
        *(".nfs0000a1", "data/model/1.0-bc93d159.0", "decoder.weight/c.9.0", "decoder.weight/9.0"),
        *("other/.zarray", "other/zarr.json", "rng/shard_2_3.pt"),
        *(".dckpt/extra.json", ".dckpt/checksums/00009.bin", ".dckpt/checksums/00009.upper"),
        *(f"decoder.weight/0.0.{32 * '5'}.tmp", "tokenizer/vocab.json"),
    }
    for path in (sample.folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"else")
    for _ in range(2):
        found = examine_checkpoint(sample.folder)
        assert found.is_sound
        there = {str(sample.folder / name) for name in names if (sample.folder / name).exists()}
        assert {finding.path for finding in found.remarks} - {None} == there
        opened = dc.Checkpoint.open(sample.folder)
        assert opened.index.keys() == sample.tensors.keys()
        assert [handle.shape for handle in opened.objects.values()] == [(2,)]
        for verify in (False, True):
            sample.assert_is(dc.load(sample.template(), sample.folder, verify=verify))
            unknown = dc.ShardedObject("rng", None, (3,), (2,))
            with pytest.raises(dc.StateMismatchError, match=r"found \(2,\)"):
                dc.load({"rng": unknown}, sample.folder, verify=verify)
        # A removal does not seal them.
        for key in [key for key in sample.tensors if key.startswith("optimizer")]:
            del sample.tensors[key]
        dc.remove_sharded_tensors(sample.folder, "optimizer")


def test_files_that_are_listed_before_they_are_found_are_waited_for(tmp_path: Path) -> None:
    full = torch.arange(8.0)

    def state(comm: Comm) -> dict[str, Any]:
        return {"w": flat("w", full, *((0, 3), (3, 8))[comm.rank])}

    def is_of_w(path: Any, *_: Any, **__: Any) -> bool:
        return not isinstance(path, int) and Path(path).parent.name == "w"

    with failing("os.link", code=errno.ENOENT, times=2, at=is_of_w) as links:
        save_on(2, state, tmp_path / "c", ("zarr", 1))
    with without_links(kernel_copies=False):
        save_on(2, state, tmp_path / "d", ("zarr", 1))
    assert torch.equal(dc.load_plain_tensors(tmp_path / "d")["w"], full)
    dc.verify_checkpoint(tmp_path / "d")
    with failing("os.open", code=errno.ENOENT, times=2, at=is_of_w) as looks:
        assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], full)
    assert len(links) == 3 < len(looks)


def test_a_checkpoint_without_a_seal_is_verified_and_says_so(
    samples: Samples, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = samples("mc0.15.3_zarr")
    dc.verify_checkpoint(sample.folder)
    assert "has no seal" in caplog.text
    assert not examine_checkpoint(sample.folder).is_sealed
    # A seal that was promised and is gone is another matter.
    own = samples("zarr-2").copied(tmp_path / "c")
    (own.folder / SEAL_NAME).unlink()
    with pytest.raises(dc.CorruptCheckpointError, match="seal is missing"):
        dc.verify_checkpoint(own.folder)


def test_a_seal_that_is_seen_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save(at_step(1), tmp_path / "c")
    hidden = (tmp_path / "c" / SEAL_NAME).rename(tmp_path / "seal")
    monkeypatch.setattr(local_folder, "is_local", lambda _: False)
    timer = threading.Timer(0.1, lambda: hidden.rename(tmp_path / "c" / SEAL_NAME))
    timer.start()
    assert read_seal(tmp_path / "c") is not None
    timer.join()


def test_what_has_no_checksums_is_not_called_verified(tmp_path: Path) -> None:
    options = StorageOptions(checksum=Checksum.NONE)
    state = {"w": shard("w", torch.ones(3))}
    dc.save(state, tmp_path / "c", Zarr3SaveShardedStrategy(options=options))
    with pytest.raises(dc.UnsupportedFormatError, match="no checksums"):
        dc.load(state, tmp_path / "c", verify=True)


def test_every_flipped_bit_of_a_table_and_of_a_seal_is_found(tmp_path: Path) -> None:
    dc.save({"w": shard("w", torch.ones(3))}, tmp_path / "c")
    (table,) = checksum_tables.checksum_files(tmp_path / "c")
    for path, parse in (
        (table, lambda data: checksum_tables.parse_table(data, "t")),
        (tmp_path / "c" / SEAL_NAME, Seal.from_json),
    ):
        whole = Path(path).read_bytes()
        parse(whole)
        for position in range(len(whole)):
            for damaged in (flipped(whole, position), whole[:position]):
                with pytest.raises(dc.CorruptCheckpointError):
                    parse(damaged)


NO_NAMES = ["a\0b", "\ud800", "n" * 300, "n/" * 2500 + "n", "../x", "/etc/passwd", ".", ""]


@pytest.mark.parametrize("place", ["files", "tables"])
def test_a_seal_that_names_no_file_is_damaged(tmp_path: Path, place: str) -> None:
    dc.save({"step": 1}, tmp_path)
    sound = Seal.from_json((tmp_path / SEAL_NAME).read_bytes())
    for name in NO_NAMES:
        named = SealedFile(name, 0) if place == "files" else ("a", "z")
        changed: dict[str, Any] = {place: {**getattr(sound, place), name: named}}
        (tmp_path / SEAL_NAME).write_bytes(replace(sound, **changed).to_json())
        refuses(tmp_path, {}, "the seal of the checkpoint is damaged")


def save_on_two(folder: Path, *backends: Any, **options: Any) -> None:
    """Save on two ranks; each may have a backend of its own."""

    def one(comm: Comm) -> None:
        state = {"w": rows("w", torch.arange(4.0), comm)}
        dc.save(state, folder, *backends[comm.rank :][:1], comm=comm, **options)

    run_ranks(2, one)


@pytest.mark.usefixtures("quickly")
def test_a_rank_that_does_not_see_the_claimed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a node-local disk: the same name, and another folder.
    monkeypatch.setattr(leftovers, "is_in_attempt", lambda *_: False)
    with pytest.raises(dc.CheckpointingException, match="not save into one folder") as raised:
        save_on_two(tmp_path / "c")
    (finding,) = raised.value.findings
    assert finding.ranks == (1,)
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("backends", [(("zarr", 1), ("zarr", 2)), ("tensorstore", "torch_dist")])
def test_ranks_that_write_different_formats(tmp_path: Path, backends: tuple[Any, Any]) -> None:
    save_on_two(tmp_path / "c")
    with pytest.raises(dc.CheckpointingException, match="different formats") as raised:
        save_on_two(tmp_path / "c", *backends, overwrite=True)
    assert [finding.ranks for finding in raised.value.findings] == [(0,), (1,)]
    # What was there is still there: it is found out before the folder is claimed.
    dc.verify_checkpoint(tmp_path / "c")


class Forgetful(ZarrV3Writer):
    """Loses a chunk between the write and the commit, as a node-local disk does."""

    def finish(self, metadata: Any, results: Any) -> None:
        next((self.checkpoint_dir / "w").glob("c.*")).unlink()
        super().finish(metadata, results)


class ForgetfulSave(Zarr3SaveShardedStrategy):
    def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
        return Forgetful(checkpoint_dir)


@pytest.mark.usefixtures("quickly")
def test_nothing_is_committed_that_rank_0_does_not_see(tmp_path: Path) -> None:
    with pytest.raises(dc.CheckpointingException, match="rank 0 does not see") as raised:
        save_on_two(tmp_path / "c", ForgetfulSave(), ForgetfulSave())
    assert not isinstance(raised.value, dc.RankFailedError)
    assert not (tmp_path / "c" / "metadata.json").exists()


KEYS = ("model.w", "optimizer.m")


def test_a_removal_does_not_seal_damage(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    dc.save({**{key: shard(key, torch.ones(9)) for key in KEYS}, "step": 1}, folder, ("zarr", 2))
    path = folder / "common.pt"
    path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 2))
    dc.remove_sharded_tensors(folder, "optimizer")
    with pytest.raises(dc.CorruptCheckpointError, match=r"common\.pt"):
        dc.verify_checkpoint(folder)


@PLAIN
def test_a_removal_that_is_cut_off_seals_what_is_left_the_next_time(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "c"
    dc.save({key: shard(key, torch.ones(2000)) for key in KEYS}, folder, BACKENDS[name]())
    # The open seal, the note of the removal (not in torch_dist) and a file of the format.
    cut_off = failing(
        "os.fsync",
        error=KeyboardInterrupt(),
        nth=2 if name == "torch_dist" else 4,
        at=lambda descriptor: path_of(descriptor).is_dir(),
    )
    with cut_off, pytest.raises(KeyboardInterrupt):
        dc.remove_sharded_tensors(folder, "optimizer")
    content = read_seal(folder)
    assert content is not None
    assert content.is_open
    found = examine_checkpoint(folder)
    assert found.is_sound
    assert found.remarks
    dc.remove_sharded_tensors(folder, "optimizer")
    dc.verify_checkpoint(folder)
    content = read_seal(folder)
    assert content is not None
    assert not content.is_open
    dc.load({"w": shard("model.w", torch.empty(2000))}, folder, verify=True)


DAMAGES: dict[str, Callable[[bytes, random.Random, bytes], bytes | None]] = {
    "flipped": lambda whole, chance, _: flipped(whole, chance.randrange(len(whole))),
    "cut": lambda whole, chance, _: whole[: chance.randrange(len(whole))],
    "zeroed": lambda whole, chance, _: zeroed(whole, chance.randrange(len(whole))),
    "grown": lambda whole, chance, _: whole + chance.randbytes(chance.randrange(1, 64)),
    "moved": lambda whole, chance, _: (2 * whole)[chance.randrange(len(whole)) :][: len(whole)],
    "of another file": lambda _whole, _chance, other: other,
    "gone": lambda *_: None,
}


def zeroed(whole: bytes, start: int) -> bytes:
    return whole[:start] + bytes(len(whole[start : start + 20])) + whole[start + 20 :]


@BACKEND
def test_no_damaged_copy_is_silently_wrong(samples: Samples, tmp_path: Path, name: str) -> None:
    """Each file in turn, lost and changed in any way."""
    sample = samples(name).copied(tmp_path / "c")
    contents = {path: path.read_bytes() for path in files_of(sample.folder)}
    chance = random.Random(name)
    copies = accepted = 0
    for number, (path, whole) in enumerate(contents.items()):
        other = chance.choice([content for content in contents.values() if content != whole])
        some = chance.choice([*DAMAGES]) if whole else "of another file"
        for damage in (("gone", "flipped")[number % 2] if whole else "gone", some):
            content = DAMAGES[damage](whole, chance, other)
            path.unlink() if content is None else path.write_bytes(content)
            with suppress(dc.CheckpointingException, OSError):
                sample.assert_is(dc.load(sample.template(), sample.folder, verify=True))
                assert path.name != "common.pt" or content == whole
            with suppress(dc.CheckpointingException, OSError):
                dc.verify_checkpoint(sample.folder)
                # What was changed is a byte that belongs to no value.
                assert damage not in ("cut", "grown", "gone") or content == whole, path
                assert path.name != "common.pt" or content == whole
                accepted += 1
            copies += 1
            path.write_bytes(whole)
    assert accepted < copies // 4
    sample.assert_is(dc.load(sample.template(), sample.folder, verify=True))
    dc.verify_checkpoint(sample.folder)
