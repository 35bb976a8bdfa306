import json
import os
import pty
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import ObjectPath
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
    Zarr3LoadShardedStrategy,
)
from dist_checkpointing.tools import app, report
from samples import GOLDEN, GOLDEN_NAMES, Run
from states import BACKEND, cell, rows, save_on, shard, wholes
from stores import new_url

RUNNER = CliRunner()


def values(side: int = 64) -> dict[str, torch.Tensor]:
    names = ["model.a", "model.b", "optimizer.a", "optimizer.b", "optimizer"]
    return {
        key: torch.arange(side * side, dtype=torch.float32).reshape(side, side) + number
        for number, key in enumerate(names)
    }


def saved(folder: Any, backend: Any, side: int = 64) -> Any:
    def state(comm: Comm) -> dict[str, Any]:
        leaves = {key: rows(key, full, comm) for key, full in values(side).items()}
        return {**leaves, "o": cell("optimizer.rng", list(range(1000)), comm), "step": 3}

    save_on(2, state, folder, backend)
    return folder


def invoke(*arguments: object, exit_code: int = 0) -> str:
    result = RUNNER.invoke(app.app, ["rm-prefix", *map(str, arguments)], env={"COLUMNS": "80"})
    if exit_code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == exit_code
    return result.stdout


BLOCK_BYTES = 4096


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def assert_holds(folder: Any, expected: Mapping[str, torch.Tensor]) -> None:
    opened = dc.Checkpoint.open(folder)
    assert set(opened) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(opened[key][...], tensor), key
    assert list(opened.objects) == ["optimizer.rng"]
    assert [opened.objects["optimizer.rng"][cell] for cell in range(2)] == [list(range(1000))] * 2
    assert opened.common["step"] == 3


def without(prefix: str, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in full.items() if not key.startswith(prefix)}


@BACKEND
def test_a_section_goes_and_what_is_not_freed_is_said_before(tmp_path: Path, backend: Any) -> None:
    folder = saved(tmp_path / "c", backend)
    told = json.loads(invoke(folder, "model.a", "--json", "--dry-run"))
    assert told["keys"] == ["model.a"]
    assert told["num_bytes"] == 64 * 64 * 4
    assert told["removed"] is False
    assert_holds(folder, values())
    files = [folder / name for name in told["files"]]
    # A file system may settle the blocks of a file some time after it was written.
    settling = BLOCK_BYTES * len(list(folder.rglob("*")))
    on_disk = sum(path.stat().st_blocks * 512 for path in files)
    assert on_disk == pytest.approx(told["file_bytes"], abs=settling)
    before = disk_bytes(folder)
    done = json.loads(invoke(folder, "model.a", "--json", "--yes"))
    assert {k: done[k] for k in told if k != "removed"} == {
        k: told[k] for k in told if k != "removed"
    }
    assert before - disk_bytes(folder) == pytest.approx(done["bytes_freed"], abs=settling)
    assert not any(path.exists() for path in files)
    if backend[0] == "zarr":
        assert told["bytes_not_freed"] == {}
        assert done["bytes_freed"] >= told["num_bytes"]
    else:
        assert sum(told["bytes_not_freed"].values()) >= told["num_bytes"]
        # The tree goes, for another one; but no file with values of others.
        assert told["file_bytes"] <= 2 * BLOCK_BYTES
    assert_holds(folder, without("model.a", values()))
    dc.verify_checkpoint(folder)

    large = saved(tmp_path / "large", backend, 256)
    before = disk_bytes(large)
    text = " ".join(invoke(large, "optimizer", "--yes").split())
    assert "3 of 5 go: 768.0 KiB of values" in text
    assert "1 sharded object: optimizer.rng" in text
    assert_holds(large, without("optimizer", values(256)))
    dc.verify_checkpoint(large)
    # The files of torch DCP hold what a rank wrote, whatever it is.
    stays = "stay on the disk" in text
    assert stays == (backend[0] == "torch_dist")
    assert stays or before - disk_bytes(large) >= 3 * 256 * 256 * 4


def test_files_of_a_data_group_are_freed_one_by_one(tmp_path: Path) -> None:
    options = StorageOptions(data_file_bytes=2**16)
    folder = saved(tmp_path / "c", TensorStoreSaveShardedStrategy(options=options), 256)
    told = json.loads(invoke(folder, "model.a", "--json", "--yes"))
    assert told["bytes_freed"] >= 2 * 2**16
    assert_holds(folder, without("model.a", values(256)))
    dc.verify_checkpoint(folder)


@BACKEND
def test_a_save_over_a_removal_that_was_cut_off_is_whole(tmp_path: Path, backend: Any) -> None:
    folder = saved(tmp_path / "c", backend)
    note = folder / ".dckpt" / "removal.json"
    note.write_text(json.dumps({key: [key] for key in ("optimizer.a", "optimizer.b")}))
    full = {key: tensor + 100 for key, tensor in values().items()}
    dc.save(wholes(full), folder, backend, overwrite=True)
    assert not note.exists()
    opened = dc.Checkpoint.open(folder)
    assert set(opened) == set(full)
    assert all(torch.equal(opened[key][...], tensor) for key, tensor in full.items())


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_on_the_checkpoints_of_megatron(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(GOLDEN / name, tmp_path / "c")
    before = dc.Checkpoint.open(folder)
    kept = {key: before[key][...] for key in before if not key.startswith("optim")}
    assert 0 < len(kept) < len(before)
    told = json.loads(invoke(folder, "optim", "--json", "--yes"))
    assert set(told["keys"]) == set(before) - set(kept)
    after = dc.Checkpoint.open(folder)
    assert set(after) == set(kept)
    assert all(torch.equal(after[key][...], tensor) for key, tensor in kept.items())
    assert after.common.keys() == before.common.keys()
    assert after.objects.keys() == before.objects.keys()


def test_long_keys_are_not_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "optimizer.state." + ".".join(["a_long_name"] * 12)
    data = {long: shard(long, torch.ones(3))}
    dc.save(data, tmp_path / "c", "tensorstore")
    monkeypatch.setattr(report, "terminal_width", lambda: 80)
    _, key, facts, *_ = invoke(tmp_path / "c", "optimizer", "--dry-run").splitlines()
    assert key == long
    assert facts.split() == ["1", "float32", "3", "12", "B"]
    assert len(facts) <= 80


# Asking.


def test_without_a_terminal_and_without_yes_nothing_happens(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "c", "tensorstore")
    before = files_in(folder)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        result = dckpt("rm-prefix", folder, "optimizer")
    assert result.code == 2
    assert result.err == "error: cannot ask without a terminal: pass --yes to remove them\n"
    assert files_in(folder) == before


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1)])
def test_on_a_terminal_it_asks(
    tmp_path: Path, dckpt: Run, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    folder = saved(tmp_path / "c", ("zarr", 2))
    master, slave = pty.openpty()
    os.write(master, f"{answer}\n".encode())
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        result = dckpt("rm-prefix", folder, "optimizer")
    os.close(master)
    assert result.code == code
    assert "Remove 3 tensors for good? [y/N]" in result.out
    assert_holds(folder, values() if code else without("optimizer", values()))


def test_a_damaged_note_of_a_removal_is_not_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c", ("zarr", 2))
    for content in ('{"a": ["../.."]}', '{"a": ["/etc"]}', '{"a": [""]}', "[]", "{"):
        (folder / ".dckpt" / "removal.json").write_text(content)
        with pytest.raises(dc.CorruptCheckpointError, match="unfinished removal"):
            invoke(folder, "optimizer", "--yes")


def test_a_backend_that_cannot_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "c", ("zarr", 2))
    for name in ("plan_removal", "remove_sharded_tensors"):
        monkeypatch.setattr(Zarr3LoadShardedStrategy, name, getattr(LoadShardedStrategy, name))
    with pytest.raises(dc.UnsupportedFormatError, match="zarr 2"):
        invoke(folder, "optimizer", "--yes")


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 2), ("torch_dist", 1)])
def test_nothing_is_removed_in_a_store_and_convert_leaves_tensors_out(
    backend: Any, dckpt: Run, tmp_path: Path
) -> None:
    url, remedy = new_url(), "dckpt convert --exclude PATTERN"
    saved(ObjectPath.of(url), backend)
    for option in ("--yes", "--dry-run"):
        refused = dckpt("rm-prefix", url, "optimizer", option)
        assert refused.code == 2
        assert remedy in refused.err
    with pytest.raises(dc.UnsupportedFormatError, match=remedy) as raised:
        dc.remove_sharded_tensors(url, "optimizer")
    assert raised.value.findings[0].found == url
    assert_holds(url, values())
    without = ["--exclude", "optimizer", "--exclude", "optimizer.*", "--to", backend[0]]
    assert dckpt("convert", url, tmp_path / "c", *without).err == ""
    kept = {key: full for key, full in values().items() if key.startswith("model.")}
    found = dc.Checkpoint.open(tmp_path / "c")
    assert set(found) == set(kept)
    assert all(torch.equal(found[key][...], kept[key]) for key in kept)
