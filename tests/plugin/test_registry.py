"""Backends are found by name, from what is installed."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.strategies import (
    StrategyAction,
    Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy,
    available_strategies,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from states import shard

Install = Callable[..., None]


def state() -> dict[str, Any]:
    return {"w": shard("w", torch.arange(6.0))}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts another distribution with these entry points on the path."""

    def install(**entry_points: str) -> None:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        info = folder / "another-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        text = "\n".join(["[dist_checkpointing.strategies]", *lines])
        (info / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = {action: copy.copy(known) for action, known in default_strategies.items()}
    yield
    default_strategies.clear()
    default_strategies.update(before)


def test_found_by_name_and_again_on_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dc.save(state(), tmp_path / "c", "npy")
    config = json.loads((tmp_path / "c" / "metadata.json").read_text())
    assert (config["sharded_backend"], config["sharded_backend_version"]) == ("npy", 1)
    assert list((tmp_path / "c" / "w").glob("*.npy"))
    result = dc.load({"w": shard("w", torch.empty(6))}, tmp_path / "c")
    assert torch.equal(result["w"], torch.arange(6.0))
    monkeypatch.undo()  # it is not installed any more
    with pytest.raises(dc.StrategyNotFoundError, match="npy") as raised:
        dc.load({}, tmp_path / "c")
    assert "zarr 2" in str(raised.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("module_that_nobody_has:Save", "No module named 'module_that_nobody_has'"),
        ("npy_backend:NoSuchClass", "NoSuchClass"),
    ],
)
def test_what_an_entry_point_names_is_missing(
    tmp_path: Path, install: Install, place: str, said: str
) -> None:
    install(**{"save_sharded.broken.1": place})
    assert ("broken", 1) in available_strategies(StrategyAction.SAVE_SHARDED)
    with pytest.raises(dc.CheckpointingException) as raised:
        dc.save(state(), tmp_path / "c", "broken")
    text = str(raised.value)
    assert "Cannot import a default strategy for: ('save_sharded', 'broken', 1). Error: " in text
    assert said in text
    assert "Hint: " in text
    # The others do not suffer.
    dc.save(state(), tmp_path / "c", "npy")


def test_malformed_entry_points_are_ignored(tmp_path: Path, install: Install) -> None:
    before = available_strategies(StrategyAction.SAVE_SHARDED)
    install(
        **{
            "save_sharded.npy": "npy_backend:NpySave",
            "save_sharded.npy.two": "npy_backend:NpySave",
            "save_sharded..3": "npy_backend:NpySave",
            "nonsense": "npy_backend:NpySave",
        }
    )
    assert available_strategies(StrategyAction.SAVE_SHARDED) == before
    dc.save(state(), tmp_path / "c", "npy")


@pytest.mark.usefixtures("clean_registry")
def test_a_name_means_its_newest_version(tmp_path: Path) -> None:
    kind: Any = type(get_default_strategy(StrategyAction.SAVE_SHARDED, "npy", 1))
    for version in (9, 10):  # 10 is newer than 9, although not as text
        own = type("Own", (kind,), {"writes": ("npy", version)})()
        register_default_strategy(StrategyAction.SAVE_SHARDED, "npy", version, own)
    for selection, version in (("npy", 10), (("npy", 1), 1)):
        folder = tmp_path / str(version)
        dc.save(state(), folder, selection)
        config = json.loads((folder / "metadata.json").read_text())
        assert config["sharded_backend_version"] == version


def test_an_entry_point_does_not_replace_a_built_in_backend(
    tmp_path: Path, install: Install
) -> None:
    install(**{"save_sharded.zarr.2": "npy_backend:NpySave"})
    strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 2)
    assert isinstance(strategy, Zarr3SaveShardedStrategy)
    dc.save(state(), tmp_path / "c", ("zarr", 2))


@pytest.mark.usefixtures("clean_registry")
def test_what_is_registered_by_hand_comes_first(tmp_path: Path) -> None:
    for backend, version in (("npy", 1), ("zarr", 2)):
        mine = Zarr3SaveShardedStrategy(codec="zstd")
        register_default_strategy(StrategyAction.SAVE_SHARDED, backend, version, mine)
        for _ in range(2):  # and stays
            assert get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version) is mine
        dc.save(state(), tmp_path / backend, (backend, version))
        assert '"zstd"' in (tmp_path / backend / "w" / "zarr.json").read_text()


@pytest.mark.usefixtures("clean_registry")
def test_registered_by_hand_under_a_new_name(tmp_path: Path) -> None:
    known = available_strategies(StrategyAction.SAVE_SHARDED)
    save_npy = get_default_strategy(StrategyAction.SAVE_SHARDED, "npy", 1)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "mine", 3, save_npy)
    found = available_strategies(StrategyAction.SAVE_SHARDED)
    assert found == sorted([*known, ("mine", 3)])
    dc.save(state(), tmp_path / "c", "mine")
    # The checkpoint says what wrote it, not under which name that was found.
    assert json.loads((tmp_path / "c" / "metadata.json").read_text())["sharded_backend"] == "npy"


@pytest.mark.parametrize("selection", [3, b"npy", object(), ("npy",), ("npy", 1, 2)])
def test_a_selection_that_is_none(tmp_path: Path, selection: Any) -> None:
    with pytest.raises(dc.CheckpointingException):
        dc.save(state(), tmp_path / "c", selection)
    assert not (tmp_path / "c").exists()


def test_a_strategy_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    reader = get_default_strategy(StrategyAction.LOAD_SHARDED, "npy", 1)
    with pytest.raises(dc.CheckpointingException, match="SaveShardedStrategy"):
        dc.save(state(), tmp_path / "c", reader)
    dc.save(state(), tmp_path / "c", "npy")
    writer = get_default_strategy(StrategyAction.SAVE_SHARDED, "npy", 1)
    for other, words in ((writer, "LoadShardedStrategy"), (("zarr", 2), "backend")):
        with pytest.raises(dc.CheckpointingException, match=words):
            dc.load(state(), tmp_path / "c", other)


@pytest.mark.usefixtures("clean_registry")
def test_a_lookup_finds_what_is_built_in_or_installed() -> None:
    found = default_strategies["save_sharded"]["zarr", 1]
    assert str(found) == "ZarrSaveShardedStrategy(zarr, 1)"
    assert str(default_strategies["save_sharded"]["npy", 1]) == "NpySave(npy, 1)"
    for action in StrategyAction:
        found = default_strategies[action.value]
        assert list(found) == available_strategies(action)
        assert {key: type(found[key]) for key in found} == {k: type(s) for k, s in found.items()}
    assert {*default_strategies} == {action.value for action in StrategyAction}
    assert ("zarr", 1) in default_strategies["save_sharded"]
    assert ("zarr", 7) not in default_strategies["save_sharded"]
    own = Zarr3SaveShardedStrategy()
    register_default_strategy(StrategyAction.SAVE_SHARDED, "npy", 1, own)
    assert default_strategies["save_sharded"]["npy", 1] is own
    with pytest.raises(KeyError, match="nothing"):
        _ = default_strategies["load_sharded"]["nothing", 1]
    by_name: Any = partial(get_default_strategy, backend="zarr", version=1)
    for look_up in (default_strategies.__getitem__, by_name):
        with pytest.raises(dc.StrategyNotFoundError, match=r"mean 'save_sharded'.*load_common, "):
            look_up("save_shard")


@pytest.mark.parametrize(
    ("action", "strategy", "said"),
    [
        (StrategyAction.SAVE_SHARDED, Zarr3LoadShardedStrategy(), "Derive from SaveSharded"),
        (StrategyAction.SAVE_SHARDED, Zarr3SaveShardedStrategy, "Make an object of the class"),
        (StrategyAction.LOAD_COMMON, None, "found NoneType"),
    ],
)
def test_the_wrong_kind_is_refused_at_once(
    action: StrategyAction, strategy: object, said: str
) -> None:
    with pytest.raises(dc.CheckpointingException, match="cannot register a strategy") as raised:
        register_default_strategy(action, "mine", 1, strategy)
    assert said in str(raised.value)
    assert ("mine", 1) not in available_strategies(action)


def test_a_class_that_is_still_abstract_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    (tmp_path / "abstract_backend.py").write_text(
        "from dist_checkpointing.strategies.base import SaveShardedStrategy\n"
        "class Abstract(SaveShardedStrategy):\n"
        "    def __init__(self):\n"
        "        super().__init__('mine', 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    install(**{"save_sharded.mine.1": "abstract_backend:Abstract"})
    with pytest.raises(
        dc.CheckpointingException, match=r"abstract class Abstract .*save"
    ) as raised:
        dc.save(state(), tmp_path / "c", "mine")
    assert "cannot make the strategy for ('save_sharded', 'mine', 1)" in str(raised.value)
    assert not (tmp_path / "c").exists()
