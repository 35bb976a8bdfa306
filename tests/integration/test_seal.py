"""A checkpoint is sealed as a whole: nothing in it changes, goes or comes without being noticed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import (
    CheckpointingException,
    CorruptCheckpointError,
    ShardedObject,
    StateMismatchError,
    UnsupportedFormatError,
    load,
    remove_sharded_tensors,
    save,
    verify_checkpoint,
)
from dist_checkpointing.checkpoint.verify_checkpoint import examine_checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import RankFailedError
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.local_folder import fsync_folder
from dist_checkpointing.format import checksums as checksum_tables
from dist_checkpointing.format import seal
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, is_in_attempt
from dist_checkpointing.format.seal import SEAL_NAME, Seal, read_seal
from dist_checkpointing.serialization import save_checks
from dist_checkpointing.storage.options import Checksum, StorageOptions
from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
from dist_checkpointing.strategies.zarr.v3 import ZarrV3Writer
from dist_checkpointing.testing import run_ranks
from samples import Samples
from states import rows, save_on, shard

BACKENDS = ["tensorstore", "zarr-2", "zarr-2-zstd", "zarr-1", "torch_dist"]
STRATEGIES: dict[str, Any] = {
    "tensorstore": "tensorstore",
    "zarr-2": ("zarr", 2),
    "zarr-1": ("zarr", 1),
    "torch_dist": "torch_dist",
}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def refuses(folder: Path, sample: Any) -> None:
    """Both ways to verify find damage, and say so in the documented way."""
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        verify_checkpoint(folder)
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
        load(sample.template(), folder, verify=True)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for another machine's files."""
    monkeypatch.setattr(seal, "VISIBLE_SECONDS", 0.05)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sound_checkpoint_is_sealed(samples: Samples, name: str) -> None:
    sample = samples(name)
    content = read_seal(sample.folder)
    assert content is not None
    assert set(content.files) == {
        path.relative_to(sample.folder).as_posix() for path in files_of(sample.folder)
    } - {"metadata.json", SEAL_NAME}
    assert examine_checkpoint(sample.folder).is_sealed
    sample.assert_is(load(sample.template(), sample.folder, verify=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_flipped_bit_of_common_state_is_found(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    sample = samples(name).copied(tmp_path / "c")
    path = sample.folder / "common.pt"
    whole = path.read_bytes()
    for position in random.Random(0).sample(range(len(whole)), 40):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        refuses(sample.folder, sample)
    path.write_bytes(whole)
    verify_checkpoint(sample.folder)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_flipped_bit_in_any_file_is_found(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    chance = random.Random(1)
    for path in files_of(sample.folder):
        whole = path.read_bytes()
        for position in chance.sample(range(len(whole)), min(3, len(whole))):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            try:
                verify_checkpoint(sample.folder)
                # A byte that is no part of any value: padding, or a header that nobody reads.
                loaded = load(sample.template(), sample.folder, verify=True)
                sample.assert_is(loaded)
            except CheckpointingException:
                continue
            finally:
                path.write_bytes(whole)
    verify_checkpoint(sample.folder)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_lost_file_is_found(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    for path in files_of(sample.folder):
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointingException):
            verify_checkpoint(sample.folder)
        path.write_bytes(whole)
    verify_checkpoint(sample.folder)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_changed_object_is_found(tmp_path: Path, name: str) -> None:
    """The value is another valid one, so that only its digest tells."""
    folder = tmp_path / "c"

    def state(seed: str) -> dict[str, Any]:
        return {"o": ShardedObject("o", {"seed": seed}, (1,), (0,)), "step": 1}

    strategy = Zarr3SaveShardedStrategy(codec="zstd") if name == "zarr-2-zstd" else STRATEGIES[name]
    save(state("aaaaaaaa"), folder, strategy)
    for path in files_of(folder):
        content = path.read_bytes()
        if b"aaaaaaaa" in content:
            path.write_bytes(content.replace(b"aaaaaaaa", b"aaaaaaab"))
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(folder)
    with pytest.raises(CorruptCheckpointError):
        load({"o": ShardedObject("o", None, (1,), (0,))}, folder, verify=True)


@pytest.mark.parametrize("damage", ["gone", "empty", "of another save"])
@pytest.mark.parametrize("name", BACKENDS)
def test_lost_and_foreign_tables_are_found(
    samples: Samples, tmp_path: Path, name: str, damage: str
) -> None:
    sample = samples(name).copied(tmp_path / "c")
    (table,) = (sample.folder / checksum_tables.CHECKSUMS_NAME).glob("*.bin")
    if damage == "gone":
        table.unlink()
    elif damage == "empty":
        table.write_bytes(b"")
    else:
        other = tmp_path / "other"
        save({"w": shard("w", torch.ones(3))}, other)
        shutil.copy(next((other / checksum_tables.CHECKSUMS_NAME).glob("*.bin")), table)
    refuses(sample.folder, sample)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_an_older_part_with_its_older_table_is_found(tmp_path: Path, name: str) -> None:
    """Each file is sound by itself; they are not of one save."""

    def state(value: float) -> dict[str, Any]:
        return {"w": shard("w", torch.full((2000,), value))}

    old, new = tmp_path / "old", tmp_path / "new"
    save(state(1.0), old, STRATEGIES[name])
    save(state(2.0), new, STRATEGIES[name])
    own = torch.full((2000,), 2.0).numpy().tobytes()
    older = torch.full((2000,), 1.0).numpy().tobytes()
    replaced = 0
    for path in files_of(new):
        content = path.read_bytes()
        if own in content:
            path.write_bytes(content.replace(own, older))
            replaced += 1
    assert replaced == 1
    for table in (old / checksum_tables.CHECKSUMS_NAME).iterdir():
        shutil.copy(table, new / checksum_tables.CHECKSUMS_NAME / table.name)
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(new)
    with pytest.raises(CorruptCheckpointError):
        load(
            {"w": shard("w", torch.empty(2000))},
            new,
            verify=True,
        )


@pytest.mark.parametrize("name", STRATEGIES)
def test_files_of_an_older_save_with_their_seal_are_found(tmp_path: Path, name: str) -> None:
    for step, folder in enumerate(["older", "newer"]):
        state = {"w": shard("w", torch.full((30,), float(step)))}
        save(state, tmp_path / folder, STRATEGIES[name])
    older, newer = tmp_path / "older", tmp_path / "newer"
    for path in files_of(older):
        if path.relative_to(older).as_posix() != ATTEMPT_NAME:
            (newer / path.relative_to(older)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, newer / path.relative_to(older))
    wanted = {"w": shard("w", torch.empty(30))}
    with pytest.raises(CorruptCheckpointError, match=r"attempt\.json"):
        load(wanted, newer, verify=True)
    with pytest.raises(CorruptCheckpointError, match=r"attempt\.json"):
        verify_checkpoint(newer)


@pytest.mark.parametrize("name", STRATEGIES)
def test_objects_of_another_grid_are_no_damage(tmp_path: Path, name: str) -> None:
    state = {"rng": [ShardedObject("rng", rank, (2,), (rank,)) for rank in range(2)]}
    save(state, tmp_path / "c", STRATEGIES[name])
    with pytest.raises(StateMismatchError, match=r"found \(2,\)"):
        load({"rng": ShardedObject("rng", None, (3, 2), (2, 1))}, tmp_path / "c", verify=True)
    with pytest.raises(StateMismatchError, match="not in the checkpoint"):
        load({"x": ShardedObject("x", None, (1,), (0,))}, tmp_path / "c", verify=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_tensors_without_elements_need_no_checksums(tmp_path: Path, name: str) -> None:
    state = {
        "nothing": shard("nothing", torch.ones(0, 4)),
        "w": shard("w", torch.ones(3)),
    }
    save(state, tmp_path / "c", STRATEGIES[name])
    loaded = load({"nothing": state["nothing"]}, tmp_path / "c", verify=True)
    assert loaded["nothing"].shape == (0, 4)


def test_a_lost_object_is_found(samples: Samples, tmp_path: Path) -> None:
    sample = samples("zarr-2").copied(tmp_path / "c")
    (sample.folder / "rng" / "shard_1_2.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"shard_1_2\.pt"):
        load(sample.template(), sample.folder, verify=True)


def test_another_dtype_of_an_array_is_found(samples: Samples, tmp_path: Path) -> None:
    sample = samples("zarr-1").copied(tmp_path / "c")
    path = sample.folder / "decoder.weight" / ".zarray"
    content = path.read_text()
    assert '"<f4"' in content
    path.write_text(content.replace('"<f4"', '"<i4"'))
    wanted = shard("decoder.weight", torch.empty(16, 12).int())
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray"):
        load({"w": wanted}, sample.folder, verify=True)
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray"):
        verify_checkpoint(sample.folder)


@pytest.mark.parametrize("has_seal", [True, False])
def test_arrays_that_nothing_lists_are_found(
    samples: Samples, tmp_path: Path, *, has_seal: bool
) -> None:
    sample = samples("zarr-2").copied(tmp_path / "c")
    (sample.folder / ".dckpt" / "index.json").unlink()
    if not has_seal:
        shutil.rmtree(sample.folder / ".dckpt")
    root = json.loads((sample.folder / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"] = {}
    (sample.folder / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(sample.folder)


def test_another_backend_in_the_commit_is_found(samples: Samples, tmp_path: Path) -> None:
    sample = samples("tensorstore").copied(tmp_path / "c")
    path = sample.folder / "metadata.json"
    path.write_text(path.read_text().replace('"common_backend_version": 1', '"x": 1'))
    assert '"x": 1' in path.read_text()
    verify_checkpoint(sample.folder)  # Megatron leaves such fields out, and their default is 1
    path.write_text(path.read_text().replace('"tensorstore"', '"zarr"'))
    path.write_text(path.read_text().replace('_version": 1', '_version": 2'))
    with pytest.raises(CorruptCheckpointError, match=r"metadata\.json"):
        load(sample.template(), sample.folder, verify=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_files_that_no_save_made_are_named(samples: Samples, tmp_path: Path, name: str) -> None:
    sample = samples(name).copied(tmp_path / "c")
    (sample.folder / "tokenizer").mkdir()
    (sample.folder / "tokenizer" / "vocab.json").write_text("{}")
    found = examine_checkpoint(sample.folder)
    assert found.is_sound
    assert [Path(str(f.path)).name for f in found.remarks] == ["vocab.json"]
    (sample.folder / ".dckpt" / "extra.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"extra\.json"):
        verify_checkpoint(sample.folder)


def test_a_checkpoint_without_a_seal_is_verified_and_says_so(
    samples: Samples, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = samples("mc0.15.3_zarr")
    verify_checkpoint(sample.folder)
    assert "has no seal" in caplog.text
    assert not examine_checkpoint(sample.folder).is_sealed
    # A seal that was promised and is gone is another matter.
    own = samples("zarr-2").copied(tmp_path / "c")
    (own.folder / SEAL_NAME).unlink()
    with pytest.raises(CorruptCheckpointError, match="seal is missing"):
        verify_checkpoint(own.folder)


def test_what_has_no_checksums_is_not_called_verified(tmp_path: Path) -> None:
    options = StorageOptions(checksum=Checksum.NONE)
    state = {"w": shard("w", torch.ones(3))}
    save(state, tmp_path / "c", Zarr3SaveShardedStrategy(options=options))
    with pytest.raises(UnsupportedFormatError, match="no checksums"):
        load(state, tmp_path / "c", verify=True)


def test_a_rank_reads_the_tables_of_what_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum_tables, "_ROWS_A_TABLE", 4)
    keys = [f"w{number:02d}" for number in range(40)]
    full = {key: torch.arange(6.0) + number for number, key in enumerate(keys)}

    save_on(2, lambda comm: {k: rows(k, t, comm) for k, t in full.items()}, tmp_path / "c")
    tables = checksum_tables.checksum_files(tmp_path / "c")
    assert len(tables) == 20
    whole = [part for path in tables for part in checksum_tables.read_table(path).parts]
    assert [part.key for part in whole] == sorted(part.key for part in whole)
    assert {(part.key, part.rank) for part in whole} == {(k, r) for k in keys for r in range(2)}
    for path in tables[3:]:
        Path(path).write_bytes(b"")
    wanted = {key: shard(key, torch.empty(6)) for key in keys[:6]}
    load(wanted, tmp_path / "c", verify=True)
    assert torch.equal(wanted["w05"].data, full["w05"])  # type: ignore[arg-type]
    wanted = {"x": shard("w06", torch.empty(6))}
    with pytest.raises(CorruptCheckpointError, match=r"00003\.bin"):
        load(wanted, tmp_path / "c", verify=True)


def test_every_flipped_bit_of_a_table_and_of_a_seal_is_found(tmp_path: Path) -> None:
    save({"w": shard("w", torch.ones(3))}, tmp_path / "c")
    (table,) = checksum_tables.checksum_files(tmp_path / "c")
    for path, parse in (
        (table, lambda data: checksum_tables.parse_table(data, "t")),
        (tmp_path / "c" / SEAL_NAME, Seal.from_json),
    ):
        whole = Path(path).read_bytes()
        parse(whole)
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            with pytest.raises(CorruptCheckpointError):
                parse(bytes(damaged))
            with pytest.raises(CorruptCheckpointError):
                parse(whole[:position])


def states_of_ranks() -> Iterator[dict[str, Any]]:
    for rank in range(2):
        yield {"w": shard("w", torch.full((2,), float(rank)), (0, rank, 2))}


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_rank_that_does_not_see_the_claimed_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = list(states_of_ranks())
    # As on a node-local disk: the same name, and another folder.
    monkeypatch.setattr(save_checks, "is_in_attempt", lambda *_: False)
    with pytest.raises(CheckpointingException, match="not save into one folder") as raised:
        run_ranks(
            2, lambda comm: save(states[comm.rank], tmp_path / "c", STRATEGIES[name], comm=comm)
        )
    (finding,) = raised.value.findings
    assert finding.ranks == (1,)
    assert not (tmp_path / "c" / "metadata.json").exists()


def test_a_folder_that_is_seen_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = list(states_of_ranks())
    looks = iter(range(100))
    monkeypatch.setattr(
        save_checks,
        "is_in_attempt",
        lambda *arguments: next(looks) > 3 and is_in_attempt(*arguments),
    )
    run_ranks(2, lambda comm: save(states[comm.rank], tmp_path / "c", comm=comm))
    verify_checkpoint(tmp_path / "c")
    assert next(looks) == 5


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("backends", [(("zarr", 1), ("zarr", 2)), ("tensorstore", "torch_dist")])
def test_ranks_that_write_different_formats(tmp_path: Path, backends: tuple[Any, Any]) -> None:
    states = list(states_of_ranks())
    run_ranks(2, lambda comm: save(states[comm.rank], tmp_path / "c", comm=comm))

    def save_rank(comm: Comm) -> None:
        save(states[comm.rank], tmp_path / "c", backends[comm.rank], comm=comm, overwrite=True)

    with pytest.raises(CheckpointingException, match="different formats") as raised:
        run_ranks(2, save_rank)
    assert [finding.ranks for finding in raised.value.findings] == [(0,), (1,)]
    # What was there is still there: it is found out before the folder is claimed.
    verify_checkpoint(tmp_path / "c")


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
    states = list(states_of_ranks())
    with pytest.raises(CheckpointingException, match="rank 0 does not see") as raised:
        run_ranks(
            2, lambda comm: save(states[comm.rank], tmp_path / "c", ForgetfulSave(), comm=comm)
        )
    assert not isinstance(raised.value, RankFailedError)
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_removal_seals_what_is_left(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "c"
    state = {key: shard(key, torch.full((2000,), 1.0)) for key in ("model.w", "optimizer.m")}
    save(state, folder, STRATEGIES[name])
    remove_sharded_tensors(folder, "optimizer")
    verify_checkpoint(folder)
    content = read_seal(folder)
    assert content is not None
    assert not content.is_open
    left = {"w": shard("model.w", torch.empty(2000))}
    load(left, folder, verify=True)


def test_a_removal_does_not_seal_damage(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    keys = ("model.w", "optimizer.m")
    state = {key: shard(key, torch.ones(9)) for key in keys}
    save({**state, "step": 1}, folder, ("zarr", 2))
    path = folder / "common.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    remove_sharded_tensors(folder, "optimizer")
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_removal_that_was_cut_off_is_no_damage(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "c"
    keys = ("model.w", "optimizer.m")
    state = {key: shard(key, torch.ones(2000)) for key in keys}
    save(state, folder, STRATEGIES[name])
    cut_off = iter([None] * (1 if name == "torch_dist" else 3))

    def interrupted(path: Path) -> None:
        # The open seal, the note of the removal (not in torch_dist) and a file of the format.
        if next(cut_off, "now") == "now":
            raise KeyboardInterrupt
        fsync_folder(path)

    with monkeypatch.context() as patched:
        patched.setattr(local_folder, "fsync_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_sharded_tensors(folder, "optimizer")
    content = read_seal(folder)
    assert content is not None
    assert content.is_open
    found = examine_checkpoint(folder)
    assert found.is_sound
    assert found.remarks
    remove_sharded_tensors(folder, "optimizer")
    verify_checkpoint(folder)
    content = read_seal(folder)
    assert content is not None
    assert not content.is_open
