"""What a save waits for: every file and folder once, or with ``Durability.PAGE_CACHE`` no disk."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dist_checkpointing import save
from dist_checkpointing.comm import Comm
from dist_checkpointing.interop import DCPWriter
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import (
    PlannedSaveStrategy,
    StrategyAction,
    Zarr3SaveShardedStrategy,
    get_default_strategy,
)
from dist_checkpointing.testing.simulation.world import SHARED, World
from faults import path_of, replaced
from simulated_states import state_of
from states import BACKENDS

FOLDER = f"{SHARED}/run/c"


def synced(backend: tuple[str, int], durability: Durability) -> tuple[Counter[str], set[str]]:
    """How often a save waits for each path, and all that it has made."""
    kind = type(get_default_strategy(StrategyAction.SAVE_SHARDED, *backend))
    assert issubclass(kind, PlannedSaveStrategy)
    world = World(1, keeps_log=True)

    def work(comm: Comm) -> None:
        state: dict[str, Any] = {"rows": state_of(comm, 1)["rows"], "step": 1}
        options = StorageOptions(durability=durability)
        save(state, FOLDER, kind(options=options), comm=comm)

    def play() -> set[str]:
        assert world.launch(1, work).results[0] is None
        return {f"{SHARED}{path}" for path, _ in world.shared.tree()} - {f"{SHARED}/lost+found"}

    made = world.run(play)
    paths = [line.path for line in world.log if line.name == "fsync"]
    return Counter(re.sub(r"\.[0-9a-f]{8}\.tmp$", "", path) for path in paths), made


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_waits_for_all_that_it_has_made(backend: tuple[str, int]) -> None:
    """And once, but where names have come in between: of the attempt, all data, and the commit."""
    counts, made = synced(backend, Durability.FSYNC)
    assert counts == dict.fromkeys(made, 1) | {SHARED: 1, FOLDER: 3, f"{FOLDER}/.dckpt": 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_into_the_page_cache_waits_for_nothing(backend: tuple[str, int]) -> None:
    counts, _ = synced(backend, Durability.PAGE_CACHE)
    assert not counts


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("durability", Durability)
def test_a_save_by_dcp_does_so_too(tmp_path: Path, durability: Durability) -> None:
    paths = set[Path]()

    def fsync(real: Callable[[int], None], descriptor: int) -> None:
        paths.add(path_of(descriptor))
        real(descriptor)

    strategy = Zarr3SaveShardedStrategy(options=StorageOptions(durability=durability))
    with replaced("os.fsync", fsync):
        dcp_save({"w": torch.ones(6)}, storage_writer=DCPWriter(tmp_path / "c", strategy))
    folders = {path for path in (tmp_path / "c").rglob("*") if path.is_dir()}
    if durability is Durability.FSYNC:
        assert folders <= paths
    else:
        assert not paths
