"""What a user of ``torch.save`` types first: one clear error, and nothing is lost."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dist_checkpointing as dc
from dist_checkpointing.interop import DCPReader, shard_state_dict
from dist_checkpointing.strategies import TensorStoreSaveShardedStrategy
from faults import full_disk
from samples import BACKENDS
from states import BACKEND, shard

PLACES: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: dc.save({"step": 1}, path),
    "async_save": lambda path: dc.async_save({"step": 1}, path),
    "load": lambda path: dc.load({}, path),
    "open": dc.Checkpoint.open,
    "manager": dc.CheckpointManager,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ({"step": 1}, None, 3, b"ckpt", ""):
        with pytest.raises(dc.CheckpointingException, match="not a path of a checkpoint") as raised:
            PLACES[place](path)
        assert not isinstance(raised.value, dc.RankFailedError)
        (finding,) = raised.value.findings
        assert finding.remedy
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("state", [torch.nn.Linear(2, 2), torch.ones(2), [1], None, "text"])
def test_what_is_no_state_dict(tmp_path: Path, state: Any) -> None:
    dc.save({}, tmp_path / "there")
    for attempt in (
        lambda: dc.save(state, tmp_path / "new"),
        lambda: dc.load(state, tmp_path / "there"),
    ):
        with pytest.raises(dc.InvalidShardingError, match=r"model\.state_dict\(\)"):
            attempt()
    assert not (tmp_path / "new").exists()


def nested(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {"bottom": 1}
    for _ in range(levels):
        state = {"a": state}
    return state


HOLDING_ITSELF: dict[str, Any] = {}
HOLDING_ITSELF["self"] = HOLDING_ITSELF


def test_nests_without_end(tmp_path: Path) -> None:
    dc.save({"step": 1}, tmp_path / "c")
    for state in (HOLDING_ITSELF, nested(500), nested(20_000)):
        with pytest.raises(dc.InvalidShardingError, match="nested too deeply") as raised:
            dc.save({"state": state}, tmp_path / "new")
        assert "Traceback" not in str(raised.value)
        assert not (tmp_path / "new" / "metadata.json").exists()
    assert dc.load({}, tmp_path / "c") == {"step": 1}


@pytest.mark.parametrize("below", ["", "run/1000"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(dc.CheckpointExistsError, match="a file is in the way"):
        dc.save({"step": 1}, tmp_path / "file" / below)
    with (
        dc.CheckpointManager(tmp_path / "file" / below) as manager,
        pytest.raises(dc.CheckpointingException, match="a file is in the way"),
    ):
        manager.save(1, {"step": 1})
    assert (tmp_path / "file").read_text() == "mine"


def test_a_manager_and_an_open_checkpoint_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    values = torch.arange(6.0)
    dc.save({"w": shard("w", values), "step": 1}, "c")
    opened, manager = dc.Checkpoint.open("c"), dc.CheckpointManager("run")
    manager.save(1, {"step": 1})
    monkeypatch.chdir("other")
    assert torch.equal(opened["w"][:], values)
    assert opened.common == {"step": 1}
    assert str(opened.path) == "c"
    with pytest.raises(KeyError, match="holds no tensor 0"):
        opened[0]  # type: ignore[index]
    manager.async_save(2, {"step": 2}).result()
    manager.save(3, {"step": 3})
    assert manager.load({}) == {"step": 3}
    manager.close()
    assert not os.listdir(tmp_path / "other")  # noqa: PTH208
    steps = sorted(folder.name for folder in (tmp_path / "run").glob("step-*"))
    assert steps == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_full_disk_is_noticed_before_the_save(tmp_path: Path) -> None:
    state = {"w": shard("w", torch.zeros(4, 4))}
    with full_disk():
        for attempt in (dc.save, lambda *given: dc.async_save(*given).result()):
            with pytest.raises(dc.CheckpointingException, match=r"not enough free .*64 bytes"):
                attempt(state, tmp_path / "run" / "c")
        assert not (tmp_path / "run").exists()
        # Nobody knows how much room this makes, or takes.
        dc.save(state, tmp_path, overwrite=True)
        dc.save(state, tmp_path / "c", BACKENDS["zarr-2-zstd"]())


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    dc.save({"step": 1}, "~/c")
    assert dc.load({}, home / "c") == dc.load({}, "~/c") == {"step": 1}
    assert dc.Checkpoint.open("~/c").path == home / "c"
    assert dc.CheckpointManager("~/run").root == home / "run"
    dc.save({"step": 2}, "./~/c")
    assert dc.load({}, "./~/c") == dc.load({}, tmp_path / "~" / "c") == {"step": 2}


@BACKEND
def test_a_load_between_forward_and_backward(tmp_path: Path, backend: Any) -> None:
    weight, part = torch.ones(3, requires_grad=True), torch.ones(6)[:3].requires_grad_()
    dc.save({"w": shard("w", torch.zeros(3)), "plain": torch.zeros(3)}, tmp_path, backend)
    templates: list[Any] = [{"w": shard("w", weight)}, {"w": shard("w", part)}, {"plain": weight}]
    for template, filled in zip(templates, (weight, part, weight), strict=True):
        loss = filled.square().sum()
        dc.load(template, tmp_path)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)


def test_saved_plain_and_loaded_wrapped(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    dc.save({"model": model.state_dict()}, tmp_path / "c")
    template = shard_state_dict({"model": torch.nn.Linear(2, 3).state_dict(), "new": torch.ones(1)})
    with pytest.raises(dc.StateMismatchError) as raised:
        dc.load(template, tmp_path / "c")
    problems = {finding.key: finding for finding in raised.value.findings}
    assert "saved without being wrapped" in problems["model.weight"].problem
    assert "state_dict['model']['weight']" in problems["model.weight"].problem
    assert "not in the checkpoint" in problems["new"].problem
    assert torch.equal(dc.load({}, tmp_path / "c")["model"]["weight"], model.weight)


@pytest.mark.parametrize("place", PLACES)
def test_a_store_without_its_package(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(dc.UnsupportedFormatError, match="object stores need obstore") as raised:
        PLACES[place]("s3://bucket/run")
    assert "pip install 'dist_checkpointing[object]'" in str(raised.value)


def test_a_run_in_place_of_a_checkpoint(tmp_path: Path) -> None:
    with dc.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"step": 1})
    for attempt in (dc.load, lambda _, path: dc.Checkpoint.open(path)):
        with pytest.raises(dc.CheckpointNotFoundError, match=r"CheckpointManager\(path\)\.load"):
            attempt({}, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize(
    ("overlapping", "strategy"),
    [
        (torch.zeros(1, 4).expand(3, 4), None),
        (torch.zeros(3, 1).expand(3, 4), ("torch_dist", 1)),
        (torch.zeros(6).as_strided((3, 4), (1, 1)), ("zarr", 2)),
    ],
)
def test_a_tensor_to_fill_that_overlaps_itself(
    tmp_path: Path, overlapping: torch.Tensor, strategy: Any
) -> None:
    """Also where DCP fills it."""
    values = torch.arange(12.0).reshape(3, 4)
    dc.save({"w": shard("w", values)}, tmp_path / "c", strategy)
    with pytest.raises(dc.StateMismatchError, match="share memory"):
        dc.load({"w": shard("w", overlapping)}, tmp_path / "c")
    with pytest.raises((CheckpointException, dc.StateMismatchError), match="share memory"):
        dcp_load({"w": overlapping}, storage_reader=DCPReader(tmp_path / "c"))
    assert not overlapping.any()


def test_what_is_no_checkpoint_and_no_state_dict_leads_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.txt").write_text("hello")
    with pytest.raises(
        dc.CheckpointNotFoundError, match=r"nor a file of safetensors or torch\.save"
    ):
        dc.load({}, "w.txt")
    with pytest.raises(dc.CheckpointNotFoundError, match=rf"current folder is {tmp_path}\."):
        dc.load({}, "missing")
    with pytest.raises(dc.CheckpointingException, match="Make an object of the class"):
        dc.save({"a": 1}, "c", TensorStoreSaveShardedStrategy)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model", "other"])
def test_a_module_in_a_template_is_not_passed_over(tmp_path: Path, name: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    dc.save({"model": model.state_dict(), "step": 1}, tmp_path / "c")
    for given, kind in ((model, "Linear"), (optimizer, "SGD")):
        with pytest.raises(dc.StateMismatchError, match=rf"found {kind}\. .*interop\.TorchState"):
            dc.load({name: given}, tmp_path / "c")
    dc.save({name: model}, tmp_path / "pickled", trusted=True)
    for template in ({name: torch.nn.Linear(2, 2)}, {name: None}, {}):
        loaded = dc.load(template, tmp_path / "pickled", trusted=True)[name]
        assert torch.equal(loaded.weight, model.weight)
