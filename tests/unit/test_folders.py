"""Which folder is meant: URLs, names that differ between ranks, ranks that are not connected."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, SingleProcess, default_comm
from dist_checkpointing.filesystem.local_folder import rename_new
from dist_checkpointing.filesystem.location import as_local_folder, check_one_destination
from dist_checkpointing.interop import DCPReader, DCPWriter
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.tools.app import app
from dist_checkpointing.tools.convert import convert
from faults import without_links
from states import rows, shard


@pytest.mark.parametrize(
    "path", ["x", "/x/s3:/y", "a/b:c", "run:5", "2024-01-01T10:00:00", "", "."]
)
def test_names_with_colons_are_no_urls(path: str) -> None:
    assert as_local_folder(path) == Path(path)


STATE: dict[str, Any] = {"step": 1}

DOORS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda url, _: dc.save(STATE, url),
    "save on several ranks": lambda url, _: run_ranks(
        2, lambda comm: dc.save(STATE, url, comm=comm)
    ),
    "async_save": lambda url, _: dc.async_save(STATE, url),
    "AsyncSaver": lambda url, _: dc.AsyncSaver().save(STATE, url),
    "load": lambda url, _: dc.load({}, url),
    "load_common_state_dict": lambda url, _: dc.load_common_state_dict(url),
    "load_tensors_metadata": lambda url, _: dc.load_tensors_metadata(url),
    "check_is_distributed_checkpoint": lambda url, _: dc.check_is_distributed_checkpoint(url),
    "remove_sharded_tensors": lambda url, _: dc.remove_sharded_tensors(url, "w"),
    "verify_checkpoint": lambda url, _: dc.verify_checkpoint(url),
    "Checkpoint.open": lambda url, _: dc.Checkpoint.open(url),
    "CheckpointManager": lambda url, _: dc.CheckpointManager(url),
    "convert from": lambda url, folder: convert(url, folder / "new"),
    "convert to": lambda url, folder: convert(folder, url),
    "convert to a file": lambda url, folder: convert(folder, url, "safetensors"),
    "DCPWriter": lambda url, _: DCPWriter(url),
    "DCPReader": lambda url, _: DCPReader(url),
    "a strategy": lambda url, _: TensorStoreSaveShardedStrategy().save({}, url),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "c"
    dc.save(STATE | {"w": shard("w", torch.ones(2))}, folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("door", DOORS)
def test_every_function_that_takes_a_path_refuses_unknown_urls(
    checkpoint: Path, here: Path, door: str
) -> None:
    for url in ("hdfs://bucket/x", Path("hdfs://bucket/x")):
        with pytest.raises(dc.UnsupportedFormatError, match="'hdfs'"):
            DOORS[door](url, checkpoint)
    assert not list(here.iterdir())


def test_one_folder_by_several_names_is_one_folder() -> None:
    check_one_destination([(name, "zarr 2") for name in ("/a/b", "/a/./b", "/a/b/")])
    with pytest.raises(dc.CheckpointingException) as raised:
        check_one_destination([(name, "zarr 2") for name in ("/a", "/b", "/a", "/c")])
    found = [(finding.found, finding.ranks) for finding in raised.value.findings]
    assert found == [("/a", (0, 2)), ("/b", (1,)), ("/c", (3,))]


SAVERS: dict[str, Callable[[Comm, Path], Any]] = {
    "tensorstore": lambda comm, path: dc.save(tensors(comm), path, comm=comm),
    "zarr": lambda comm, path: dc.save(tensors(comm), path, "zarr", comm=comm),
    "torch_dist": lambda comm, path: dc.save(tensors(comm), path, "torch_dist", comm=comm),
    "no tensors": lambda comm, path: dc.save({"step": 1}, path, comm=comm),
    "not validated": lambda comm, path: dc.save(
        tensors(comm), path, comm=comm, validate_access_integrity=False
    ),
    "a manager": lambda comm, path: dc.CheckpointManager(path, comm=comm).save(1, tensors(comm)),
    "behind the training": lambda comm, path: dc.AsyncSaver(comm=comm).save(tensors(comm), path),
}


def tensors(comm: Comm) -> dict[str, Any]:
    return {"w": rows("w", torch.arange(2.0 * comm.world_size), comm)}


@pytest.mark.parametrize("way", SAVERS)
def test_ranks_that_name_different_folders_are_told_so_before_a_checkpoint_is_begun(
    tmp_path: Path, way: str
) -> None:
    def save_rank(comm: Comm) -> str:
        with pytest.raises(dc.CheckpointingException, match="different folders") as raised:
            SAVERS[way](comm, tmp_path / f"run-{comm.rank // 2}")
        named = {str(finding.found): finding.ranks for finding in raised.value.findings}
        assert list(named.values()) == [(0, 1), (2,)]
        assert all(f"run-{i}" in path for i, path in enumerate(named))
        return str(raised.value)

    texts = run_ranks(3, save_rank)
    assert len(set(texts)) == 1
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in written] == (["manager.json"] if way == "a manager" else [])


def test_a_relative_and_an_absolute_name_are_one_folder(here: Path) -> None:
    run_ranks(2, lambda comm: dc.save(tensors(comm), "c" if comm.rank else here / "c", comm=comm))
    assert dc.check_is_distributed_checkpoint(here / "c")


@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_relative_name_that_goes_up_is_a_folder_as_any_other(here: Path, backend: str) -> None:
    """TensorStore takes no path with ".." in it."""
    state = {"w": shard("w", torch.ones(4)), "step": 1}
    dc.save(state, "../c", backend)
    assert dc.check_is_distributed_checkpoint(here.parent / "c")
    template = {"w": shard("w", torch.zeros(4))}
    assert dc.load(template, "../c", verify=True)["w"].tolist() == [1] * 4
    assert dc.Checkpoint.open("../c")["w"][1:3].tolist() == [1, 1]
    assert list(dc.load_tensors_metadata("../c")) == ["w"]
    dc.verify_checkpoint("../c")
    convert("../c", "../d", "tensorstore")
    dc.remove_sharded_tensors("../d", "w")
    assert dc.load({}, "../d") == {"step": 1}


def test_names_are_compared_although_the_plan_is_used_again(tmp_path: Path) -> None:
    def train(comm: Comm) -> None:
        cache = dc.PlanCache()
        for step in range(2):
            dc.save(tensors(comm), tmp_path / f"{step}", comm=comm, plan_cache=cache)
        with pytest.raises(dc.CheckpointingException, match="different folders"):
            dc.save(tensors(comm), tmp_path / f"2-{comm.rank}", comm=comm, plan_cache=cache)
        dc.save(tensors(comm), tmp_path / "3", comm=comm, plan_cache=cache)

    run_ranks(2, train)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]
    assert dc.load_tensors_metadata(tmp_path / "3")["w"].global_shape == (4,)


def test_a_process_of_several_that_are_not_connected_is_not_taken_for_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save(STATE, tmp_path / "c")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    users: list[Callable[[], Any]] = [
        lambda: dc.save(STATE, tmp_path / "d"),
        lambda: dc.async_save(STATE, tmp_path / "d"),
        lambda: dc.CheckpointManager(tmp_path / "d"),
        lambda: dc.load({}, tmp_path / "c"),
        default_comm,
    ]
    for use in users:
        with pytest.raises(dc.CheckpointingException) as raised:
            use()
        for word in ("init_process_group", "SingleProcess()", "WORLD_SIZE"):
            assert word in str(raised.value)
        assert raised.value.findings[0].ranks == (1,)
    assert not (tmp_path / "d").exists()
    dc.save(STATE, tmp_path / "d", comm=SingleProcess())
    assert dc.load({}, tmp_path / "d", comm=SingleProcess()) == STATE


def test_looking_into_a_checkpoint_needs_no_other_ranks(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert dc.Checkpoint.open(checkpoint)["w"][:].tolist() == [1, 1]
    assert dc.load_common_state_dict(checkpoint) == STATE
    assert list(dc.load_tensors_metadata(checkpoint)) == ["w"]
    dc.verify_checkpoint(checkpoint)
    convert(checkpoint, tmp_path / "new", "zarr:2")
    for command in ("ls", "stats", "verify", "plan"):
        result = CliRunner().invoke(app, [command, str(checkpoint)])
        assert not result.exit_code, result.output


@pytest.mark.parametrize("world_size", ["1", "", "many", None])
def test_a_process_that_is_alone_needs_no_process_group(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None
) -> None:
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert type(default_comm()) is SingleProcess


@pytest.mark.parametrize("memory", [None, "/dev/shm"])
def test_a_new_name_replaces_no_file(tmp_path: Path, memory: str | None) -> None:
    """Where there are no links, and where not even a rename is possible: to another file system."""
    mine, copied_to = tmp_path / "mine", tempfile.TemporaryDirectory(dir=memory)
    mine.write_text("mine")
    with copied_to as name, without_links(kernel_copies=False):
        folder = Path(name)
        (folder / "theirs").write_text("theirs")
        with pytest.raises(FileExistsError, match="theirs"):
            rename_new(mine, folder / "theirs")
        with pytest.raises(FileNotFoundError):
            rename_new(tmp_path / "nothing", folder / "new")
        assert (folder / "theirs").read_text() == "theirs"
        rename_new(mine, folder / "new")
        assert {path.name: path.read_text() for path in folder.iterdir()} == {
            "theirs": "theirs",
            "new": "mine",
        }
    assert not mine.exists()
